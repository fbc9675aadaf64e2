"""Sizes of a qwen4exp model, as the reference implementation needs them.

The same fields and names as the generator of random models uses (``gufo_gguf.models.qwen4exp``),
repeated here because that one imports the gguf package, which a training machine need not have; a
test compares the two.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

PLE_MULTIPLIERS = (1_000_003, 998_244_353, 1_000_000_007)
"""Hash multipliers per distance to the current token; any odd numbers would do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes; the symbols in comments are those the shapes in ``reference`` are written with."""

    n_layer: int
    attention_every: int
    """Layers attention_every - 1, 2 * attention_every - 1, ... attend, all others are Gated DeltaNet."""
    n_embd: int  # D
    n_vocab: int  # V
    n_ctx: int

    n_head: int  # H
    n_head_kv: int  # Hkv
    head_dim: int  # d
    n_rot: int
    """The first n_rot values of each head are rotated; the rest match by content alone."""

    indexer_heads: int  # I
    indexer_dim: int  # e
    indexer_top_k: int
    """Tokens that a query may attend to, besides the unfinished block it stands in."""
    indexer_ratio: int = 4
    """Tokens per block that the indexer scores as one."""

    delta_k_heads: int  # Hk
    delta_v_heads: int  # Hv
    delta_dim: int  # s
    conv_kernel: int = 4

    hyper_streams: int = 4  # C
    hyper_rank: int

    n_expert: int  # E
    n_expert_used: int
    n_ff_expert: int  # F

    ple_layer: int = 1
    ple_ngram: int = 3
    ple_heads_per_ngram: int = 2
    ple_kernel: int = 4
    ple_rows_per_head: int

    norm_epsilon: float = 1e-6
    rope_base: float = 1e6
    eos_token: int
    """Ends a document: n-grams do not reach across it."""

    @property
    def ple_heads(self) -> int:
        return (self.ple_ngram - 1) * self.ple_heads_per_ngram

    @property
    def ple_ranges(self) -> list[tuple[int, int]]:
        """(offset, rows) of each head's part of the n-gram table; sizes differ so that hashes do."""
        sizes = [self.ple_rows_per_head + 2 * head for head in range(self.ple_heads)]
        return [(sum(sizes[:head]), sizes[head]) for head in range(self.ple_heads)]

    def is_attention(self, layer: int) -> bool:
        return (layer + 1) % self.attention_every == 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


OWLET = Geometry(
    n_layer=9,
    attention_every=3,
    n_embd=256,
    n_vocab=4096,
    n_ctx=16_384,
    n_head=4,
    n_head_kv=2,
    head_dim=64,
    n_rot=32,
    indexer_heads=4,
    indexer_dim=64,
    indexer_top_k=512,
    delta_k_heads=4,
    delta_v_heads=4,
    delta_dim=64,
    hyper_rank=32,
    n_expert=8,
    n_expert_used=2,
    n_ff_expert=96,
    ple_rows_per_head=5003,
    eos_token=4087,
)
"""The model that ships: 14 million parameters, 15 MB in q8_0."""
