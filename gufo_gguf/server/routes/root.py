"""GET and HEAD /: what this is, for people and for clients that look whether anything is there."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from gufo_gguf import __version__
from gufo_gguf.server.state import StateDep
from gufo_gguf.server.wire import JsonResponse

router = APIRouter()


@router.get("/", response_model=None, include_in_schema=False)
@router.head("/", response_model=None, include_in_schema=False)
async def root(state: StateDep) -> Response:
    return JsonResponse({"name": "gufo", "version": __version__, "status": "ok"})
