"""What goes into the engine and what comes out, for the server, the Python API and the CLI."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from gufo_gguf.cache.types import InputMark, RequestReport, Tokens


@dataclass(slots=True)
class SamplingParams:
    """Names and defaults as llama-server's; ``seed`` None or 2**32 - 1 = random."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: list[str] | None = None
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    seed: int | None = None
    min_keep: int = 0
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Token id -> bias; -inf bans the token."""
    ignore_eos: bool = False
    samplers: list[str] | None = None
    grammar: str = ""
    grammar_lazy: bool = False
    grammar_triggers: list[dict[str, Any]] = field(default_factory=list)
    preserved_tokens: list[str] = field(default_factory=list)
    grammar_type: str = "user"
    """user | output_format | tool_calls; the latter two start behind ``generation_prompt``."""
    generation_prompt: str = ""
    """The template's assistant opening at the end of the prompt."""
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    reasoning_budget_tokens: int = -1
    """-1 = no limit; needs the template's tags below."""
    reasoning_budget_start_tag: str = ""
    reasoning_budget_end_tags: list[str] = field(default_factory=list)
    reasoning_budget_message: str = ""
    reasoning_control: bool = False


ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
"""Roles that chat messages may have -> what templates call them.  Given any other, a template drops the
message or prints the word as it is, and the model answers a conversation that nobody had."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(slots=True)
class GenerateRequest:
    """One generation from token ids.  ``stable``, ``system_end``: in tokens (see cache.types.PromptView)."""

    tokens: Tokens
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    """None = until a stop token or a full context."""
    stop: tuple[str, ...] = ()
    stable: tuple[int, ...] = ()
    system_end: int = 0
    inputs: tuple[InputMark, ...] = ()
    n_logprobs: int = 0
    """0 = none; k = the k most likely tokens with each sampled one."""
    post_sampling: bool = False
    """The k most likely after the sampler's chain, with the chances it left, instead of the model's own."""
    cache_prompt: bool = True
    """False neither reads nor writes the cache."""
    scope: str = ""
    """Isolation key added to the state identity (for example a digest of the API key)."""
    request_id: str = ""
    progress: bool = False
    """Ask for PrefillProgress events."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: int
    logprob: float
    piece: bytes
    top: tuple[tuple[int, float, bytes], ...]


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    n_total: int
    n_cached: int
    n_processed: int
    time_ms: float


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text (complete UTF-8, never a part of a stop string) and the tokens behind it."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Timings:
    """Named as llama-server's ``timings``: cache_n + prompt_n = prompt tokens."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float

    def as_dict(self) -> dict[str, float | int]:
        """All of llama-server's fields; a rate with nothing measured is 0, never a division by zero."""

        def per(ms: float, n: int) -> float:
            return ms / n if n else 0.0

        def rate(n: int, ms: float) -> float:
            return 1e3 * n / ms if ms > 0 else 0.0

        return {
            "cache_n": self.cache_n,
            "prompt_n": self.prompt_n,
            "prompt_ms": self.prompt_ms,
            "prompt_per_token_ms": per(self.prompt_ms, self.prompt_n),
            "prompt_per_second": rate(self.prompt_n, self.prompt_ms),
            "predicted_n": self.predicted_n,
            "predicted_ms": self.predicted_ms,
            "predicted_per_token_ms": per(self.predicted_ms, self.predicted_n),
            "predicted_per_second": rate(self.predicted_n, self.predicted_ms),
        }


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of every stream."""

    reason: FinishReason
    stop_text: str | None
    """The stop string that ended it, if one did."""
    n_prompt: int
    n_generated: int
    timings: Timings
    report: RequestReport
    error: Exception | None = None


Event = PrefillProgress | TextDelta | Finished


def as_tokens(ids: object) -> Tokens:
    """A read-only int32 copy of any sequence of token ids."""
    array = np.array(ids, dtype=np.int32).reshape(-1)
    array.flags.writeable = False
    return array
