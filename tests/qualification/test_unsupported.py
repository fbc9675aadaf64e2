"""Memory kinds and settings whose state cannot be proven: refused by name, served without a cache."""

from __future__ import annotations

import ctypes as c
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path as File
from typing import Any

import numpy as np
import pytest

from gufo_gguf.backend import native
from gufo_gguf.backend.base import Span
from gufo_gguf.backend.llama import LlamaBackend, LlamaOptions
from gufo_gguf.core.errors import UnsupportedMemory
from gufo_gguf.models.recipe import write
from gufo_gguf.models.tensors import FileType
from gufo_gguf.models.tiny import tiny_recipe
from tests.conftest import tiny_model_path

pytestmark = [pytest.mark.native, pytest.mark.slow]

N_SLOTS = 2


@contextmanager
def _context(arch: str, **settings: Any) -> Iterator[int]:
    """Address of a context made past the backend, with settings that it never uses."""
    low = native.bindings()
    native.library()
    low.llama_backend_init()
    model = low.llama_model_load_from_file(str(tiny_model_path(arch)).encode(), low.llama_model_default_params())
    params = low.llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.n_threads = 512 * N_SLOTS, N_SLOTS, 1
    params.flash_attn_type, params.kv_unified = 1, False
    for name, value in settings.items():
        assert hasattr(params, name)
        setattr(params, name, value)
    context = low.llama_init_from_model(model, params)
    try:
        assert context
        yield int(c.cast(context, c.c_void_p).value or 0)
    finally:
        low.llama_free(context)
        low.llama_model_free(model)


@pytest.mark.parametrize(
    ("arch", "settings", "message"),
    [
        ("llama", {"flash_attn_type": 0}, "V cache is transposed"),
        ("qwen35", {"flash_attn_type": 0}, "V cache is transposed"),
        ("gemma3", {"flash_attn_type": 0}, "V cache is transposed"),
        ("llama", {"kv_unified": True}, "share one KV stream"),
        ("qwen4exp", {"kv_unified": True}, "share one KV stream"),
        ("gemma3", {"kv_unified": True}, "share one KV stream"),
        ("qwen35", {"n_rs_seq": 4}, "rollback"),
    ],
    ids=lambda value: str(value).replace(" ", "_") if not isinstance(value, str) else value.replace(" ", "_"),
)
def test_settings_that_break_the_row_layout_are_refused_and_still_run(
    arch: str, settings: dict[str, Any], message: str
) -> None:
    lib = native.library()
    status = c.c_int(0)
    with _context(arch, **settings) as context:
        assert not lib.gufo_state_open(context, N_SLOTS, c.byref(status))
        with pytest.raises(UnsupportedMemory, match=message):
            native.check(status.value)
        state = lib.gufo_run_open(context, N_SLOTS, c.byref(status))
        try:
            assert state and lib.gufo_n_components(state) == 0
            position = c.c_int32(-1)
            native.check(lib.gufo_position(state, 0, c.byref(position)))
            assert position.value == 0, "looking at the state left tokens behind"
            tokens, slots, want = np.arange(5, dtype=np.int32), np.zeros(5, np.uint32), np.zeros(5, np.int8)
            arguments = (native.pointer(tokens), native.pointer(slots), native.pointer(want))
            native.check(lib.gufo_decode(state, 5, *arguments))
            native.check(lib.gufo_position(state, 0, c.byref(position)))
            assert position.value == 5
        finally:
            lib.gufo_state_close(state)


def _windowed_hybrid(path: File) -> File:
    """lfm2 with a sliding window: recurrent and iSWA at once, a kind of its own in llama.cpp."""
    recipe = tiny_recipe("lfm2")
    windowed = dataclasses.replace(recipe, keys={**recipe.keys, "attention.sliding_window": 64})
    write(windowed, path, 0, FileType.F16)
    return path


def test_an_unknown_memory_kind_is_served_uncached_with_a_reason_that_names_it(tmp_path: File) -> None:
    path = _windowed_hybrid(tmp_path / "windowed.gguf")
    with LlamaBackend(path, LlamaOptions(n_ctx=512, n_slots=2, n_threads=1)) as backend:
        assert backend.info.inventory is None
        assert backend.info.uncacheable is not None and "hybrid_iswa" in backend.info.uncacheable
        assert backend.info.memory == "unsupported"
        tokens = np.arange(200, dtype=np.int32) % 300
        for slot in (0, 1, 0):
            backend.truncate(slot, 0)
            backend.decode([Span(slot, tokens, True)])
            assert backend.position(slot) == 200
            assert np.isfinite(backend.logits(slot)).all()
        # the cold control holds for it too: a reused slot computes what the other one did
        assert np.array_equal(_logits(backend, 0, tokens), _logits(backend, 1, tokens))
        out = np.empty(1 << 16, np.uint8)
        for action in (
            lambda: backend.rows_out(0, 0, 1, out),
            lambda: backend.private_out(0, out),
            lambda: backend.begin_restore(0, tokens),
            lambda: backend.truncate(0, 10),
            lambda: backend.metadata(0),
        ):
            with pytest.raises(UnsupportedMemory):
                action()
        assert backend.position(0) == 200


def _logits(backend: LlamaBackend, slot: int, tokens: np.ndarray) -> np.ndarray:
    backend.truncate(slot, 0)
    backend.decode([Span(slot, tokens, True)])
    return backend.logits(slot)


def test_the_identity_covers_what_changes_bytes_and_nothing_else() -> None:
    base = LlamaOptions(n_ctx=512, n_slots=2, n_ubatch=128, n_threads=1)

    def identity(arch: str = "llama", **changes: Any) -> str:
        with LlamaBackend(tiny_model_path(arch), dataclasses.replace(base, **changes)) as backend:
            return backend.info.identity

    known = identity()
    # threads change what a computation gives, not whether a state was computed
    assert identity(n_ctx=1024, n_slots=1, n_threads=2) == known
    others = [
        identity(n_ubatch=64),
        identity(cache_type_k="q8_0"),
        identity(cache_type_v="q8_0"),
        identity(chat_template="{{ messages }}"),
        identity("lfm2"),
        identity("gemma3"),
        identity("gemma3", swa_full=True),
    ]
    assert len({known, *others}) == len(others) + 1


def test_a_backend_that_was_closed_is_closed_twice_without_harm() -> None:
    backend = LlamaBackend(tiny_model_path("llama"), LlamaOptions(n_ctx=512, n_threads=1))
    memory = backend.alloc(1 << 16)
    memory[:] = 7
    backend.close()
    backend.close()
    assert (memory == 7).all(), "host memory outlives the backend"
