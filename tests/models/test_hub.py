"""``-hf`` against a local stand-in of the hub: listing, choosing, fetching, resuming, and what goes wrong.

The endpoint is read when huggingface-hub is imported, so each case is a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from gufo_gguf.core.errors import ConfigError
from gufo_gguf.models.hub import choose, models_among, parse, quant_of
from tests.conftest import TinyModel

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Repositories by name; what was asked for."""

    url: str = ""
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
    """Files whose first transfer breaks off half way."""
    ranges: list[tuple[str, str | None]] = field(default_factory=list)
    """(file, Range header) of each transfer."""


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self.answer(send=True)

        def do_HEAD(self) -> None:
            self.answer(send=False)

        def answer(self, send: bool) -> None:
            path = self.path.partition("?")[0]
            api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/.*)?", path)
            file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.*)", path)
            name = (api or file).group(1) if api or file else ""  # type: ignore[union-attr]
            if name not in hub.repos:
                self.reply(401, {"x-error-code": "RepoNotFound"}, b'{"error": "Repository not found"}', send)
            elif api:
                siblings = [{"rfilename": f} for f in hub.repos[name]]
                body = json.dumps({"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings}).encode()
                self.reply(200, {"content-type": "application/json"}, body, send)
            elif name in hub.gated:
                self.reply(403, {"x-error-code": "GatedRepo"}, b'{"error": "gated"}', send)
            elif file and file.group(2) in hub.repos[name]:
                self.file(file.group(2), hub.repos[name][file.group(2)], send)
            else:
                self.reply(404, {"x-error-code": "EntryNotFound"}, b"", send)

        def file(self, name: str, data: bytes, send: bool) -> None:
            etag = hashlib.sha256(data).hexdigest()
            headers = {"etag": f'"{etag}"', "x-repo-commit": COMMIT, "accept-ranges": "bytes"}
            wanted = self.headers.get("Range")
            if not send:
                self.reply(200, headers, data, send)
                return
            hub.ranges.append((name, wanted))
            start = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted else 0
            if start:
                headers["content-range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            if name in hub.cut:
                hub.cut.discard(name)
                self.head(200, headers, len(data))
                self.wfile.write(data[: len(data) // 2])
                self.wfile.flush()
                self.close_connection = True
                return
            self.reply(206 if start else 200, headers, data[start:], send)

        def head(self, status: int, headers: dict[str, str], length: int) -> None:
            self.send_response(status)
            for key, value in {**headers, "content-length": str(length)}.items():
                self.send_header(key, value)
            self.end_headers()

        def reply(self, status: int, headers: dict[str, str], body: bytes, send: bool) -> None:
            self.head(status, headers, len(body))
            if send:
                self.wfile.write(body)

    return Handler


@pytest.fixture
def hub() -> Iterator[Hub]:
    found = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(found))
    server.daemon_threads = True
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield found
    server.shutdown()
    server.server_close()


@dataclass
class Fetched:
    path: Path | None
    said: str
    error: str


def environment(hub: Hub, home: Path) -> dict[str, str]:
    """Of a process that knows this hub alone, and has fetched nothing yet."""
    settings = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    inherited = {k: v for k, v in os.environ.items() if not k.upper().endswith("_PROXY") and not k.startswith("HF_")}
    return {**inherited, **settings}


def fetch(hub: Hub, home: Path, spec: str, **env: str) -> Fetched:
    code = (
        "import sys\nfrom gufo_gguf.core.errors import ConfigError\nfrom gufo_gguf.models.default import find_model\n"
        "try:\n    print(find_model(hf_repo=sys.argv[1]))\n"
        "except ConfigError as error:\n    print('refused:', error, file=sys.stderr)\n    sys.exit(1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, spec],
        capture_output=True, text=True, timeout=120, env={**environment(hub, home), **env},
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    error = done.stderr.partition("refused: ")[2].strip()
    return Fetched(Path(done.stdout.strip()) if done.returncode == 0 else None, done.stderr, error)


def data(name: str, n_bytes: int = 4096) -> bytes:
    return (name.encode() * n_bytes)[:n_bytes]


def repo(*names: str) -> dict[str, bytes]:
    return {"README.md": b"hello", **{name: data(name) for name in names}}


def test_the_default_quantisation_is_fetched_once(hub: Hub, tmp_path: Path) -> None:
    hub.repos["org/model"] = repo("m-Q8_0.gguf", "m-Q4_K_M.gguf", "mmproj-F16.gguf")
    first = fetch(hub, tmp_path, "org/model")
    assert first.path is not None and first.path.read_bytes() == data("m-Q4_K_M.gguf"), first.said
    assert "fetching m-Q4_K_M.gguf from org/model" in first.said
    again = fetch(hub, tmp_path, "org/model")
    assert again.path == first.path and "fetching" not in again.said
    assert [name for name, _ in hub.ranges] == ["m-Q4_K_M.gguf"]


def test_a_named_quantisation_in_any_case(hub: Hub, tmp_path: Path) -> None:
    hub.repos["org/model"] = repo("m-Q8_0.gguf", "m-Q4_K_M.gguf")
    found = fetch(hub, tmp_path, "org/model:q8_0")
    assert found.path is not None and found.path.name == "m-Q8_0.gguf"


def test_all_parts_of_a_split_model(hub: Hub, tmp_path: Path) -> None:
    parts = [f"Q4_K_M/m-Q4_K_M-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    hub.repos["org/big"] = repo(*parts, "Q8_0/m-Q8_0-00001-of-00002.gguf")
    found = fetch(hub, tmp_path, "org/big")
    assert found.path is not None and found.path.name == "m-Q4_K_M-00001-of-00003.gguf", found.said
    beside = sorted(p.name for p in found.path.parent.iterdir())
    assert beside == [Path(p).name for p in parts] and found.path.read_bytes() == data(parts[0])


def test_a_transfer_that_broke_off_goes_on_where_it_was(hub: Hub, tmp_path: Path) -> None:
    name = "m-Q4_K_M.gguf"
    hub.repos["org/model"] = {name: data(name, 40 << 20)}
    hub.cut.add(name)
    found = fetch(hub, tmp_path, "org/model")
    if found.path is None:  # depending on the library's release it resumes by itself or on the next try
        found = fetch(hub, tmp_path, "org/model")
    assert found.path is not None and found.path.read_bytes() == data(name, 40 << 20), found.said
    resumed = [wanted for _, wanted in hub.ranges[1:]]
    assert resumed and all(wanted is not None and wanted != "bytes=0-" for wanted in resumed), hub.ranges


def test_what_is_there_is_listed_when_the_choice_is_not_clear(hub: Hub, tmp_path: Path) -> None:
    hub.repos["org/model"] = repo("m-Q8_0.gguf", "m-IQ2_XXS.gguf", "m-BF16.gguf")
    for spec in ("org/model", "org/model:Q4_K_M"):
        error = fetch(hub, tmp_path, spec).error
        assert "Q4_K_M" in error and "BF16, IQ2_XXS, Q8_0" in error
    assert hub.ranges == []


def test_refusals_say_what_to_do(hub: Hub, tmp_path: Path) -> None:
    hub.repos["org/gated"] = repo("m-Q4_K_M.gguf")
    hub.gated.add("org/gated")
    hub.repos["org/text"] = repo()
    gated = fetch(hub, tmp_path, "org/gated").error
    assert "org/gated" in gated and "HF_TOKEN" in gated and "page" in gated
    missing = fetch(hub, tmp_path, "org/nothing").error
    assert "org/nothing" in missing and "no such repository" in missing and "HF_TOKEN" in missing
    assert "no GGUF model" in fetch(hub, tmp_path, "org/text").error
    assert "ORG/REPO" in fetch(hub, tmp_path, "nonsense").error


def test_without_a_network(hub: Hub, tmp_path: Path) -> None:
    hub.repos["org/model"] = repo("m-Q4_K_M.gguf", "m-Q8_0.gguf")
    fetched = fetch(hub, tmp_path, "org/model").path
    for env in ({"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}):
        held = fetch(hub, tmp_path, "org/model", **env)
        assert held.path == fetched, held.said
        other = fetch(hub, tmp_path, "org/other", **env)
        assert "cannot be reached" in other.error and "HF_ENDPOINT" in other.error
        absent = fetch(hub, tmp_path, "org/model:Q8_0", **env)
        assert "name one of: Q4_K_M" in absent.error


@pytest.mark.native
def test_from_the_hub_to_an_answer(hub: Hub, tmp_path: Path, tiny_model: TinyModel) -> None:
    hub.repos["org/tiny"] = {"tiny-Q8_0.gguf": tiny_model("llama").read_bytes()}
    command = [sys.executable, "-m", "gufo_gguf.cli.main", "chat", "-hf", "org/tiny", "-c", "512", "-t", "1", "-n", "4"]
    done = subprocess.run(
        command, input="Hello?\n", capture_output=True, text=True, timeout=120, env=environment(hub, tmp_path)
    )
    assert done.returncode == 0, done.stderr
    assert "fetching tiny-Q8_0.gguf from org/tiny" in done.stderr and done.stdout.strip()
    wrong = [*command[:5], "org/tiny:Q4_0"]
    refused = subprocess.run(wrong, capture_output=True, text=True, timeout=120, env=environment(hub, tmp_path))
    assert refused.returncode == 1 and refused.stderr.startswith("gufo: ") and "name one of: Q8_0" in refused.stderr


# -- names -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("stem", "quant"),
    [
        ("gemma-3-1b-it-Q4_K_M", "Q4_K_M"),
        ("Qwen3-8B.Q5_K_S", "Q5_K_S"),
        ("m-UD-Q4_K_XL", "UD-Q4_K_XL"),
        ("UD-IQ1_S/m-UD-IQ1_S", "UD-IQ1_S"),
        ("m-iq3_xxs", "IQ3_XXS"),
        ("model.f16", "F16"),
        ("gpt-oss-20b-mxfp4", "MXFP4"),
        ("m-TQ1_0", "TQ1_0"),
        ("Q4-model", ""),
        ("model", ""),
    ],
)
def test_quantisations_by_file_name(stem: str, quant: str) -> None:
    assert quant_of(stem) == quant


def test_what_a_repository_offers() -> None:
    names = ["a-Q8_0.gguf", "mmproj-a-F16.gguf", "imatrix.gguf", "x-Q4_0-00001-of-00002.gguf", "notes.txt"]
    assert [m.files for m in models_among(names)] == [("a-Q8_0.gguf",)], "a split model with a part missing is none"
    names.append("x-Q4_0-00002-of-00002.gguf")
    assert [m.quant for m in models_among(names)] == ["Q8_0", "Q4_0"]


def test_choosing() -> None:
    one = models_among(["only.gguf"])
    assert choose("a/b", one, "").files == ("only.gguf",)
    several = models_among(["x-Q4_K_M.gguf", "y-Q4_K_M.gguf", "y-UD-Q2_K.gguf"])
    with pytest.raises(ConfigError, match=r"name the file: x-Q4_K_M.gguf, y-Q4_K_M.gguf"):
        choose("a/b", several, "")
    assert choose("a/b", several, "y-Q4_K_M.gguf").files == ("y-Q4_K_M.gguf",)
    assert choose("a/b", several, "q2_k").quant == "UD-Q2_K"


def test_how_a_repository_may_be_written() -> None:
    assert parse("o/r:Q8_0") == ("o/r", "Q8_0") and parse("https://huggingface.co/o/r") == ("o/r", "")
    for wrong in ("", "r", "o/", "a/b/c", ":Q4", "o/r r"):
        with pytest.raises(ConfigError):
            parse(wrong)
