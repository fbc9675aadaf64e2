"""POST /v1/responses; nothing is stored, so there is nothing to get or delete afterwards."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from gufo_gguf.server.chat.answer import Answer, whole_answer
from gufo_gguf.server.chat.prepare import PreparedChat, count_tokens, prepare_chat
from gufo_gguf.server.chat.responses_in import responses_ask
from gufo_gguf.server.chat.responses_out import ResponsesStyle, ResponsesWriter, whole_response
from gufo_gguf.server.ids import new_id
from gufo_gguf.server.schema.responses import ResponsesBody
from gufo_gguf.server.sse import EventStream, collect
from gufo_gguf.server.state import ScopeDep, State, StateDep
from gufo_gguf.server.wire import JsonResponse

router = APIRouter()


def _prepare(body: ResponsesBody, state: State, scope: str) -> PreparedChat:
    return prepare_chat(responses_ask(body, state.settings), state, scope)


def _asked(body: ResponsesBody, chat: PreparedChat) -> dict[str, Any]:
    sampling = chat.prepared.requests[0].sampling
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": body.reasoning or {"effort": None, "summary": None},
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
    }


@router.post("/v1/responses", response_model=None)
@router.post("/responses", response_model=None, include_in_schema=False)
async def responses(body: ResponsesBody, request: Request, state: StateDep, scope: ScopeDep) -> Response:
    """OpenAI's responses."""
    chat = await run_in_threadpool(_prepare, body, state, scope)
    style = ResponsesStyle(
        new_id("resp_"),
        state.engine.model_id,
        int(time.time()),
        _asked(body, chat),
        n_logprobs=chat.prepared.n_logprobs,
        return_progress=bool(body.return_progress),
        timings_per_token=bool(body.timings_per_token),
    )
    parser = state.engine.chat.parser
    writer = ResponsesWriter(style, Answer(parser(chat.rendered))) if body.stream else None
    generation = state.active.start(chat.prepared.requests, style.id, body.timeout)
    if writer is not None:
        return EventStream(generation, writer, state.active, state.settings.keepalive_s, request.url.path)
    [events] = await collect(request, generation, state.active)
    answer = whole_answer(parser(chat.rendered), events)
    try:
        return JsonResponse(whole_response(style, answer))
    finally:
        answer.close()


@router.post("/v1/responses/input_tokens", response_model=None)
@router.post("/responses/input_tokens", response_model=None, include_in_schema=False)
async def responses_input_tokens(body: ResponsesBody, state: StateDep) -> Response:
    """Prompt tokens of a request; nothing is generated."""
    n = await run_in_threadpool(lambda: count_tokens(responses_ask(body, state.settings), state))
    return JsonResponse({"object": "response.input_tokens", "input_tokens": n})
