"""Log-probabilities of sampled tokens in the three shapes that clients know."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from gufo_gguf.engine.types import TokenLogprob

FLOOR = -9999.0
"""Stands for minus infinity, which JSON has not; the value OpenAI uses."""


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


def _entry(piece: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _text(piece), "logprob": max(logprob, FLOOR), "bytes": list(piece)}


def _chance(token: int, piece: bytes, logprob: float) -> dict[str, Any]:
    return {"id": token, "token": _text(piece), "bytes": list(piece), "prob": math.exp(logprob)}


def chat_logprobs(tokens: Iterable[TokenLogprob], n_top: int, *, post_sampling: bool = False) -> dict[str, Any]:
    """OpenAI chat: ``choices[].logprobs``; ``id`` is llama-server's addition.

    ``post_sampling``: llama-server's form of what the sampler's chain left, chances from 0 to 1.
    """
    if post_sampling:
        chances = [
            {
                **_chance(t.token, t.piece, t.logprob),
                "top_probs": [_chance(token, piece, p) for token, p, piece in t.top[:n_top]],
            }
            for t in tokens
        ]
        return {"content": chances, "refusal": None}
    content = [
        {
            "id": t.token,
            **_entry(t.piece, t.logprob),
            "top_logprobs": [{"id": token, **_entry(piece, p)} for token, p, piece in t.top[:n_top]],
        }
        for t in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokens: Sequence[TokenLogprob], n_top: int, text_offset: int = 0, *, post_sampling: bool = False
) -> dict[str, Any]:
    """OpenAI completions: four parallel lists.  ``text_offset``: characters before the first token."""
    offsets: list[int] = []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(_text(token.piece))
    return {
        "tokens": [_text(t.piece) for t in tokens],
        "token_logprobs": [max(t.logprob, FLOOR) for t in tokens],
        "top_logprobs": [{_text(piece): max(p, FLOOR) for _, p, piece in t.top[:n_top]} for t in tokens]
        if n_top
        else None,
        "text_offset": offsets,
        # llama-server's shape of the same, for its clients
        "content": chat_logprobs(tokens, n_top, post_sampling=post_sampling)["content"],
    }
