"""What the cache holds, and why: GET /v1/cache, /v1/cache/check, /v1/cache/events; POST /v1/cache/prefetch.

Events carry numbers, reasons and boundaries; never text or token ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse

from gufo_gguf.core.errors import Overloaded
from gufo_gguf.engine.prefetch import Prefetched
from gufo_gguf.server.chat.openai_in import chat_ask
from gufo_gguf.server.chat.prepare import prepare_chat
from gufo_gguf.server.schema.chat import ChatBody
from gufo_gguf.server.state import ScopeDep, State, StateDep
from gufo_gguf.server.wire import JsonResponse, named_frame

router = APIRouter()

_POLL_S = 0.5
_FOLLOWERS = 64
_PAGE = 1000


@router.get("/v1/cache", response_model=None)
async def cache(state: StateDep) -> Response:
    """Budgets, checkpoints, chunks and tiers."""
    status = await state.ask(state.engine.cache_status)
    return JsonResponse({"object": "cache", "model": state.engine.model_id, **status})


@router.get("/v1/cache/check", response_model=None)
async def check(state: StateDep) -> Response:
    """Recount every reference and byte; ``problems`` is empty unless the cache is broken."""
    problems = await state.ask(state.engine.check)
    return JsonResponse({"object": "cache.check", "ok": not problems, "problems": problems})


@router.post("/v1/cache/prefetch", response_model=None)
async def prefetch(body: ChatBody, state: StateDep, scope: ScopeDep) -> Response:
    """Have the state of a chat request's prompt in RAM before the request comes; computes nothing.

    The body is that of /v1/chat/completions.  It goes through an idle slot: 503 when there is none.
    """

    def work() -> Prefetched:
        request = prepare_chat(chat_ask(body, state.settings), state, scope).prepared.requests[0]
        n_prompt.append(len(request.tokens))
        return state.engine.prefetch(request)

    n_prompt: list[int] = []
    found = await state.ask(work)
    return JsonResponse(
        {
            "object": "cache.prefetch",
            "prompt_tokens": n_prompt[0],
            "boundary": found.boundary,
            "tokens": found.loaded_tokens,
            "bytes": found.loaded_bytes,
            "source": str(found.source),
            "kept": found.kept,
            "miss_reason": None if found.miss_reason is None else str(found.miss_reason),
            "restore_ms": round(found.restore_ms, 3),
        }
    )


Since = Annotated[int, Query(ge=0, description="Only events with a larger sequence number.")]
Limit = Annotated[int, Query(ge=1, le=10_000)]


@router.get("/v1/cache/events", response_model=None)
async def events(
    request: Request, state: StateDep, since: Since = 0, limit: Limit = _PAGE, stream: bool = False
) -> Response:
    """Decisions, oldest first; as server-sent events with ``stream=true`` or by the Accept header."""
    if stream or "text/event-stream" in request.headers.get("accept", ""):
        if state.followers >= _FOLLOWERS:
            raise Overloaded(f"{_FOLLOWERS} streams of events are open already")
        return StreamingResponse(_follow(state, request, since), media_type="text/event-stream")
    found = await state.ask(partial(state.engine.cache_events, since, limit))
    return JsonResponse({"object": "list", "data": found})


async def _follow(state: State, request: Request, since: int) -> AsyncIterator[bytes]:
    """Polled: the decisions are the owner thread's, and it is not to wait for readers."""
    silent_s = 0.0
    state.followers += 1
    try:
        while not state.active.draining and not await request.is_disconnected():
            found = await state.ask(partial(state.engine.cache_events, since, _PAGE))
            for event in found:
                since = max(since, int(event["seq"]))
                yield named_frame("cache", event)
            silent_s = 0.0 if found else silent_s + _POLL_S
            if silent_s >= state.settings.keepalive_s:
                silent_s = 0.0
                yield named_frame("ping", {})
            if len(found) < _PAGE:
                await asyncio.sleep(_POLL_S)
    finally:
        state.followers -= 1
