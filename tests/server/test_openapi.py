"""The OpenAPI document against the server: requests made from it, valid and not, find documented answers only.

no 5xx · only statuses and content types that are documented · errors of the documented shape
"""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gufo_gguf.server.app import create_app
from tests.server.conftest import Running, Serve
from tests.server.standin import StandinEngine

pytestmark = pytest.mark.slow

CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
DOCUMENT = create_app(StandinEngine()).openapi()
OPERATIONS = [(path, method) for path, found in DOCUMENT["paths"].items() for method in found]


def _can_be_wrong(operation: dict[str, Any]) -> bool:
    """Has it a body or a query?  A piece of a path is always a text."""
    return "requestBody" in operation or any(p["in"] == "query" for p in operation.get("parameters", ()))


CASES = [
    (path, method, mode)
    for path, method in OPERATIONS
    for mode in GenerationMode
    if mode is GenerationMode.POSITIVE or _can_be_wrong(DOCUMENT["paths"][path][method])
]
GENERATES = ("completions", "/completion", "/messages", "/responses")


@pytest.fixture
def running(serve: Serve) -> Running:
    """Short answers: a stream of many pieces shows nothing more."""
    return serve(StandinEngine(script=lambda request: ["Hello"]))


@pytest.mark.parametrize(("path", "method", "mode"), CASES)
def test_only_documented_answers(running: Running, path: str, method: str, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_dict(DOCUMENT)
    operation = schema[path][method]
    n_examples = 40 if any(word in path for word in GENERATES) else 15

    @settings(
        max_examples=n_examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def answers(case: schemathesis.Case) -> None:
        if path == "/v1/cache/events":  # as a stream it goes on for ever
            case.query = {k: v for k, v in (case.query or {}).items() if k != "stream"}
            case.headers = {k: v for k, v in (case.headers or {}).items() if k.lower() != "accept"}
        if isinstance(case.body, dict) and isinstance(case.body.get("timeout"), float | int):
            case.body["timeout"] = 30  # a limit of microseconds is kept, and is a 504 as documented
        case.call_and_validate(base_url=running.url, checks=CHECKS, timeout=20)

    answers()


def test_streams_are_documented() -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/completion"):
        content = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]
        assert content.keys() == {"application/json", "text/event-stream"}


def test_every_api_is_in_the_document() -> None:
    paths = {path for path, _ in OPERATIONS}
    expected = {"/v1/chat/completions", "/v1/responses", "/v1/completions", "/v1/messages", "/completion", "/tokenize"}
    expected |= {"/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel", "/v1/cache/prefetch"}
    assert expected <= paths
    for path, method in OPERATIONS:
        responses = DOCUMENT["paths"][path][method]["responses"]
        assert {"200", "400", "401", "404", "413", "415", "500", "501", "503", "504"} == responses.keys()
        assert "422" not in responses
