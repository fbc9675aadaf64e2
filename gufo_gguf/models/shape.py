"""Models with the shape of a real one: its layers, heads, state and row sizes, random weights.

What the cache moves (private state, bytes per row) and what a pass costs are then those of the
real model, without its weights.  Only the number of experts is meant to be cut: experts are most
of the real file and none of its state.  Made where it is used, never carried around.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from gufo_gguf.core.errors import ConfigError
from gufo_gguf.models import qwen4exp
from gufo_gguf.models.recipe import Progress, Recipe, check_target, file_type, write
from gufo_gguf.models.tensors import stored_bytes

_F16_BYTES, _F32_BYTES = 2, 4


@dataclass(frozen=True, slots=True)
class StateSize:
    """State of one sequence with an f16 KV cache, by the geometry alone."""

    row_bytes: int
    """Append-only bytes per token: K, V and indexer keys of the attention layers."""
    private_bytes: int
    """Delta-net states and convolution histories, f32."""


def write_shape(
    shape: str,
    geometry: qwen4exp.Geometry,
    path: str | os.PathLike[str],
    *,
    ftype: str = "q8_0",
    seed: int = 0,
    progress: Progress | None = None,
) -> None:
    """Write a model of this geometry, at the speed of the disk or 0.5 GB/s, whichever is less.

    Raises ConfigError for an unknown file type, when the folder has too little space (before
    anything is written), and if the file cannot be written.
    """
    target = Path(path)
    check_target(target)
    recipe = shape_recipe(shape, geometry)
    n_needed = file_bytes(recipe, ftype)
    n_free = shutil.disk_usage(target.absolute().parent).free
    if n_needed > n_free:
        raise ConfigError(
            f"the model takes {n_needed / 1e9:.1f} GB, but {target.absolute().parent} has {n_free / 1e9:.1f} GB free; "
            f"use fewer experts or layers"
        )
    write(recipe, target, seed, file_type(ftype), progress)


def shape_geometry(
    shape: str,
    n_expert: int,
    *,
    n_layer: int | None = None,
    n_embd: int | None = None,
    n_vocab: int | None = None,
) -> qwen4exp.Geometry:
    """The geometry of a known shape with fewer experts, and with fewer layers, a smaller width or
    vocabulary where asked; ConfigError for an unknown shape or an impossible size."""
    known = _SHAPES.get(shape)
    if known is None:
        raise ConfigError(f"no shape {shape!r}; known: {', '.join(SHAPES)}")
    geometry = replace(
        known,
        n_expert=n_expert,
        n_expert_used=min(known.n_expert_used, n_expert),
        n_layer=n_layer or known.n_layer,
        n_embd=n_embd or known.n_embd,
        n_vocab=n_vocab or known.n_vocab,
    )
    geometry.check()
    return geometry


def shape_recipe(shape: str, geometry: qwen4exp.Geometry) -> Recipe:
    return qwen4exp.recipe(geometry, f"{shape}-shaped, {geometry.n_layer} layers, {geometry.n_expert} experts")


def file_bytes(recipe: Recipe, ftype: str) -> int:
    """Size of the tensor data; the file adds the tokenizer and some padding."""
    kind = file_type(ftype)
    return sum(stored_bytes(tensor, kind) for tensor in recipe.tensors)


def state_size(g: qwen4exp.Geometry) -> StateSize:
    """What a checkpoint of this model is made of."""
    n_attention = sum(g.is_attention(layer) for layer in range(g.n_layer))
    row_values = 2 * g.n_head_kv * g.head_dim + g.indexer_dim
    conv_dim = (2 * g.delta_k_heads + g.delta_v_heads) * g.delta_dim
    linear_values = g.delta_v_heads * g.delta_dim**2 + (g.conv_kernel - 1) * conv_dim
    ple_values = (g.ple_kernel - 1) * g.ple_ngram * g.hyper_streams * g.n_embd
    return StateSize(
        row_bytes=n_attention * row_values * _F16_BYTES,
        private_bytes=((g.n_layer - n_attention) * linear_values + ple_values) * _F32_BYTES,
    )


_SHAPES = {"flash-next": qwen4exp.FLASH_NEXT}
SHAPES: tuple[str, ...] = tuple(_SHAPES)
"""Shapes that ``write_shape`` knows."""
