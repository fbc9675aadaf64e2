"""Token counts and times of a request, in the names that clients read.

    usage.prompt_tokens_details.cached_tokens   prompt tokens not evaluated
    timings.cache_n + timings.prompt_n          = usage.prompt_tokens
    usage.gufo                                  what the cache did

With several choices of one prompt, the prompt counts once, and its figures are those of the first
choice; with several prompts they add up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from gufo_gguf.cache.types import RequestReport
from gufo_gguf.engine.types import Event, Finished, PrefillProgress, TextDelta, Timings


def report_dict(report: RequestReport) -> dict[str, Any]:
    """``usage.gufo``."""
    return {
        "reuse_source": str(report.reuse_source),
        "restored_tokens": report.restored_tokens,
        "prefilled_tokens": report.prefilled_tokens,
        "common_prefix_tokens": report.common_prefix_tokens,
        "miss_reason": None if report.miss_reason is None else str(report.miss_reason),
        "restore_ms": round(report.restore_ms, 3),
        "capture_ms": round(report.capture_ms, 3),
        "shared_prefix_wait_ms": round(report.shared_prefix_wait_ms, 3),
        "captured": [{"boundary": boundary, "origin": str(origin)} for boundary, origin in report.captured],
    }


def timings_dict(timings: Timings, answers: int = 1) -> dict[str, float | int]:
    """``timings``; rates of generation count passes: an answer's first token comes out of its prompt's."""
    passes = max(0, timings.predicted_n - answers)
    ms = timings.predicted_ms
    return {
        **timings.as_dict(),
        "predicted_per_token_ms": ms / passes if passes else 0.0,
        "predicted_per_second": 1e3 * passes / ms if passes and ms > 0 else 0.0,
    }


class LiveTimings:
    """``timings`` so far, for clients that ask for them with every piece; times as seen here."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._cached = self._prompt = self._predicted = 0
        self._prompt_ms = 0.0
        self._first_s = 0.0

    def see(self, event: Event) -> dict[str, float | int]:
        """Count an event; the figures with it."""
        predicted_ms = 0.0
        if isinstance(event, PrefillProgress):
            self._cached, self._prompt = event.n_cached, event.n_processed - event.n_cached
            self._prompt_ms = event.time_ms if self._prompt else 0.0  # until then it was restoring
        elif isinstance(event, TextDelta):
            now = self._clock()
            if not self._predicted:
                self._first_s = now
            self._predicted += len(event.tokens)
            predicted_ms = 1e3 * (now - self._first_s)
        return timings_dict(Timings(self._cached, self._prompt, self._prompt_ms, self._predicted, predicted_ms))


class Usage:
    """Totals over the finished streams of one request; ``n`` choices per prompt, prompt-major."""

    def __init__(self, finished: Sequence[Finished], n: int = 1, reasoning_tokens: int | None = None) -> None:
        firsts = finished[::n]
        self.prompt_tokens = sum(f.n_prompt for f in firsts)
        self.cached_tokens = sum(f.timings.cache_n for f in firsts)
        self.completion_tokens = sum(f.n_generated for f in finished)
        self.reasoning_tokens = reasoning_tokens
        """Generated tokens that were thoughts; None = the API has no such thing."""
        self.report = finished[0].report
        timings = Timings(
            cache_n=self.cached_tokens,
            prompt_n=sum(f.timings.prompt_n for f in firsts),
            prompt_ms=sum(f.timings.prompt_ms for f in firsts),
            predicted_n=sum(f.timings.predicted_n for f in finished),
            predicted_ms=sum(f.timings.predicted_ms for f in finished),
        )
        self.timings = timings_dict(timings, len(finished))

    def openai(self) -> dict[str, Any]:
        details = (
            {}
            if self.reasoning_tokens is None
            else {"completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens}}
        )
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            **details,
            "gufo": report_dict(self.report),
        }

    def responses(self) -> dict[str, Any]:
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens or 0},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "gufo": report_dict(self.report),
        }

    def anthropic(self) -> dict[str, Any]:
        """Anthropic counts cached tokens apart from ``input_tokens``."""
        return {
            "input_tokens": self.prompt_tokens - self.cached_tokens,
            "cache_read_input_tokens": self.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": self.completion_tokens,
        }
