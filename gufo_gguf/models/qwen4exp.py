"""qwen4exp (Flash-Next): the one architecture here with every kind of state at once.

Per layer, where F are full-attention layers (every fourth) and L the linear ones:

    rows      F: K, V, indexer keys; cell extras (the token of each cell: PLE hashes n-grams)
    private   L: delta-net state and its convolution history; PLE convolution history in one L

One geometry class describes both the tiny model of the tests and the shape of the real one, so
the two cannot drift apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from gufo_gguf.core.errors import ConfigError
from gufo_gguf.models import blocks
from gufo_gguf.models.recipe import U64, Recipe, Value
from gufo_gguf.models.tensors import Tensor, kernel, matrix, norm, table
from gufo_gguf.models.tokenizer import END_OF_TEXT, N_TOKENS, vocabulary

ARCH = "qwen4exp"
NORM_EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes of a qwen4exp model; the defaults are those of the tiny one (about 4 MB in f16)."""

    n_layer: int = 8
    attention_every: int = 4
    """Layers attention_every - 1, 2 * attention_every - 1, ... are full attention."""
    n_embd: int = 128
    n_vocab: int = N_TOKENS
    n_ctx: int = 131_072

    n_head: int = 4
    n_head_kv: int = 1
    head_dim: int = 64
    n_rot: int = 32

    indexer_heads: int = 2
    indexer_dim: int = 32
    indexer_top_k: int = 64
    indexer_ratio: int = 4
    """Tokens per block that the indexer scores as one."""

    delta_k_heads: int = 2
    delta_v_heads: int = 4
    delta_dim: int = 32
    conv_kernel: int = 4

    hyper_streams: int = 4
    hyper_rank: int = 32

    n_expert: int = 8
    n_expert_used: int = 2
    n_ff_expert: int = 32

    ple_layer: int = 1
    ple_ngram: int = 3
    ple_heads_per_ngram: int = 2
    ple_kernel: int = 4
    ple_rows_per_head: int = 101

    @property
    def ple_heads(self) -> int:
        return (self.ple_ngram - 1) * self.ple_heads_per_ngram

    def is_attention(self, layer: int) -> bool:
        return (layer + 1) % self.attention_every == 0

    def check(self) -> None:
        """ConfigError naming the first size that llama.cpp would refuse, and the remedy."""
        if self.n_layer <= self.ple_layer or self.is_attention(self.ple_layer):
            raise ConfigError(f"{self.n_layer} layers: layer {self.ple_layer} must exist and be a linear one; use more")
        if self.n_embd % self.ple_heads:
            raise ConfigError(f"n_embd is {self.n_embd}, it must be a multiple of {self.ple_heads} (the PLE heads)")
        if self.n_vocab < N_TOKENS:
            raise ConfigError(f"n_vocab is {self.n_vocab}, the tokenizer alone has {N_TOKENS} tokens")
        if not 0 < self.n_expert_used <= self.n_expert:
            raise ConfigError(f"{self.n_expert} experts, but a token uses {self.n_expert_used}")


TINY = Geometry()

FLASH_NEXT = Geometry(
    n_layer=48,
    n_embd=2560,
    n_vocab=248_320,
    n_ctx=262_144,
    n_head=24,
    n_head_kv=2,
    head_dim=256,
    n_rot=64,
    indexer_heads=4,
    indexer_dim=128,
    indexer_top_k=2048,
    delta_k_heads=16,
    delta_v_heads=48,
    delta_dim=128,
    hyper_rank=320,
    n_expert=512,
    n_expert_used=10,
    n_ff_expert=640,
    ple_heads_per_ngram=8,
    # the real table's size is not public knowledge of ours; it is weights, not state
    ple_rows_per_head=20_011,
)
"""The real model's sizes; 118 MB of private state and 27,648 bytes of rows a token with f16 KV."""


def recipe(geometry: Geometry, name: str) -> Recipe:
    """Keys and tensors of a model with this geometry; raises ConfigError for an impossible one."""
    geometry.check()
    return Recipe(ARCH, name, _keys(geometry), tuple(_tensors(geometry)), geometry.n_vocab)


