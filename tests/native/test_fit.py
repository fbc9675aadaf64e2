"""Contexts that do not fit are refused before they are made: afterwards the kernel ends processes."""

from __future__ import annotations

import pytest

import gufo_gguf.backend.llama as llama
from gufo_gguf.backend.llama import LlamaBackend, LlamaOptions
from gufo_gguf.core.errors import ModelError
from tests.conftest import TinyModel

pytestmark = pytest.mark.native


@pytest.mark.parametrize("arch", ["qwen4exp", "llama", "mamba2", "gemma3"])
def test_the_estimate_is_what_a_context_takes(
    tiny_model: TinyModel, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimates: list[int] = []
    real = llama.context_bytes

    def noted(*arguments: object) -> int:
        estimates.append(real(*arguments))  # type: ignore[arg-type]
        return estimates[-1]

    monkeypatch.setattr(llama, "context_bytes", noted)
    n_ctx, n_slots = 40_960, 2
    with LlamaBackend(tiny_model(arch), LlamaOptions(n_ctx=n_ctx, n_slots=n_slots, n_threads=1)) as backend:
        taken = backend._lib.gufo_host_bytes(backend.ctx_ptr)
    cells = llama.context_bytes(lambda n: 0, n_ctx, n_slots)
    assert abs(estimates[0] - cells - taken) <= 0.1 * taken


def test_a_context_larger_than_memory_is_an_error_with_both_sizes(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama, "available_bytes", lambda: 100_000_000)
    with pytest.raises(ModelError, match=r"1 x 400000 tokens takes about [0-9.]+ GB and 0.1 GB are free.*--ctx-size"):
        LlamaBackend(tiny_model("qwen4exp"), LlamaOptions(n_ctx=400_000, n_threads=1))


def test_a_context_of_two_thousand_million_cells_is_refused_on_any_machine(tiny_model: TinyModel) -> None:
    with pytest.raises(ModelError, match="are free"):
        LlamaBackend(tiny_model("qwen4exp"), LlamaOptions(n_ctx=2_000_000_000, n_threads=1))
