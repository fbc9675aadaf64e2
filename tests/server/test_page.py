"""The page at /: for browsers, harmless, and true about what there is."""

from __future__ import annotations

import re

import httpx

from gufo_gguf import __version__
from gufo_gguf.server.settings import ServerSettings
from tests.server.conftest import Running, Serve

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def test_browsers_get_a_page_and_clients_json(running: Running) -> None:
    page = running.http.get("/", headers=BROWSER)
    assert page.headers["content-type"].startswith("text/html") and "<title>gufo</title>" in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for answer in (running.http.get("/"), running.http.get("/?format=json", headers=BROWSER)):
        assert answer.json() == {"name": "gufo", "version": __version__, "status": "ok"}
    assert running.http.head("/", headers=BROWSER).status_code == 200


def test_every_endpoint_that_the_page_names_is_there(running: Running) -> None:
    page = running.http.get("/", headers=BROWSER).text
    named = set(re.findall(r"<code>(/[^<]+)</code>", page))
    assert len(named) > 15
    known = running.http.get("/openapi.json").json()["paths"].keys() | {"/openapi.json"}
    assert named <= known


def test_what_the_page_reads_is_there(running: Running) -> None:
    page = running.http.get("/", headers=BROWSER).text
    paths = {path.split("?")[0] for path in re.findall(r'get\("([^"]*)"', page)} - {""}
    assert paths == {"v1/models", "slots", "v1/cache", "v1/cache/events"}
    for path in paths:
        assert running.http.get("/" + path).status_code == 200


def test_the_page_loads_nothing_from_elsewhere(running: Running) -> None:
    page = running.http.get("/", headers=BROWSER).text
    assert not re.search(r"https?://|src=|@import|innerHTML", page)


def test_the_page_needs_no_key_and_holds_none(serve: Serve) -> None:
    running = serve(settings=ServerSettings(port=0, drain_s=0.2, api_keys=("sk-walrus",)))
    page = httpx.get(running.url, headers=BROWSER)
    assert page.status_code == 200 and "walrus" not in page.text
    assert httpx.get(running.url + "/v1/cache").status_code == 401
