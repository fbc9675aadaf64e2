"""Weights between a PyTorch state dict, a GGUF file and the compressed parts a training run leaves.

State dict and file have the same names and, read in NumPy's order, the same shapes; the one
exception is the decay, which is trained as its logarithm (it must stay negative):

    ssm_a  =  -exp(ssm_a_log)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.float32]
_LARGE = 16_384
"""Tensors with that many values are matrices and tables; the rest are gains, routers, convolutions."""


def to_gguf(state: Mapping[str, Tensor]) -> dict[str, Array]:
    """Arrays under the file's names, float32."""
    arrays = {}
    for name, tensor in state.items():
        array = tensor.detach().cpu().float().numpy()
        if name.endswith("ssm_a_log"):
            name, array = name.removesuffix("_log"), -np.exp(array)
        arrays[name] = array
    return arrays


def from_gguf(arrays: Mapping[str, Array]) -> dict[str, Tensor]:
    """The other way round."""
    state = {}
    for name, array in arrays.items():
        tensor = torch.from_numpy(np.array(array, np.float32))
        if name.endswith("ssm_a"):
            name, tensor = name + "_log", torch.log(-tensor)
        state[name] = tensor
    return state


def read_gguf(path: Path) -> dict[str, Array]:
    """All tensors of a GGUF file (one part), dequantised to float32."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    return {
        tensor.name: dequantize(tensor.data, tensor.tensor_type).reshape(tuple(int(n) for n in tensor.shape)[::-1])
        for tensor in GGUFReader(path).tensors
    }


def save_parts(state: Mapping[str, Tensor], folder: Path, stem: str, part_bytes_max: int) -> list[Path]:
    """Write tensors into ``stem-0.npz``, ``stem-1.npz``, ... of at most that many bytes each.

    Large ones as float16, which is what the exported file has at best.  Every part is complete by
    itself and appears by a rename.  ValueError for a tensor that is larger than a part.
    """
    groups: list[dict[str, npt.NDArray[Any]]] = [{}]
    used = 0
    for name, tensor in state.items():
        array = tensor.detach().cpu().float().numpy()
        if array.size >= _LARGE:
            array = array.astype(np.float16)
        size = array.nbytes + 512
        if size > part_bytes_max:
            raise ValueError(f"{name} has {array.nbytes} bytes, more than a part may have ({part_bytes_max})")
        if used + size > part_bytes_max:
            groups.append({})
            used = 0
        groups[-1][name] = array
        used += size
    paths = []
    for index, group in enumerate(groups):
        path = folder / f"{stem}-{index}.npz"
        partial = path.with_name(f".{path.name}.partial.npz")
        np.savez(partial, **group)
        partial.replace(path)
        paths.append(path)
    return paths


def load_parts(folder: Path, stem: str) -> dict[str, Tensor]:
    """State dict, float32, from the parts ``save_parts`` wrote; FileNotFoundError when there is none."""
    paths = sorted(folder.glob(f"{stem}-*.npz"))
    if not paths:
        raise FileNotFoundError(f"no {stem}-*.npz in {folder}")
    state = {}
    for path in paths:
        with np.load(path) as arrays:
            state.update({name: torch.from_numpy(arrays[name]).float() for name in arrays.files})
    return state
