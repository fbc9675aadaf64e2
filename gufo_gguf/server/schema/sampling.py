"""The fields every generating request shares, with llama-server's names, and what they become."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema
from pydantic.functional_validators import PlainValidator

from gufo_gguf.core.errors import RequestError
from gufo_gguf.engine.types import SamplingParams
from gufo_gguf.server.schema.types import Body, Bool, Float, Int, NonNegative, Str

Tokenize = Callable[[str], list[int]]


def _stop(value: Any) -> Any:
    """One string or a list of strings, as a tuple; empty strings would stop at once and mean nothing."""
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(x, str) for x in items):
        raise ValueError("must be a string or a list of strings")
    return tuple(x for x in items if x)


_STRING_OR_LIST = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
Stop = Annotated[tuple[str, ...], PlainValidator(_stop), WithJsonSchema(_STRING_OR_LIST)]


def _bias(value: Any) -> Any:
    """``{"id or text": bias}`` or ``[[id or text, bias or false], ...]``, as pairs; false bans."""
    if value is None:
        return ()
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list):
        raise ValueError("must be an object or a list of [token, bias] pairs")
    out: list[tuple[int | str, float]] = []
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise ValueError("each entry must be a [token, bias] pair")
        token, bias = pair
        if isinstance(token, bool) or not isinstance(token, (int, str)):
            raise ValueError("a token must be an id or a text")
        if bias is False:
            out.append((token, -math.inf))
        elif isinstance(bias, bool) or not isinstance(bias, (int, float)) or bias != bias:
            raise ValueError("a bias must be a number, or false to ban the token")
        elif bias > 3e38:  # +inf, or a float32 that becomes it; -inf bans
            raise ValueError("a bias must be finite, or false to ban the token")
        elif bias < -3e38:
            out.append((token, -math.inf))
        else:
            out.append((token, float(bias)))
    return tuple(out)


LogitBias = Annotated[
    tuple[tuple[int | str, float], ...],
    PlainValidator(_bias),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "array"}, {"type": "null"}]}),
]


TokenLimit = Annotated[Int, Field(ge=-1)]


class SamplingFields(Body):
    """Absent fields get the server's defaults."""

    temperature: Annotated[Float, Field(ge=0)] | None = None
    top_k: Int | None = None
    top_p: Annotated[Float, Field(ge=0, le=1)] | None = None
    min_p: Annotated[Float, Field(ge=0, le=1)] | None = None
    typical_p: Float | None = None
    top_n_sigma: Float | None = None
    xtc_probability: Annotated[Float, Field(ge=0, le=1)] | None = None
    xtc_threshold: Annotated[Float, Field(ge=0)] | None = None
    dynatemp_range: Float | None = None
    dynatemp_exponent: Float | None = None
    repeat_last_n: Annotated[Int, Field(ge=-1)] | None = None
    repeat_penalty: Annotated[Float, Field(gt=0)] | None = None
    repetition_penalty: Annotated[Float, Field(gt=0)] | None = None
    """Another server's name for repeat_penalty."""
    presence_penalty: Float | None = None
    frequency_penalty: Float | None = None
    dry_multiplier: Float | None = None
    dry_base: Float | None = None
    dry_allowed_length: NonNegative | None = None
    dry_penalty_last_n: Annotated[Int, Field(ge=-1)] | None = None
    dry_sequence_breakers: Annotated[list[Str], Field(min_length=1)] | None = None
    mirostat: Annotated[Int, Field(ge=0, le=2)] | None = None
    mirostat_tau: Float | None = None
    mirostat_eta: Float | None = None
    adaptive_target: Annotated[Float, Field(le=1)] | None = None
    adaptive_decay: Annotated[Float, Field(ge=0, le=0.99)] | None = None
    seed: Int | None = None
    min_keep: NonNegative | None = None
    ignore_eos: Bool | None = None
    samplers: list[Str] | None = None
    grammar: Str | None = None
    logit_bias: LogitBias = ()
    stop: Stop = ()
    n_predict: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    max_tokens: TokenLimit | None = None
    """Three names of one limit, the first given one wins; -1 = none."""
    timeout: Annotated[Float, Field(ge=0)] | None = None
    """Seconds after which the request is ended, waiting included; 0 = the server's own limit."""
    cache_prompt: Bool | None = None
    stream: Bool | None = None
    return_progress: Bool | None = None
    timings_per_token: Bool | None = None

    def sampling(self, defaults: SamplingParams, tokenize: Tokenize) -> SamplingParams:
        """The server's defaults with this request's fields over them.

        Raises RequestError naming ``logit_bias`` for an id that is no number.
        """
        known = {f.name for f in fields(SamplingParams)} - {"logit_bias", "seed"}
        given = {
            name: value for name in known & type(self).model_fields.keys() if (value := getattr(self, name)) is not None
        }
        if self.repeat_penalty is None and self.repetition_penalty is not None:
            given["repeat_penalty"] = self.repetition_penalty
        params = replace(defaults, **given)
        if self.seed is not None:
            # llama-server's -1 is the same 32 bits as its "random"
            params.seed = self.seed & 0xFFFFFFFF
        params.logit_bias = {**defaults.logit_bias, **_resolve_bias(self.logit_bias, tokenize)}
        return params

    def token_limit(self, default: int | None) -> int | None:
        """Tokens to generate; None = until a stop token or a full context."""
        for limit in (self.n_predict, self.max_completion_tokens, self.max_tokens, default):
            if limit is not None:
                return limit if limit >= 0 else None
        return None


def _resolve_bias(pairs: tuple[tuple[int | str, float], ...], tokenize: Tokenize) -> dict[int, float]:
    """Text stands for each of its tokens; a text that is a number is an id (as JSON objects need)."""
    out: dict[int, float] = {}
    for token, bias in pairs:
        if isinstance(token, int):
            ids = [token]
        elif token.isascii() and token.isdigit():
            ids = [int(token)]
        else:
            ids = tokenize(token)
        for one in ids:
            if not 0 <= one < 1 << 31:
                raise RequestError(f"logit_bias: token {one} is out of range", param="logit_bias")
            out[one] = bias
    return out
