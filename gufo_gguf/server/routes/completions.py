"""POST /v1/completions: text or token ids in, text out, without a chat template."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from gufo_gguf.core.errors import RequestError
from gufo_gguf.engine.types import GenerateRequest, as_tokens
from gufo_gguf.server.completion_out import CompletionStyle, CompletionWriter, Envelope, whole_completion
from gufo_gguf.server.requests import Prepared, bias_tokenizer, check_limits, plain_requests
from gufo_gguf.server.schema.completions import CompletionBody
from gufo_gguf.server.sse import EventStream, collect
from gufo_gguf.server.state import ScopeDep, State, StateDep
from gufo_gguf.server.wire import JsonResponse

router = APIRouter()


def prepare_completion(body: CompletionBody, state: State, scope: str) -> Prepared:
    """Raises RequestError naming the field that is wrong.  Slow: tokenizes."""
    engine, limits = state.engine, state.settings.limits
    n = body.n or body.n_cmpl or 1
    shown = body.n_probs if body.given("n_probs") else body.logprobs
    n_logprobs = -1 if shown is None or (shown == 0 and not body.given("logprobs")) else shown
    check_limits(body, limits, choices=n * len(body.prompt), n_logprobs=n_logprobs)
    if body.best_of is not None and body.best_of > n:
        raise RequestError("best_of: choosing among more than n completions is not supported", param="best_of")
    if body.echo and n_logprobs >= 0:
        raise RequestError("echo: log-probabilities of the prompt's own tokens are not supported", param="echo")
    sampling = body.sampling(state.settings.sampling, bias_tokenizer(engine.vocab))
    if body.json_schema is not None and not body.grammar:
        sampling.grammar = engine.chat.schema_grammar(body.json_schema)
        sampling.grammar_type = "output_format"
    template = GenerateRequest(
        tokens=as_tokens([]),
        sampling=sampling,
        max_tokens=body.token_limit(state.settings.max_tokens),
        stop=body.stop,
        n_logprobs=max(1, n_logprobs) if n_logprobs >= 0 else 0,
        post_sampling=bool(body.post_sampling_probs),
        cache_prompt=body.cache_prompt is not False,
        scope=scope,
        progress=bool((body.return_progress or body.timings_per_token) and body.stream),
    )
    return Prepared(plain_requests(engine, limits, body.prompt, n, template), n, n_logprobs)


def _echo(body: CompletionBody, prepared: Prepared, state: State) -> tuple[str, ...]:
    if not body.echo:
        return ()
    vocab = state.engine.vocab
    texts = [
        p if isinstance(p, str) else vocab.detokenize(r.tokens).decode("utf-8", "replace")
        for p, r in zip(body.prompt, prepared.requests[:: prepared.n], strict=True)
    ]
    return tuple(text for text in texts for _ in range(prepared.n))


@router.post("/v1/completions", response_model=None)
async def completions(body: CompletionBody, request: Request, state: StateDep, scope: ScopeDep) -> Response:
    """OpenAI's completions."""
    prepared = await run_in_threadpool(prepare_completion, body, state, scope)
    options = body.stream_options
    style = CompletionStyle(
        Envelope.new("cmpl-", state.engine.model_id, state.fingerprint),
        prepared.n,
        prepared.n_logprobs,
        _echo(body, prepared, state),
        post_sampling=bool(body.post_sampling_probs),
        include_usage=bool(options and options.include_usage),
        return_progress=bool(body.return_progress),
        timings_per_token=bool(body.timings_per_token),
    )
    generation = state.active.start(prepared.requests, style.envelope.id, body.timeout)
    if body.stream:
        writer = CompletionWriter(style, len(generation.streams))
        return EventStream(generation, writer, state.active, state.settings.keepalive_s, request.url.path)
    return JsonResponse(whole_completion(style, await collect(request, generation, state.active)))
