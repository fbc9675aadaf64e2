"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from gufo_gguf.server.chat.answer import Answer, whole_answer
from gufo_gguf.server.chat.anthropic_in import anthropic_ask
from gufo_gguf.server.chat.anthropic_out import AnthropicStyle, AnthropicWriter, whole_message
from gufo_gguf.server.chat.prepare import PreparedChat, count_tokens, prepare_chat
from gufo_gguf.server.ids import new_id
from gufo_gguf.server.schema.anthropic import AnthropicBody
from gufo_gguf.server.sse import EventStream, collect
from gufo_gguf.server.state import ScopeDep, State, StateDep
from gufo_gguf.server.wire import JsonResponse

router = APIRouter()


def _prepare(body: AnthropicBody, state: State, scope: str) -> PreparedChat:
    return prepare_chat(anthropic_ask(body, state.settings), state, scope)


@router.post("/v1/messages", response_model=None)
@router.post("/messages", response_model=None, include_in_schema=False)
async def messages(body: AnthropicBody, request: Request, state: StateDep, scope: ScopeDep) -> Response:
    """Anthropic's messages."""
    chat = await run_in_threadpool(_prepare, body, state, scope)
    n_prompt = len(chat.prepared.requests[0].tokens)
    style = AnthropicStyle(new_id("msg_"), state.engine.model_id, n_prompt, body.stop_sequences)
    parser = state.engine.chat.parser
    writer = AnthropicWriter(style, Answer(parser(chat.rendered))) if body.stream else None
    generation = state.active.start(chat.prepared.requests, style.id, body.timeout)
    if writer is not None:
        return EventStream(generation, writer, state.active, state.settings.keepalive_s, request.url.path)
    [events] = await collect(request, generation, state.active)
    answer = whole_answer(parser(chat.rendered), events)
    try:
        return JsonResponse(whole_message(style, answer))
    finally:
        answer.close()


@router.post("/v1/messages/count_tokens", response_model=None)
@router.post("/messages/count_tokens", response_model=None, include_in_schema=False)
async def messages_count_tokens(body: AnthropicBody, state: StateDep) -> Response:
    """Prompt tokens of a request; nothing is generated."""
    n = await run_in_threadpool(lambda: count_tokens(anthropic_ask(body, state.settings), state))
    return JsonResponse({"input_tokens": n})
