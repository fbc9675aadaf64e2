"""Tiny models: a few MB of random weights that llama.cpp loads and runs like the real thing.

One per memory kind and per way of mixing the kinds.  Sizes are small but not degenerate: head
sizes, state sizes and channel counts are ones that the GPU kernels take too (attention heads of
64, Mamba-2 states of 128, convolutions over multiples of 128 channels), and every row length is
a multiple of 32, so that q8_0 weights and a q8_0 KV cache are real.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from gufo_gguf.core.errors import ConfigError
from gufo_gguf.models import blocks, qwen4exp
from gufo_gguf.models.recipe import Recipe, Value, file_type, write
from gufo_gguf.models.tensors import Tensor, kernel, matrix, norm
from gufo_gguf.models.tokenizer import N_TOKENS

_N_EMBD = 128
_N_FF = 256
_N_CTX = 32_768
_N_HEAD, _N_HEAD_KV, _HEAD_DIM = 4, 2, 64
_N_ROT = 32
_CONV_KERNEL = 4
_DELTA_K_HEADS, _DELTA_V_HEADS, _DELTA_DIM = 2, 4, 32
_N_EXPERT, _N_EXPERT_USED, _N_FF_EXPERT = 8, 2, 32
_SSM_INNER, _SSM_STATE, _SSM_HEADS, _SSM_GROUPS = 2 * _N_EMBD, 128, 4, 1


def write_tiny(arch: str, path: str | os.PathLike[str], seed: int = 0, ftype: str = "f16") -> None:
    """Write a tiny model of an architecture; the same arguments give the same bytes.

    ``ftype`` is f16 or q8_0.  Raises ConfigError for an unknown architecture or file type, and if
    the file cannot be written.
    """
    write(tiny_recipe(arch), Path(path), seed, file_type(ftype))


def tiny_recipe(arch: str) -> Recipe:
    """Keys and tensors of a tiny model; ConfigError that lists the known architectures."""
    build = _BUILDERS.get(arch)
    if build is None:
        raise ConfigError(f"no tiny model of architecture {arch!r}; known: {', '.join(TINY_ARCHS)}")
    return build()


def _keys(n_layer: int, **more: Value) -> dict[str, Value]:
    """Keys that every architecture has; dots in the names of ``more`` are written as ``__``."""
    common: dict[str, Value] = {
        "context_length": _N_CTX,
        "embedding_length": _N_EMBD,
        "block_count": n_layer,
        "feed_forward_length": _N_FF,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    return common | {key.replace("__", "."): value for key, value in more.items()}


def _attention_keys(n_head_kv: int | list[int] = _N_HEAD_KV, n_rot: int = _HEAD_DIM) -> dict[str, Value]:
    return {
        "attention.head_count": _N_HEAD,
        "attention.head_count_kv": n_head_kv,
        "attention.key_length": _HEAD_DIM,
        "attention.value_length": _HEAD_DIM,
        "rope.dimension_count": n_rot,
        "rope.freq_base": 1e6,
    }


def _tensors(layers: list[list[Tensor]], output_norm: str = "output_norm", embedding_std: float = 1.0) -> list[Tensor]:
    return [
        blocks.embedding(_N_EMBD, N_TOKENS, embedding_std),
        norm(output_norm, _N_EMBD),
        blocks.output(_N_EMBD, N_TOKENS),
        *(tensor for layer in layers for tensor in layer),
    ]


def _recipe(arch: str, keys: dict[str, Value], tensors: list[Tensor]) -> Recipe:
    return Recipe(arch, f"Tiny {arch}", keys, tuple(tensors))


def _norms(blk: str, *names: str) -> list[Tensor]:
    return [norm(f"{blk}.{name}", _N_EMBD) for name in names]


# -- attention only ------------------------------------------------------------------------------


def _llama() -> Recipe:
    layers = [
        [
            *_norms(blk, "attn_norm", "ffn_norm"),
            *blocks.attention(blk, _N_EMBD, _N_HEAD, _N_HEAD_KV, _HEAD_DIM, qk_norm=False),
            *blocks.dense_ffn(blk, _N_EMBD, _N_FF),
        ]
        for blk in _blks(4)
    ]
    return _recipe("llama", _keys(4) | _attention_keys(), _tensors(layers))


def _gemma3() -> Recipe:
    """Layers window, window, full, twice; the window is shorter than most prompts of the tests."""
    layers = [
        [
            *_norms(blk, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"),
            *blocks.attention(blk, _N_EMBD, _N_HEAD, _N_HEAD_KV, _HEAD_DIM),
            *blocks.dense_ffn(blk, _N_EMBD, _N_FF),
        ]
        for blk in _blks(6)
    ]
    keys = _keys(6, attention__sliding_window=64, attention__sliding_window_pattern=[True, True, False] * 2)
    # the model multiplies embeddings by sqrt(n_embd)
    return _recipe("gemma3", keys | _attention_keys(), _tensors(layers, embedding_std=_N_EMBD**-0.5))


# -- attention and a recurrent kind in turns -----------------------------------------------------


def _qwen35() -> Recipe:
    layers = [[*_delta_layer(i), *blocks.dense_ffn(f"blk.{i}", _N_EMBD, _N_FF)] for i in range(8)]
    keys = _keys(8, rope__dimension_sections=blocks.rope_sections(_N_ROT)) | _delta_keys()
    return _recipe("qwen35", keys, _tensors(layers))


def _qwen35moe() -> Recipe:
    layers = [[*_delta_layer(i), *_moe(i)] for i in range(8)]
    keys = _keys(8, rope__dimension_sections=blocks.rope_sections(_N_ROT)) | _delta_keys() | _moe_keys()
    return _recipe("qwen35moe", keys, _tensors(layers))


def _qwen3next() -> Recipe:
    layers = [[*_delta_layer(i, fused_ba=True), *_moe(i)] for i in range(8)]
    return _recipe("qwen3next", _keys(8) | _delta_keys() | _moe_keys(), _tensors(layers))


def _delta_layer(layer: int, *, fused_ba: bool = False) -> list[Tensor]:
    blk = f"blk.{layer}"
    norms = _norms(blk, "attn_norm", "post_attention_norm")
    if layer % 4 == 3:
        return norms + blocks.attention(blk, _N_EMBD, _N_HEAD, _N_HEAD_KV, _HEAD_DIM, gated=True)
    return norms + blocks.delta_net(
        blk, _N_EMBD, _DELTA_K_HEADS, _DELTA_V_HEADS, _DELTA_DIM, _CONV_KERNEL, fused_ba=fused_ba
    )


def _delta_keys() -> dict[str, Value]:
    return _attention_keys(n_rot=_N_ROT) | {
        "full_attention_interval": 4,
        "ssm.conv_kernel": _CONV_KERNEL,
        "ssm.inner_size": _DELTA_V_HEADS * _DELTA_DIM,
        "ssm.state_size": _DELTA_DIM,
        "ssm.time_step_rank": _DELTA_V_HEADS,
        "ssm.group_count": _DELTA_K_HEADS,
    }


def _moe(layer: int) -> list[Tensor]:
    return blocks.moe_ffn(f"blk.{layer}", _N_EMBD, _N_EXPERT, _N_FF_EXPERT, _N_FF_EXPERT)


def _moe_keys() -> dict[str, Value]:
    return {
        "expert_count": _N_EXPERT,
        "expert_used_count": _N_EXPERT_USED,
        "expert_feed_forward_length": _N_FF_EXPERT,
        "expert_shared_feed_forward_length": _N_FF_EXPERT,
    }


def _lfm2() -> Recipe:
    """Private state is a convolution history and nothing else."""
    n_head_kv = [0, 0, 1, 0, 0, 1]
    layers = []
    for blk, kv in zip(_blks(6), n_head_kv, strict=True):
        # the query projection of this architecture is square: heads * head size = n_embd
        mixer = (
            blocks.attention(blk, _N_EMBD, _N_EMBD // _HEAD_DIM, kv, _HEAD_DIM)
            if kv
            else [
                kernel(f"{blk}.shortconv.conv", 3, _N_EMBD),
                matrix(f"{blk}.shortconv.in_proj", _N_EMBD, 3 * _N_EMBD),
                matrix(f"{blk}.shortconv.out_proj", _N_EMBD, _N_EMBD, gain=blocks.BLOCK_GAIN),
            ]
        )
        layers.append([*_norms(blk, "attn_norm", "ffn_norm"), *mixer, *blocks.dense_ffn(blk, _N_EMBD, _N_FF)])
    attention = _attention_keys(n_head_kv) | {"attention.head_count": _N_EMBD // _HEAD_DIM}
    keys = _keys(6, shortconv__l_cache=3) | attention
    return _recipe("lfm2", keys, _tensors(layers, output_norm="token_embd_norm"))


def _granitehybrid() -> Recipe:
    n_head_kv = [0, 0, 0, _N_HEAD_KV] * 2
    layers = []
    for blk, kv in zip(_blks(8), n_head_kv, strict=True):
        mixer = blocks.attention(blk, _N_EMBD, _N_HEAD, kv, _HEAD_DIM, qk_norm=False) if kv else _mamba2_mixer(blk)
        layers.append([*_norms(blk, "attn_norm", "ffn_norm"), *mixer, *blocks.dense_ffn(blk, _N_EMBD, _N_FF)])
    return _recipe("granitehybrid", _keys(8) | _attention_keys(n_head_kv) | _ssm_keys(), _tensors(layers))


# -- both in every layer, recurrent only ---------------------------------------------------------


def _falcon_h1() -> Recipe:
    layers = [
        [
            *_norms(blk, "attn_norm"),
            *_mamba2_mixer(blk),
            *blocks.attention(blk, _N_EMBD, _N_HEAD, _N_HEAD_KV, _HEAD_DIM, qk_norm=False),
            # llama.cpp looks for this one norm without the suffix
            Tensor(f"{blk}.ffn_norm", (_N_EMBD,), 0.9, 1.1, keep_f32=True),
            *blocks.dense_ffn(blk, _N_EMBD, _N_FF),
        ]
        for blk in _blks(4)
    ]
    return _recipe("falcon-h1", _keys(4) | _attention_keys() | _ssm_keys(), _tensors(layers))


def _mamba2() -> Recipe:
    layers = [[*_norms(blk, "attn_norm"), *_mamba2_mixer(blk)] for blk in _blks(6)]
    return _recipe("mamba2", _keys(6) | _ssm_keys(), _tensors(layers))


def _mamba2_mixer(blk: str) -> list[Tensor]:
    return blocks.mamba2(blk, _N_EMBD, _SSM_INNER, _SSM_STATE, _SSM_HEADS, _SSM_GROUPS, _CONV_KERNEL)


def _ssm_keys() -> dict[str, Value]:
    return {
        "ssm.conv_kernel": _CONV_KERNEL,
        "ssm.inner_size": _SSM_INNER,
        "ssm.state_size": _SSM_STATE,
        "ssm.time_step_rank": _SSM_HEADS,
        "ssm.group_count": _SSM_GROUPS,
    }


def _blks(n_layer: int) -> list[str]:
    return [f"blk.{layer}" for layer in range(n_layer)]


_BUILDERS: dict[str, Callable[[], Recipe]] = {
    "qwen4exp": lambda: qwen4exp.recipe(qwen4exp.TINY, "Tiny qwen4exp"),
    "qwen35": _qwen35,
    "qwen35moe": _qwen35moe,
    "qwen3next": _qwen3next,
    "lfm2": _lfm2,
    "granitehybrid": _granitehybrid,
    "falcon-h1": _falcon_h1,
    "mamba2": _mamba2,
    "gemma3": _gemma3,
    "llama": _llama,
}

TINY_ARCHS: tuple[str, ...] = tuple(_BUILDERS)
"""Architectures that ``write_tiny`` knows, by llama.cpp's names."""
