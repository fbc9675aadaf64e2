"""Text to tokens and back, by the model's own vocabulary.

Reading the vocabulary is safe from any thread; nothing here touches a context.
"""

from __future__ import annotations

import ctypes as c
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from gufo_gguf.backend import native
from gufo_gguf.cache.types import Tokens
from gufo_gguf.core.errors import BackendError, RequestError


class Vocab:
    """``model`` is the llama_model pointer as the bindings hold it; it must outlive this object."""

    def __init__(self, model: Any) -> None:
        self._low = native.bindings()
        self._vocab = self._low.llama_model_get_vocab(model)
        self.n_vocab = int(self._low.llama_vocab_n_tokens(self._vocab))
        self.bos = int(self._low.llama_vocab_bos(self._vocab))
        self.eos = int(self._low.llama_vocab_eos(self._vocab))
        self.eot = int(self._low.llama_vocab_eot(self._vocab))
        self.add_bos = bool(self._low.llama_vocab_get_add_bos(self._vocab))
        self.piece = functools.lru_cache(maxsize=1 << 16)(self._piece)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of the text.  ``add_special`` adds BOS/EOS where the model wants them."""
        data = text.encode("utf-8")
        ids = np.empty(len(data) + 16, dtype=np.int32)
        for _ in range(2):
            n = self._low.llama_tokenize(
                self._vocab,
                data,
                len(data),
                ids.ctypes.data_as(c.POINTER(c.c_int32)),
                ids.size,
                add_special,
                parse_special,
            )
            if n >= 0:
                return ids[:n].tolist()  # type: ignore[no-any-return]
            ids = np.empty(-n, dtype=np.int32)
        raise BackendError("the tokenizer gave more tokens than it announced")

    def _piece(self, token: int) -> bytes:
        """Bytes of one token, special tokens as their text."""
        if not 0 <= token < self.n_vocab:  # llama.cpp ends the process
            raise RequestError(f"token id {token} is outside the vocabulary of {self.n_vocab}", param="prompt")
        size = 64
        while True:
            buffer = c.create_string_buffer(size)
            n = self._low.llama_token_to_piece(self._vocab, token, buffer, size, 0, True)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def text_piece(self, token: int) -> bytes:
        """Bytes a token adds to generated text: control tokens add none."""
        return b"" if self.is_control(token) else self.piece(token)

    def is_control(self, token: int) -> bool:
        return bool(self._low.llama_vocab_is_control(self._vocab, token))

    def is_eog(self, token: int) -> bool:
        """Does this token end a generation?"""
        return bool(self._low.llama_vocab_is_eog(self._vocab, token))

    def detokenize(self, tokens: Sequence[int] | Tokens) -> bytes:
        return b"".join(map(self.piece, np.asarray(tokens).tolist()))
