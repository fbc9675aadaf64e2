"""From checked fields to what the engine runs: prompts as tokens, choices, limits.

These functions do the slow part of a request (tokenizing) and run in a worker thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gufo_gguf.cache.types import Tokens
from gufo_gguf.core.errors import ContextLengthExceeded, RequestError
from gufo_gguf.engine.types import GenerateRequest, SamplingParams, as_tokens
from gufo_gguf.server.port import EnginePort, VocabPort
from gufo_gguf.server.schema.completions import Prompt
from gufo_gguf.server.schema.sampling import SamplingFields
from gufo_gguf.server.settings import Limits


@dataclass(frozen=True, slots=True)
class Prepared:
    """The engine's requests, prompt-major: n choices of the first prompt, then of the second, …"""

    requests: list[GenerateRequest]
    n: int
    n_logprobs: int
    """Alternatives to show per token; -1 = no log-probabilities."""


def tokenize_prompt(vocab: VocabPort, prompt: Prompt) -> Tokens:
    """Text gets BOS where the model wants one, at the start only; ids are taken as they are."""
    if isinstance(prompt, str):
        return as_tokens(vocab.tokenize(prompt, add_special=True, parse_special=True))
    if not any(isinstance(part, str) for part in prompt):
        return as_tokens(prompt)
    ids: list[int] = []
    for i, part in enumerate(prompt):
        if isinstance(part, str):
            ids.extend(vocab.tokenize(part, add_special=i == 0, parse_special=True))
        else:
            ids.append(part)
    return as_tokens(ids)


def bias_tokenizer(vocab: VocabPort) -> Callable[[str], list[int]]:
    return lambda text: vocab.tokenize(text, add_special=False, parse_special=False)


def check_limits(body: SamplingFields, limits: Limits, *, choices: int, n_logprobs: int) -> None:
    """Raises RequestError naming the field that asks for too much."""
    if choices > limits.choices:
        raise RequestError(f"n: {choices} choices in one request, at most {limits.choices} are served", param="n")
    if len(body.stop) > limits.stop_strings:
        raise RequestError(f"stop: {len(body.stop)} stop strings, at most {limits.stop_strings} are used", param="stop")
    if any(len(text) > limits.stop_chars for text in body.stop):
        raise RequestError(f"stop: a stop string is longer than {limits.stop_chars} characters", param="stop")
    if n_logprobs > limits.logprobs:
        raise RequestError(
            f"top_logprobs: {n_logprobs} asked for, at most {limits.logprobs} are given", param="top_logprobs"
        )


def check_length(engine: EnginePort, limits: Limits, n_tokens: int) -> None:
    """Before anything expensive is done with the prompt; the engine checks again."""
    if n_tokens >= engine.info.n_ctx:
        raise ContextLengthExceeded(n_tokens, engine.info.n_ctx)
    if limits.prompt_tokens is not None and n_tokens > limits.prompt_tokens:
        raise RequestError(
            f"the prompt has {n_tokens} tokens, this server takes at most {limits.prompt_tokens}", param="prompt"
        )


def choices_of(request: GenerateRequest, n: int) -> list[GenerateRequest]:
    """n requests of one prompt.  A given seed counts up, or the choices would be copies."""
    return [replace(request, sampling=_with_seed(request.sampling, i)) for i in range(n)]


def _with_seed(params: SamplingParams, offset: int) -> SamplingParams:
    if params.seed is None or params.seed == 0xFFFFFFFF or offset == 0:
        return params
    return replace(params, seed=(params.seed + offset) & 0xFFFFFFFF)


def plain_requests(
    engine: EnginePort,
    limits: Limits,
    prompts: Sequence[Prompt],
    n: int,
    template: GenerateRequest,
) -> list[GenerateRequest]:
    """Requests without a chat template: the prompt end is what the next request may send again."""
    out: list[GenerateRequest] = []
    for prompt in prompts:
        tokens = tokenize_prompt(engine.vocab, prompt)
        check_length(engine, limits, len(tokens))
        out.extend(choices_of(replace(template, tokens=tokens), n))
    return out
