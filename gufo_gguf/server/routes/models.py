"""GET /v1/models and /health: what is served, and whether it is ready.

Clients look for the context length under different names; all of them are here.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from gufo_gguf.server.errors import refuse
from gufo_gguf.server.state import State, StateDep
from gufo_gguf.server.wire import JsonResponse

router = APIRouter()


def model_card(state: State) -> dict[str, Any]:
    info = state.engine.info
    return {
        "id": state.engine.model_id,
        "object": "model",
        "created": int(state.started_s),
        "owned_by": "gufo",
        "aliases": [state.engine.model_id],
        "tags": [],
        "context_length": info.n_ctx,
        "context_window": info.n_ctx,
        "max_context_length": info.n_ctx,
        "max_model_len": info.n_ctx,
        "meta": {
            "n_ctx": info.n_ctx,
            "n_ctx_train": info.n_ctx_train,
            "n_vocab": info.n_vocab,
            "n_params": info.n_params,
            "size": info.model_bytes,
            "arch": info.arch,
            "memory": info.memory,
        },
    }


def _list(state: State) -> Response:
    card = model_card(state)
    # `models` is what Ollama's clients look at
    models = [{"name": card["id"], "model": card["id"], "capabilities": ["completion"], "details": {"format": "gguf"}}]
    body = {
        "object": "list",
        "data": [card],
        "models": models,
        "first_id": card["id"],
        "last_id": card["id"],
        "has_more": False,
    }
    return JsonResponse(body)


@router.get("/v1/models", response_model=None)
@router.get("/models", response_model=None, include_in_schema=False)
async def models(state: StateDep) -> Response:
    """The one model that is loaded."""
    return _list(state)


@router.get("/v1/models/{model_id:path}", response_model=None)
async def model(model_id: str, state: StateDep) -> Response:
    if model_id != state.engine.model_id:
        raise refuse(
            f"there is no model {model_id!r} here, only {state.engine.model_id!r}", status=404, code="model_not_found"
        )
    return JsonResponse(model_card(state))


@router.get("/health", response_model=None)
@router.get("/v1/health", response_model=None, include_in_schema=False)
async def health(state: StateDep) -> Response:
    """200 while requests are taken, 503 while shutting down or when the engine has failed."""
    if state.active.draining:
        return JsonResponse({"status": "shutting down"}, status_code=503)
    if getattr(state.engine, "failure", None) is not None:
        return JsonResponse({"status": "the engine failed; restart the server"}, status_code=503)
    return JsonResponse({"status": "ok"})
