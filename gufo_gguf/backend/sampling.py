"""One request's sampler, and log-probabilities, over ``native/src/sampler.cpp``.

A sampler belongs to one request and is rebuilt from tokens for each: penalties from the prompt
(``accept_prompt``), grammar and stop state from what was generated.  Nothing of it is cached, so a
restore needs no sampler state.  The next token can come out of a context or out of a stored vector
of logits (an identical resend has nothing to evaluate); equal logits and equal history give the
same token by either way.
"""

from __future__ import annotations

import ctypes as ct
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from gufo_gguf.backend import cabi
from gufo_gguf.backend.base import Logits
from gufo_gguf.cache.types import Tokens
from gufo_gguf.engine.types import SamplingParams

RANDOM_SEED = 2**32 - 1


def params_json(params: SamplingParams, extra: Mapping[str, Any] | None = None) -> bytes:
    """The fields as the native side reads them: absent = default, a banned token's bias = false."""
    values = {f.name: getattr(params, f.name) for f in fields(params)}
    values["seed"] = RANDOM_SEED if params.seed is None else params.seed % 2**32
    values["logit_bias"] = [[token, False if bias == -math.inf else bias] for token, bias in params.logit_bias.items()]
    values.update(extra or {})
    return cabi.to_json({name: value for name, value in values.items() if value is not None})


class Sampler:
    """A native sampler; used by the owner thread only, ``close()`` is idempotent.

    Raises RequestError (``param`` = the field) when a value or the grammar cannot be used.
    """

    def __init__(self, lib: ct.CDLL, model_ptr: int, params: SamplingParams, *, reference: bool = False) -> None:
        """``reference``: draw through llama.cpp's own ``common_sampler_sample``, from contexts only; for tests."""
        self._lib = cabi.bind(lib)
        extra = {"reference": True} if reference else None
        self._handle: int | None = cabi.made(lib, lib.gufo_sampler_new(model_ptr, params_json(params, extra)))

    @classmethod
    def _of(cls, lib: ct.CDLL, handle: int) -> Sampler:
        self = cls.__new__(cls)
        self._lib = lib
        self._handle = handle
        return self

    @property
    def seed(self) -> int:
        """The effective seed: giving it explicitly repeats this request's draws."""
        return int(self._lib.gufo_sampler_seed(self._handle))

    @property
    def preserved_tokens(self) -> frozenset[int]:
        """Special tokens whose text belongs into the output (a tool call's opening, for example)."""
        n = ct.c_size_t()
        cabi.check(self._lib, self._lib.gufo_sampler_preserved(self._handle, None, 0, ct.byref(n)))
        out = (ct.c_int32 * n.value)()
        cabi.check(self._lib, self._lib.gufo_sampler_preserved(self._handle, out, n.value, ct.byref(n)))
        return frozenset(out)

    def accept_prompt(self, tokens: Tokens) -> None:
        """Let prompt tokens count for the penalties; the grammar does not see them."""
        ids = np.ascontiguousarray(tokens, dtype=np.int32)
        cabi.check(self._lib, self._lib.gufo_sampler_accept(self._handle, ids.ctypes.data, ids.size, 0))

    def accept(self, token: int) -> None:
        """Take a generated token.  Raises RequestError if the grammar does not allow it (nothing else does)."""
        one = ct.c_int32(token)
        cabi.check(self._lib, self._lib.gufo_sampler_accept(self._handle, ct.byref(one), 1, 1))

    def sample(self, ctx_ptr: int, row: int = -1) -> int:
        """Draw from a context's logits; ``row`` is an index into the last batch, -1 its last output."""
        token = ct.c_int32()
        cabi.check(self._lib, self._lib.gufo_sampler_sample(self._handle, ctx_ptr, row, ct.byref(token)))
        return token.value

    def sample_logits(self, logits: Logits) -> int:
        """Draw from (n_vocab,) float32 logits."""
        if logits.dtype != np.float32 or logits.ndim != 1 or not logits.flags.c_contiguous:
            raise ValueError("logits must be a contiguous float32 vector")
        token = ct.c_int32()
        cabi.check(
            self._lib,
            self._lib.gufo_sampler_sample_logits(self._handle, logits.ctypes.data, logits.size, ct.byref(token)),
        )
        return token.value

    def candidates(self, n: int) -> list[tuple[int, float]]:
        """At most n (token, probability) that the chain left at the last draw, most likely first."""
        ids = np.empty(n, np.int32)
        probs = np.empty(n, np.float32)
        got = ct.c_int32()
        cabi.check(
            self._lib,
            self._lib.gufo_sampler_candidates(self._handle, n, ids.ctypes.data, probs.ctypes.data, ct.byref(got)),
        )
        return list(zip(ids[: got.value].tolist(), probs[: got.value].tolist(), strict=True))

    def end_reasoning(self) -> bool:
        """Force the end of the reasoning block now; False if there is no budget or no open block."""
        done = ct.c_int()
        cabi.check(self._lib, self._lib.gufo_sampler_end_reasoning(self._handle, ct.byref(done)))
        return bool(done.value)

    def reset(self) -> None:
        """As new, with the same effective seed."""
        cabi.check(self._lib, self._lib.gufo_sampler_reset(self._handle))

    def clone(self) -> Sampler:
        """A copy that will draw what this one would draw."""
        return Sampler._of(self._lib, cabi.made(self._lib, self._lib.gufo_sampler_clone(self._handle)))

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle:
            self._lib.gufo_sampler_free(handle)

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()


def top_logprobs(lib: ct.CDLL, logits: Logits, token: int, n: int) -> tuple[float, list[tuple[int, float]]]:
    """(log-probability of ``token``, the n most likely (token, log-probability)) of plain logits.

    Log-softmax of what the model said, before any sampler, as llama-server and OpenAI report it.
    Ties go to the lower id.
    """
    cabi.bind(lib)
    if logits.dtype != np.float32 or logits.ndim != 1 or not logits.flags.c_contiguous:
        raise ValueError("logits must be a contiguous float32 vector")
    n = min(n, logits.size)
    ids = np.empty(n, np.int32)
    top = np.empty(n, np.float32)
    own = ct.c_float()
    cabi.check(
        lib,
        lib.gufo_logprobs(logits.ctypes.data, logits.size, token, n, ids.ctypes.data, top.ctypes.data, ct.byref(own)),
    )
    return own.value, list(zip(ids.tolist(), top.tolist(), strict=True))


def schema_to_grammar(lib: ct.CDLL, schema: Mapping[str, Any]) -> str:
    """A JSON schema as a GBNF grammar; RequestError names what cannot be expressed."""
    cabi.bind(lib)
    return cabi.call_for_text(lib, lib.gufo_schema_to_grammar, cabi.to_json(schema))
