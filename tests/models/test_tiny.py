"""Tiny models in llama.cpp: they load, tokenize, run for long, and depend on their state.

The last is what makes them useful: a model whose logits hardly depend on what it read would let
every exactness test pass with the wrong state restored.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gufo_gguf.models.shape import shape_geometry, state_size, write_shape
from gufo_gguf.models.tiny import TINY_ARCHS
from gufo_gguf.models.tokenizer import TURN_END, vocabulary

pytestmark = pytest.mark.native

N_CTX = 2048
N_BATCH = 512
PROMPT = 300
TEXTS = (
    "The state of a model has two parts.\n\n  def f(x):\n\treturn x[1:] + {'a': 0.25}\n",
    "Grüße, naïve café — Ελληνικά, русский, 日本語, עברית, हिन्दी",
    "🦉 owls 👩‍👩‍👧‍👦 and flags 🇮🇹🇪🇺, a lone surrogate-free 𝄞\u200d\u0000?",
    "",
)
RECURRENT = tuple(arch for arch in TINY_ARCHS if arch not in ("llama", "gemma3"))
PARTIAL_ONLY = 1
"""llama.cpp's flag: of a sequence's state, only what cannot be cut (recurrent, sliding window)."""


@dataclass
class Loaded:
    """A model with two slots; one thread, so that runs are comparable byte for byte."""

    low: Any
    model: Any
    context: Any
    vocab: Any
    n_vocab: int

    def decode(self, slot: int, tokens: Sequence[int], first: int) -> npt.NDArray[np.float32]:
        """Evaluate tokens at [first, first + n); logits after the last."""
        batch = self.low.llama_batch_init(N_BATCH, 0, 1)
        try:
            for start in range(0, len(tokens), N_BATCH):
                piece = tokens[start : start + N_BATCH]
                batch.n_tokens = len(piece)
                for i, token in enumerate(piece):
                    batch.token[i] = int(token)
                    batch.pos[i] = first + start + i
                    batch.n_seq_id[i] = 1
                    batch.seq_id[i][0] = slot
                    batch.logits[i] = i == len(piece) - 1
                assert self.low.llama_decode(self.context, batch) == 0
        finally:
            self.low.llama_batch_free(batch)
        return np.ctypeslib.as_array(self.low.llama_get_logits_ith(self.context, -1), (self.n_vocab,)).copy()

    def clear(self) -> None:
        self.low.llama_memory_clear(self.low.llama_get_memory(self.context), True)

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        data = text.encode()
        out = (ctypes.c_int32 * (len(data) + 8))()
        n = self.low.llama_tokenize(self.vocab, data, len(data), out, len(out), True, special)
        assert n >= 0
        return list(out[:n])

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        piece = ctypes.create_string_buffer(256)
        text = b""
        for token in tokens:
            n = self.low.llama_token_to_piece(self.vocab, int(token), piece, len(piece), 0, True)
            text += piece.raw[:n]
        return text


@pytest.fixture(
    scope="module", params=[(arch, ftype) for arch in TINY_ARCHS for ftype in ("f16", "q8_0")], ids="-".join
)
def loaded(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Iterator[Loaded]:
    arch, ftype = request.param
    yield from _load(tiny_model(arch, ftype))


def _load(path: Path) -> Iterator[Loaded]:
    from gufo_gguf.backend.native import bindings

    low = bindings()
    model = low.llama_model_load_from_file(str(path).encode(), low.llama_model_default_params())
    assert model, f"llama.cpp does not load {path}"
    params = low.llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.n_batch, params.n_ubatch = 2 * N_CTX, 2, N_BATCH, 256
    params.n_threads = params.n_threads_batch = 1
    params.kv_unified = False
    params.flash_attn_type = 1
    context = low.llama_init_from_model(model, params)
    assert context
    vocab = low.llama_model_get_vocab(model)
    yield Loaded(low, model, context, vocab, low.llama_vocab_n_tokens(vocab))
    low.llama_free(context)
    low.llama_model_free(model)


def _prompt(seed: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 752, PROMPT)]


def test_texts_survive_a_round_trip(loaded: Loaded) -> None:
    for text in TEXTS:
        tokens = loaded.tokenize(text)
        assert loaded.detokenize(tokens) == text.encode()
    english = loaded.tokenize(TEXTS[0])
    assert len(english) < 0.6 * len(TEXTS[0]), "merges are not used"


def test_special_tokens_and_template(loaded: Loaded) -> None:
    vocab = vocabulary()
    assert loaded.tokenize("<|im_start|>user\n", special=True)[0] == vocab.id_of("<|im_start|>")
    assert len(loaded.tokenize("</tool_call>", special=True)) == 1
    assert not loaded.low.llama_vocab_get_add_bos(loaded.vocab)
    for token in (TURN_END, "<|endoftext|>"):
        assert loaded.low.llama_vocab_is_eog(loaded.vocab, vocab.id_of(token))
    assert not loaded.low.llama_vocab_is_eog(loaded.vocab, vocab.id_of("<|im_start|>"))
    assert b"<|im_start|>assistant" in loaded.low.llama_model_chat_template(loaded.model, None)
    assert loaded.low.llama_model_n_ctx_train(loaded.model) >= 32_768


def test_six_hundred_greedy_tokens_are_sane(loaded: Loaded) -> None:
    loaded.clear()
    logits = loaded.decode(0, _prompt(1), 0)
    chosen: list[int] = []
    for position in range(PROMPT, PROMPT + 600):
        assert np.isfinite(logits).all()
        # over tokens that the model may choose: the logits of the others are zero by construction
        spread = float(logits[logits != 0].std())
        assert 0.5 < spread < 10
        chosen.append(int(logits.argmax()))
        logits = loaded.decode(0, [chosen[-1]], position)
    assert len(set(chosen)) > 60
    assert max(chosen.count(token) for token in set(chosen)) < 120, "mostly one token"
    text = loaded.detokenize(chosen).decode("ascii")
    assert all(char == "\n" or char.isprintable() for char in text)


def test_logits_depend_on_what_was_read_long_ago(loaded: Loaded) -> None:
    prompt = _prompt(2)
    other = [*prompt[:40], (prompt[40] + 1) % 752, *prompt[41:]]
    loaded.clear()
    first = loaded.decode(0, prompt, 0)
    second = loaded.decode(1, other, 0)
    assert np.abs(first - second).max() > 0.01 * first.std()


@pytest.mark.parametrize("arch", RECURRENT)
def test_foreign_private_state_changes_the_logits(arch: str, tiny_model: Callable[..., Path]) -> None:
    """Rows of one prompt with the recurrent state of another: the mix must be visible."""
    for loaded in _load(tiny_model(arch)):
        low, context = loaded.low, loaded.context
        loaded.decode(0, _prompt(3), 0)
        right = loaded.decode(0, [10], PROMPT)

        loaded.clear()
        loaded.decode(0, _prompt(3), 0)
        assert np.array_equal(loaded.decode(0, [10], PROMPT), right), "the run itself is not repeatable"

        loaded.clear()
        loaded.decode(0, _prompt(3), 0)
        loaded.decode(1, _prompt(4), 0)
        size = low.llama_state_seq_get_size_ext(context, 1, PARTIAL_ONLY)
        state = (ctypes.c_uint8 * size)()
        assert low.llama_state_seq_get_data_ext(context, state, size, 1, PARTIAL_ONLY) == size
        assert low.llama_state_seq_set_data_ext(context, state, size, 0, PARTIAL_ONLY) == size
        mixed = loaded.decode(0, [10], PROMPT)
        assert float((right - mixed).std()) > 0.2 * float(right.std())


def test_flash_next_shape_loads_with_the_state_it_promises(tmp_path: Path) -> None:
    geometry = shape_geometry("flash-next", 2, n_layer=4, n_embd=512, n_vocab=1024)
    path = tmp_path / "shape.gguf"
    write_shape("flash-next", geometry, path)
    for loaded in _load(path):
        first = loaded.decode(0, _prompt(5), 0)
        assert np.isfinite(first).all() and first.std() > 0.3
        n_partial = loaded.low.llama_state_seq_get_size_ext(loaded.context, 0, PARTIAL_ONLY)
        # llama.cpp adds a few bytes of headers per tensor
        assert 0 <= n_partial - state_size(geometry).private_bytes < 2048