def _keys(g: Geometry) -> dict[str, Value]:
    return {
        "context_length": g.n_ctx,
        "embedding_length": g.n_embd,
        "block_count": g.n_layer,
        "feed_forward_length": g.n_ff_expert * g.n_expert_used,
        "attention.head_count": g.n_head,
        "attention.head_count_kv": g.n_head_kv,
        "attention.key_length": g.head_dim,
        "attention.value_length": g.head_dim,
        "attention.layer_norm_rms_epsilon": NORM_EPSILON,
        "attention.indexer.head_count": g.indexer_heads,
        "attention.indexer.key_length": g.indexer_dim,
        "attention.indexer.top_k": g.indexer_top_k,
        "attention.compress_ratios": [g.indexer_ratio if g.is_attention(i) else 0 for i in range(g.n_layer)],
        "full_attention_interval": g.attention_every,
        "rope.dimension_count": g.n_rot,
        "rope.dimension_sections": blocks.rope_sections(g.n_rot),
        "rope.freq_base": 1e6,
        "ssm.conv_kernel": g.conv_kernel,
        "ssm.inner_size": g.delta_v_heads * g.delta_dim,
        "ssm.state_size": g.delta_dim,
        "ssm.time_step_rank": g.delta_v_heads,
        "ssm.group_count": g.delta_k_heads,
        "hyper_connection.count": g.hyper_streams,
        "hyper_connection.low_rank": g.hyper_rank,
        "expert_count": g.n_expert,
        "expert_used_count": g.n_expert_used,
        "expert_feed_forward_length": g.n_ff_expert,
        "expert_shared_feed_forward_length": g.n_ff_expert,
        "ple.layers": [g.ple_layer],
        "ple.ngram_size": g.ple_ngram,
        "ple.heads_per_ngram": g.ple_heads_per_ngram,
        "ple.conv_kernel": g.ple_kernel,
        "ple.layer_multipliers": U64(_PLE_MULTIPLIERS[: g.ple_ngram]),
        "ple.head_offsets": U64(offset for offset, _ in _ple_ranges(g)),
        "ple.head_vocab_sizes": U64(size for _, size in _ple_ranges(g)),
        "ple.eos_token_id": vocabulary(g.n_vocab).id_of(END_OF_TEXT),
        "embedding_length_per_layer_input": g.n_embd // g.ple_heads,
    }


_PLE_MULTIPLIERS = (1_000_003, 998_244_353, 1_000_000_007)


def _ple_ranges(g: Geometry) -> list[tuple[int, int]]:
    """(offset, rows) of each head's part of the n-gram table.

    Sizes differ by two, so that the heads do not all hash an n-gram to the same row.
    """
    sizes = [g.ple_rows_per_head + 2 * head for head in range(g.ple_heads)]
    return [(sum(sizes[:head]), sizes[head]) for head in range(g.ple_heads)]


def _tensors(g: Geometry) -> list[Tensor]:
    wide = g.hyper_streams * g.n_embd
    offset, size = _ple_ranges(g)[-1]
    tensors = [
        blocks.embedding(g.n_embd, g.n_vocab),
        # the last mixer is the output norm: there is no separate one
        norm("output_hc_norm", wide),
        matrix("output_hc_down", wide, g.hyper_rank),
        matrix("output_hc_up", g.hyper_rank, wide),
        blocks.output(g.n_embd, g.n_vocab),
        table("per_layer_token_embd", g.n_embd // g.ple_heads, offset + size),
    ]
    for layer in range(g.n_layer):
        blk = f"blk.{layer}"
        for part in ("attn", "ffn"):
            tensors += [
                norm(f"{blk}.hc_{part}_norm", wide),
                matrix(f"{blk}.hc_{part}_down", wide, g.hyper_rank),
                matrix(f"{blk}.hc_{part}_up", g.hyper_rank, wide),
                matrix(f"{blk}.hc_{part}_inject", wide, g.hyper_streams, gain=g.hyper_streams),
            ]
        if g.is_attention(layer):
            tensors += blocks.attention(blk, g.n_embd, g.n_head, g.n_head_kv, g.head_dim, gated=True)
            tensors += [
                matrix(f"{blk}.indexer.q_proj", g.n_embd, g.indexer_heads * g.indexer_dim),
                matrix(f"{blk}.indexer.k_proj", g.n_embd, g.indexer_dim),
                norm(f"{blk}.indexer.q_norm", g.indexer_dim),
                norm(f"{blk}.indexer.k_norm", g.indexer_dim),
            ]
        else:
            tensors += blocks.delta_net(blk, g.n_embd, g.delta_k_heads, g.delta_v_heads, g.delta_dim, g.conv_kernel)
        if layer == g.ple_layer:
            tensors += [
                matrix(f"{blk}.ple_key", g.n_embd, wide),
                matrix(f"{blk}.ple_value", g.n_embd, g.n_embd),
                norm(f"{blk}.ple_norm_key", wide),
                norm(f"{blk}.ple_norm_query", wide),
                norm(f"{blk}.ple_norm_conv", wide),
                kernel(f"{blk}.ple_conv1d", g.ple_kernel, wide),
            ]
        tensors += blocks.moe_ffn(blk, g.n_embd, g.n_expert, g.n_ff_expert, g.n_ff_expert)
    return tensors
