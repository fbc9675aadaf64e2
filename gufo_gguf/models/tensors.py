"""What a generated model is made of: tensors with a range of random values.

A tensor is a name, a shape and the range its values are drawn from, uniformly.  Drawing is keyed
by (seed, tensor name), so adding or reordering tensors leaves every other tensor's bytes as they
were.  Uniform rather than normal on purpose: the values come straight from SFC64's raw output,
whose stream NumPy guarantees, while its normal generator may change from release to release and
with it every file's bytes.

Shapes are written as llama.cpp writes them, the row length first: ``(n_in, n_out)``.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

Q8_0_BLOCK = 32
"""Values per q8_0 block; a block is one f16 scale and 32 int8 values, 34 bytes."""
_Q8_0_BLOCK_BYTES = 34
_PIECE_BYTES = 1 << 18
"""Bytes drawn at a time, so that temporaries stay in the processor's cache."""


class FileType(StrEnum):
    """How matrices are stored; vectors, convolution kernels and routers are always f32."""

    F16 = "f16"
    Q8_0 = "q8_0"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a generated model; values are uniform in [low, high)."""

    name: str
    shape: tuple[int, ...]
    low: float
    high: float
    keep_f32: bool
    """llama.cpp reads this tensor as f32 whatever the file's type."""
    zero_rows: tuple[int, ...] = ()
    """Rows set to zero: output rows of tokens that a random model must not choose."""

    @property
    def n_values(self) -> int:
        return math.prod(self.shape)

    @property
    def n_rows(self) -> int:
        return self.n_values // self.shape[0]


def matrix(name: str, *shape: int, gain: float = 1.0, zero_rows: tuple[int, ...] = ()) -> Tensor:
    """A weight matrix: an input of variance 1 gives an output of standard deviation ``gain``."""
    half_width = gain * math.sqrt(3.0 / shape[0])
    return Tensor(f"{name}.weight", shape, -half_width, half_width, keep_f32=False, zero_rows=zero_rows)


def table(name: str, n_row: int, n_rows: int, std: float = 1.0) -> Tensor:
    """A lookup table: rows are taken as they are, so the scale does not depend on the row length."""
    half_width = std * math.sqrt(3.0)
    return Tensor(f"{name}.weight", (n_row, n_rows), -half_width, half_width, keep_f32=False)


def router(name: str, *shape: int) -> Tensor:
    """A matrix (or one row) that decides where a token goes; kept in f32 by convention."""
    half_width = math.sqrt(3.0 / shape[0])
    return Tensor(f"{name}.weight", shape, -half_width, half_width, keep_f32=True)


def kernel(name: str, width: int, n_channels: int, gain: float = 1.0) -> Tensor:
    """A depthwise convolution kernel; llama.cpp's CPU convolution takes f32 only."""
    half_width = gain * math.sqrt(3.0 / width)
    return Tensor(f"{name}.weight", (width, n_channels), -half_width, half_width, keep_f32=True)


def norm(name: str, *shape: int, gain: float = 1.0) -> Tensor:
    """A normalisation gain, within 10 % of ``gain``."""
    return Tensor(f"{name}.weight", shape, 0.9 * gain, 1.1 * gain, keep_f32=True)


def vector(full_name: str, *shape: int, low: float, high: float) -> Tensor:
    """Any other f32 tensor, under its full name (some have the suffix .bias, some have none)."""
    return Tensor(full_name, shape, low, high, keep_f32=True)


def stored_type(tensor: Tensor, ftype: FileType) -> GGMLQuantizationType:
    """The type a tensor gets in a file; rows that q8_0 blocks do not divide fall back to f16."""
    if tensor.keep_f32:
        return GGMLQuantizationType.F32
    if ftype is FileType.Q8_0 and tensor.shape[0] % Q8_0_BLOCK == 0:
        return GGMLQuantizationType.Q8_0
    return GGMLQuantizationType.F16


def stored_bytes(tensor: Tensor, ftype: FileType) -> int:
    match stored_type(tensor, ftype):
        case GGMLQuantizationType.F32:
            return tensor.n_values * 4
        case GGMLQuantizationType.F16:
            return tensor.n_values * 2
        case _:
            return tensor.n_values // Q8_0_BLOCK * _Q8_0_BLOCK_BYTES


def draw(
    tensor: Tensor, seed: int, ftype: FileType, buffer: npt.NDArray[np.uint8] | None = None
) -> npt.NDArray[np.uint8]:
    """The tensor's bytes as the file holds them, a flat array of stored_bytes(tensor, ftype) bytes.

    With a ``buffer`` at least that long, they are written to its front and a view is returned:
    drawing many large tensors into fresh memory spends more time on page faults than on drawing.
    """
    n_bytes = stored_bytes(tensor, ftype)
    out = np.empty(n_bytes, np.uint8) if buffer is None else buffer[:n_bytes]
    bits = np.random.SFC64(np.random.SeedSequence([seed, zlib.crc32(tensor.name.encode())]))
    match stored_type(tensor, ftype):
        case GGMLQuantizationType.F32:
            _draw_f32(tensor, bits, out.view(np.float32))
        case GGMLQuantizationType.F16:
            _draw_f16(tensor, bits, out.view(np.float16))
        case _:
            _draw_q8_0(tensor, bits, out)
    if tensor.zero_rows:
        out.reshape(tensor.n_rows, -1)[list(tensor.zero_rows)] = 0
    return out


def _raw(bits: np.random.SFC64, n_bytes: int) -> npt.NDArray[np.uint8]:
    words: npt.NDArray[np.uint64] = bits.random_raw(-(-n_bytes // 8))
    return words.astype("<u8", copy=False).view(np.uint8)[:n_bytes]


def _pieces(out: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    step = _PIECE_BYTES // out.itemsize
    for first in range(0, out.size, step):
        yield out[first : first + step]


def _draw_f32(tensor: Tensor, bits: np.random.SFC64, out: npt.NDArray[np.float32]) -> None:
    step = (tensor.high - tensor.low) / float(1 << 32)
    for piece in _pieces(out):
        piece[:] = tensor.low + (_raw(bits, piece.nbytes).view("<u4") + 0.5) * step


def _draw_f16(tensor: Tensor, bits: np.random.SFC64, out: npt.NDArray[np.float16]) -> None:
    """Look values up in a table of all 65,536: twice as fast as converting them."""
    values = (tensor.low + (np.arange(1 << 16) + 0.5) * ((tensor.high - tensor.low) / (1 << 16))).astype("<f2")
    for piece in _pieces(out):
        # "clip" only spares the bounds check: every 16-bit integer is an index
        np.take(values, _raw(bits, piece.nbytes).view("<u2"), out=piece, mode="clip")


def _draw_q8_0(tensor: Tensor, bits: np.random.SFC64, out: npt.NDArray[np.uint8]) -> None:
    """Draw the quantised values themselves; quantising drawn floats would be 20 times slower.

    Scales are drawn as well and then overwritten: that keeps the buffer one piece, where copying
    values in between the scales cost more than drawing them.
    """
    for piece in _pieces(out.view(np.int8)):
        # q8_0 is symmetric: -128 has no positive counterpart and some kernels negate values
        np.maximum(_raw(bits, piece.nbytes).view(np.int8), -127, out=piece)
    out.view("<f2").reshape(-1, _Q8_0_BLOCK_BYTES // 2)[:, 0] = tensor.high / 127.0
