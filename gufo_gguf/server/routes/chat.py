"""POST /v1/chat/completions, and the number of tokens such a request would have."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from gufo_gguf.server.chat.answer import Answer, whole_answer
from gufo_gguf.server.chat.openai_in import chat_ask
from gufo_gguf.server.chat.openai_out import ChatStyle, ChatWriter, whole_chat
from gufo_gguf.server.chat.prepare import PreparedChat, count_tokens, prepare_chat
from gufo_gguf.server.completion_out import Envelope
from gufo_gguf.server.schema.chat import ChatBody
from gufo_gguf.server.sse import EventStream, collect
from gufo_gguf.server.state import ScopeDep, State, StateDep
from gufo_gguf.server.wire import JsonResponse

router = APIRouter()


def _prepare(body: ChatBody, state: State, scope: str) -> PreparedChat:
    return prepare_chat(chat_ask(body, state.settings), state, scope)


def _style(body: ChatBody, state: State, chat: PreparedChat) -> ChatStyle:
    options = body.stream_options
    return ChatStyle(
        Envelope.new("chatcmpl-", state.engine.model_id, state.fingerprint),
        chat.prepared.n_logprobs,
        bool(body.post_sampling_probs),
        include_usage=bool(options and options.include_usage),
        return_progress=bool(body.return_progress),
        timings_per_token=bool(body.timings_per_token),
        verbose_prompt=chat.rendered.prompt if body.verbose else None,
    )


@router.post("/v1/chat/completions", response_model=None)
@router.post("/chat/completions", response_model=None, include_in_schema=False)
async def chat_completions(body: ChatBody, request: Request, state: StateDep, scope: ScopeDep) -> Response:
    """OpenAI's chat completions."""
    chat = await run_in_threadpool(_prepare, body, state, scope)
    style = _style(body, state, chat)
    parser = state.engine.chat.parser
    # parsers first: one that cannot be made must not leave a generation that nobody reads
    answers = [Answer(parser(chat.rendered)) for _ in chat.prepared.requests] if body.stream else []
    generation = state.active.start(chat.prepared.requests, style.envelope.id, body.timeout)
    if body.stream:
        writer = ChatWriter(style, answers)
        return EventStream(generation, writer, state.active, state.settings.keepalive_s, request.url.path)
    events = await collect(request, generation, state.active)
    answers = [whole_answer(parser(chat.rendered), stream) for stream in events]
    try:
        return JsonResponse(whole_chat(style, answers))
    finally:
        for answer in answers:
            answer.close()


@router.post("/v1/chat/completions/input_tokens", response_model=None)
@router.post("/chat/completions/input_tokens", response_model=None, include_in_schema=False)
async def input_tokens(body: ChatBody, state: StateDep) -> Response:
    """Prompt tokens of a chat request; nothing is generated."""
    n = await run_in_threadpool(lambda: count_tokens(chat_ask(body, state.settings), state))
    return JsonResponse({"object": "response.input_tokens", "input_tokens": n})
