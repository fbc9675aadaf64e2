"""Ending an answer that is being written, by its ``id``, in the ways that clients know.

    DELETE /v1/requests/{id}             any answer
    DELETE /v1/chat/completions/{id}     ┐ what OpenAI's clients call; nothing is stored here, so that
    DELETE /v1/responses/{id}            │ only an answer under way can be meant, and 404 says that
    POST   /v1/responses/{id}/cancel     ┘ there is none

The slot is free at the next pass, and its state stays for a retry.  The request itself ends with an
error of code ``cancelled``.  Closing the connection does the same.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from gufo_gguf.server.errors import refuse
from gufo_gguf.server.state import State, StateDep
from gufo_gguf.server.wire import JsonResponse

router = APIRouter()


def _cancel(state: State, answer_id: str, body: dict[str, Any]) -> Response:
    if not state.active.cancel(answer_id):
        raise refuse("there is no such answer under way, and none is stored", status=404, code="not_found")
    return JsonResponse({"id": answer_id, **body})


@router.delete("/v1/requests/{request_id}", response_model=None)
async def cancel(request_id: str, state: StateDep) -> Response:
    """Cancel an answer that is being written, by its ``id``."""
    return _cancel(state, request_id, {"object": "request", "cancelled": True})


@router.delete("/v1/chat/completions/{completion_id}", response_model=None)
async def delete_completion(completion_id: str, state: StateDep) -> Response:
    """Cancel a chat completion that is being written."""
    return _cancel(state, completion_id, {"object": "chat.completion.deleted", "deleted": True})


@router.delete("/v1/responses/{response_id}", response_model=None)
async def delete_response(response_id: str, state: StateDep) -> Response:
    """Cancel a response that is being written."""
    return _cancel(state, response_id, {"object": "response.deleted", "deleted": True})


@router.post("/v1/responses/{response_id}/cancel", response_model=None)
async def cancel_response(response_id: str, state: StateDep) -> Response:
    """Cancel a response that is being written."""
    model = state.engine.model_id
    return _cancel(state, response_id, {"object": "response", "status": "cancelled", "model": model, "output": []})
