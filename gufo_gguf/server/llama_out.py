"""llama-server's own shape of a completion (/completion), whole and as a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gufo_gguf.engine.types import (
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    PrefillProgress,
    SamplingParams,
    TextDelta,
    TokenLogprob,
)
from gufo_gguf.server.completion_out import progress_dict
from gufo_gguf.server.errors import Problem, openai_body
from gufo_gguf.server.logprobs import chat_logprobs
from gufo_gguf.server.usage import LiveTimings, report_dict, timings_dict
from gufo_gguf.server.wire import data_frame


def sampling_dict(params: SamplingParams) -> dict[str, Any]:
    """Sampling settings with llama-server's names; what JSON cannot hold is left out."""
    out = asdict(params)
    out["seed"] = 0xFFFFFFFF if params.seed is None else params.seed
    out["logit_bias"] = [{"token": token, "bias": bias} for token, bias in params.logit_bias.items()]
    out["samplers"] = params.samplers or []
    out["dry_sequence_breakers"] = params.dry_sequence_breakers or ["\n", ":", '"', "*"]
    return out


def generation_settings(request: GenerateRequest, n_ctx: int, *, stream: bool) -> dict[str, Any]:
    limit = -1 if request.max_tokens is None else request.max_tokens
    return {
        **sampling_dict(request.sampling),
        "n_ctx": n_ctx,
        "n_predict": limit,
        "max_tokens": limit,
        "stop": list(request.stop),
        "stream": stream,
        "n_probs": request.n_logprobs,
        "n_keep": 0,
        "n_discard": 0,
        "timings_per_token": False,
        "post_sampling_probs": request.post_sampling,
        "speculative": False,
    }


@dataclass(frozen=True, slots=True)
class LlamaStyle:
    model: str
    prompts: tuple[str, ...]
    """Each choice's prompt as text, special tokens included."""
    settings: tuple[dict[str, Any], ...]
    n_ctx: int
    n_probs: int
    """-1 = none."""
    post_sampling: bool = False
    return_tokens: bool = False
    return_progress: bool = False
    timings_per_token: bool = False
    response_fields: tuple[str, ...] = ()


def probabilities(tokens: Sequence[TokenLogprob], style: LlamaStyle) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = chat_logprobs(tokens, style.n_probs, post_sampling=style.post_sampling)["content"]
    return content


def _stop_type(finished: Finished) -> str:
    if finished.reason is FinishReason.LENGTH:
        return "limit"
    return "word" if finished.stop_text is not None else "eos"


def select(fields: Sequence[str], result: dict[str, Any]) -> dict[str, Any]:
    """``response_fields``: those named, ``a/b`` taken out of ``a``; one that is not there is left out."""
    if not fields:
        return result
    out: dict[str, Any] = {}
    for name in fields:
        value: Any = result
        for part in name.split("/"):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            out[name] = value
    return out


def final(style: LlamaStyle, index: int, finished: Finished, text: str, shown: str) -> dict[str, Any]:
    """The closing object; ``text`` is everything generated, ``shown`` what this object carries of it."""
    return {
        "index": index,
        "content": shown,
        "tokens": [],
        "id_slot": -1,
        "stop": True,
        "model": style.model,
        "tokens_predicted": finished.n_generated,
        "tokens_evaluated": finished.n_prompt,
        "generation_settings": style.settings[index],
        "prompt": style.prompts[index],
        "has_new_line": "\n" in text,
        "truncated": finished.n_prompt + finished.n_generated >= style.n_ctx,
        "stop_type": _stop_type(finished),
        "stopping_word": finished.stop_text or "",
        "tokens_cached": finished.timings.cache_n,
        "timings": timings_dict(finished.timings),
        "gufo": report_dict(finished.report),
    }


def whole(style: LlamaStyle, index: int, events: Sequence[Event]) -> dict[str, Any]:
    deltas = [e for e in events if isinstance(e, TextDelta)]
    finished = events[-1]
    assert isinstance(finished, Finished)
    text = "".join(d.text for d in deltas)
    out = final(style, index, finished, text, text)
    if style.return_tokens:
        out["tokens"] = [t for d in deltas for t in d.tokens]
    if style.n_probs >= 0:
        out["completion_probabilities"] = probabilities([p for d in deltas for p in d.logprobs], style)
    return select(style.response_fields, out)


class LlamaWriter:
    """See ``sse.FrameWriter``.  There is no [DONE]: the object with ``stop: true`` is the last."""

    def __init__(self, style: LlamaStyle, n_streams: int) -> None:
        self._style = style
        self._texts = [""] * n_streams
        self._counts = [0] * n_streams
        self._prompts = [0] * n_streams
        self._live = [LiveTimings() for _ in range(n_streams)] if style.timings_per_token else []

    def start(self) -> bytes:
        return b""

    def _part(self, index: int, text: str, tokens: Sequence[int], **more: Any) -> bytes:
        return data_frame(
            {
                "index": index,
                "content": text,
                "tokens": list(tokens),
                "stop": False,
                "id_slot": -1,
                "tokens_predicted": self._counts[index],
                "tokens_evaluated": self._prompts[index],
                **more,
            }
        )

    def event(self, index: int, event: Event) -> bytes:
        style = self._style
        more: dict[str, Any] = {"timings": self._live[index].see(event)} if self._live else {}
        if isinstance(event, PrefillProgress):
            self._prompts[index] = event.n_total
            if not style.return_progress:
                return b""
            return self._part(index, "", (), prompt_progress=progress_dict(event), **more)
        if isinstance(event, Finished):
            return data_frame(select(style.response_fields, final(style, index, event, self._texts[index], "")))
        self._texts[index] += event.text
        self._counts[index] += len(event.tokens)
        if not event.text and not event.tokens:
            return b""
        if style.n_probs < 0:
            return self._part(index, event.text, event.tokens, **more)
        shown = probabilities(event.logprobs, style)
        return self._part(index, event.text, event.tokens, completion_probabilities=shown, **more)

    def keepalive(self) -> bytes:
        return self._part(0, "", ())

    def error(self, problem: Problem) -> bytes:
        return data_frame(openai_body(problem))

    def end(self) -> bytes:
        return b""

    def close(self) -> None:
        pass
