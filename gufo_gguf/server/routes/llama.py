"""llama-server's own endpoints: /completion, tokens, templates, and what runs here."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from gufo_gguf.server.chat.openai_in import chat_ask
from gufo_gguf.server.chat.prepare import render
from gufo_gguf.server.errors import refuse
from gufo_gguf.server.ids import new_id
from gufo_gguf.server.llama_out import LlamaStyle, LlamaWriter, generation_settings, sampling_dict, whole
from gufo_gguf.server.requests import Prepared
from gufo_gguf.server.routes.completions import prepare_completion
from gufo_gguf.server.schema.chat import ChatBody
from gufo_gguf.server.schema.completions import CompletionBody
from gufo_gguf.server.schema.llama import DetokenizeBody, TokenizeBody
from gufo_gguf.server.sse import EventStream, collect
from gufo_gguf.server.state import ScopeDep, State, StateDep
from gufo_gguf.server.wire import JsonResponse

router = APIRouter()


def _style(body: CompletionBody, prepared: Prepared, state: State) -> LlamaStyle:
    engine = state.engine
    n_ctx = engine.info.n_ctx
    texts = {id(r.tokens): engine.vocab.detokenize(r.tokens).decode("utf-8", "replace") for r in prepared.requests}
    return LlamaStyle(
        model=engine.model_id,
        prompts=tuple(texts[id(r.tokens)] for r in prepared.requests),
        settings=tuple(generation_settings(r, n_ctx, stream=bool(body.stream)) for r in prepared.requests),
        n_ctx=n_ctx,
        n_probs=prepared.n_logprobs if prepared.n_logprobs > 0 else -1,
        post_sampling=bool(body.post_sampling_probs),
        return_tokens=bool(body.return_tokens),
        return_progress=bool(body.return_progress),
        timings_per_token=bool(body.timings_per_token),
        response_fields=tuple(body.response_fields or ()),
    )


def _prepare(body: CompletionBody, state: State, scope: str) -> tuple[Prepared, LlamaStyle]:
    prepared = prepare_completion(body, state, scope)
    return prepared, _style(body, prepared, state)


@router.post("/completion", response_model=None)
@router.post("/completions", response_model=None, include_in_schema=False)
async def completion(body: CompletionBody, request: Request, state: StateDep, scope: ScopeDep) -> Response:
    """llama-server's completion; several prompts or choices give a list."""
    prepared, style = await run_in_threadpool(_prepare, body, state, scope)
    generation = state.active.start(prepared.requests, new_id("cmpl-"), body.timeout)
    if body.stream:
        writer = LlamaWriter(style, len(generation.streams))
        return EventStream(generation, writer, state.active, state.settings.keepalive_s, request.url.path)
    events = await collect(request, generation, state.active)
    results = [whole(style, i, stream) for i, stream in enumerate(events)]
    return JsonResponse(results[0] if len(results) == 1 else results)


def _piece(piece: bytes) -> str | list[int]:
    """Text, or the bytes where a token is a part of a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


@router.post("/tokenize", response_model=None)
async def tokenize(body: TokenizeBody, state: StateDep) -> Response:
    """Text to token ids; special tokens are added only when asked for."""
    vocab = state.engine.vocab

    def work() -> list[int]:
        ids: list[int] = []
        for i, part in enumerate(body.content):
            if isinstance(part, int):
                ids.append(part)
            else:
                special = bool(body.add_special) and i == 0
                ids += vocab.tokenize(part, add_special=special, parse_special=body.parse_special is not False)
        return ids

    ids = await run_in_threadpool(work)
    _check_ids(ids, state)
    tokens: list[Any] = [{"id": t, "piece": _piece(vocab.piece(t))} for t in ids] if body.with_pieces else ids
    return JsonResponse({"tokens": tokens})


def _check_ids(ids: list[int], state: State) -> None:
    bad = next((t for t in ids if not 0 <= t < state.engine.vocab.n_vocab), None)
    if bad is not None:
        raise refuse(f"tokens: {bad} is outside the vocabulary of {state.engine.vocab.n_vocab}", param="tokens")


@router.post("/detokenize", response_model=None)
async def detokenize(body: DetokenizeBody, state: StateDep) -> Response:
    """Token ids to text."""
    _check_ids(body.tokens, state)
    return JsonResponse({"content": state.engine.vocab.detokenize(body.tokens).decode("utf-8", "replace")})


@router.post("/apply-template", response_model=None)
async def apply_template(body: ChatBody, state: StateDep) -> Response:
    """The prompt a chat request would have; nothing is generated."""
    _, rendered = await run_in_threadpool(lambda: render(chat_ask(body, state.settings), state))
    return JsonResponse({"prompt": rendered.prompt})


@router.get("/props", response_model=None)
async def props(state: StateDep) -> Response:
    """Settings of the server and the model's template."""
    engine, info = state.engine, state.engine.info
    template = engine.chat.info
    params = {**sampling_dict(state.settings.sampling), "n_predict": -1, "max_tokens": -1, "stop": [], "stream": True}
    return JsonResponse(
        {
            "default_generation_settings": {
                "id": 0,
                "id_task": -1,
                "n_ctx": info.n_ctx,
                "speculative": False,
                "is_processing": False,
                "params": params,
                "prompt": "",
                "next_token": {"has_next_token": True, "has_new_line": False, "n_remain": -1, "n_decoded": 0},
            },
            "total_slots": info.n_slots,
            "model_alias": engine.model_id,
            "model_path": state.settings.model_path,
            "modalities": {"vision": False, "audio": False},
            "chat_template": template.source,
            "chat_template_tool_use": template.tool_use_source,
            "chat_template_caps": template.caps,
            "bos_token": template.bos_token,
            "eos_token": template.eos_token,
            "build_info": state.fingerprint,
            "is_sleeping": False,
        }
    )


@router.get("/slots", response_model=None)
async def slots(state: StateDep, fail_on_no_slot: bool = False) -> Response:
    """What each session's slot holds and does."""
    if not state.settings.slots_endpoint:
        raise refuse("this server does not show its slots", status=501, code="not_supported")
    found = await state.ask(state.engine.slots)
    if fail_on_no_slot and all(slot["is_processing"] for slot in found):
        raise refuse("no slot is free", status=503, code="no_slot")
    return JsonResponse([{"speculative": False, **slot} for slot in found])


@router.get("/lora-adapters", response_model=None, include_in_schema=False)
async def lora_adapters() -> Response:
    return JsonResponse([])


_NOT_BUILT = {
    "/v1/embeddings": "embeddings: this server generates text only",
    "/embeddings": "embeddings: this server generates text only",
    "/embedding": "embeddings: this server generates text only",
    "/v1/rerank": "reranking: this server generates text only",
    "/rerank": "reranking: this server generates text only",
    "/reranking": "reranking: this server generates text only",
    "/infill": "infilling is not supported",
    "/props": "settings cannot be changed while the server runs",
}


def _refusal(message: str) -> Any:
    async def route() -> Response:
        raise refuse(message, status=501, code="not_supported")

    return route


for _path, _message in _NOT_BUILT.items():
    router.add_api_route(_path, _refusal(_message), methods=["POST"], response_model=None, include_in_schema=False)
