"""GET and HEAD /: what this is; a page for browsers, a line of JSON for everything else.

The page holds nothing of its own: it asks this server's endpoints, with a key where one is wanted, and
draws what runs, the tiers, the tree of checkpoints and the last decisions.  It loads nothing from
anywhere else, and the policy it is sent with lets it do nothing else.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response

from gufo_gguf import __version__
from gufo_gguf.server.state import StateDep
from gufo_gguf.server.wire import JsonResponse

router = APIRouter()

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


@cache
def _page() -> str:
    return (Path(__file__).parents[1] / "page.html").read_text(encoding="utf-8")


@router.get("/", response_model=None, include_in_schema=False)
@router.head("/", response_model=None, include_in_schema=False)
async def root(request: Request, state: StateDep, format: str = "") -> Response:
    if format != "json" and "text/html" in request.headers.get("accept", ""):
        return HTMLResponse(_page(), headers={"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"})
    return JsonResponse({"name": "gufo", "version": __version__, "status": "ok"})
