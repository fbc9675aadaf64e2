"""libgufo through ctypes: signatures, error codes as exceptions, host memory as numpy arrays.

The llama.cpp bindings (`llama_cpp`) and this library must share one libllama, so the folder that
`library_dir` finds is handed to the bindings before they are imported, here and nowhere else.
"""

from __future__ import annotations

import ctypes as c
import functools
import types
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from gufo_gguf.backend.base import Bytes
from gufo_gguf.backend.libpath import library_dir, library_name
from gufo_gguf.core import env
from gufo_gguf.core.errors import BackendError, ConfigError, ContextFull, SlotNotReady, StateRejected, UnsupportedMemory

ABI_VERSION = 1

_P, _I32, _U32, _U64, _S = c.c_void_p, c.c_int32, c.c_uint32, c.c_uint64, c.c_char_p


class NativeComponent(c.Structure):
    """Mirror of ``struct gufo_component``."""

    _fields_ = [
        ("id", c.c_char * 64),
        ("dtype", c.c_char * 16),
        ("is_rows", _I32),
        ("layout", _U32),
        ("n_bytes", _U64),
    ]


class NativePiece(c.Structure):
    """Mirror of ``struct gufo_piece``."""

    _fields_ = [
        ("buffer", _P),
        ("region", _U64),
        ("buffer_bytes", _U64),
        ("first", _U32),
        ("n", _U32),
        ("buffer_rows", _U32),
    ]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "gufo_abi_version": (c.c_int, []),
    "gufo_last_error": (_S, []),
    "gufo_last_log": (_S, []),
    "gufo_log_level": (None, [c.c_int]),
    "gufo_state_open": (_P, [_P, _U32, c.POINTER(c.c_int)]),
    "gufo_host_bytes": (_U64, [_P]),
    "gufo_run_open": (_P, [_P, _U32, c.POINTER(c.c_int)]),
    "gufo_state_close": (None, [_P]),
    "gufo_memory_kind": (_S, [_P]),
    "gufo_n_components": (_U32, [_P]),
    "gufo_get_component": (c.c_int, [_P, _U32, c.POINTER(NativeComponent)]),
    "gufo_row_bytes": (_U64, [_P]),
    "gufo_private_bytes": (_U64, [_P]),
    "gufo_decode": (c.c_int, [_P, _U32, _P, _P, _P]),
    "gufo_logits": (c.c_int, [_P, _U32, _P, _U64]),
    "gufo_output_index": (_I32, [_P, _U32]),
    "gufo_position": (c.c_int, [_P, _U32, c.POINTER(_I32)]),
    "gufo_positions": (c.c_int, [_P, _U32, c.POINTER(_I32), _U32, c.POINTER(_U32)]),
    "gufo_truncate": (c.c_int, [_P, _U32, _I32]),
    "gufo_clear_all": (c.c_int, [_P]),
    "gufo_pieces_out": (c.c_int, [_P, _U32, c.POINTER(NativePiece), _U32]),
    "gufo_rows_out": (c.c_int, [_P, _U32, _U32, _U32, _P, _U64]),
    "gufo_private_out": (c.c_int, [_P, _U32, _P, _U64]),
    "gufo_begin_restore": (c.c_int, [_P, _U32, _P, _U32, _U32, c.c_int]),
    "gufo_load_pieces": (c.c_int, [_P, _U32, c.POINTER(NativePiece), _U32]),
    "gufo_load_row_bytes": (c.c_int, [_P, _U32, _U32, _U32, _U32, _U64, _P, _U64]),
    "gufo_load_private_bytes": (c.c_int, [_P, _U32, _U64, _P, _U64]),
    "gufo_load_private": (c.c_int, [_P, _U32, _P, _U64]),
    "gufo_wait_restore": (c.c_int, [_P, _U32]),
    "gufo_finish_restore": (c.c_int, [_P, _U32]),
    "gufo_abort_restore": (c.c_int, [_P, _U32]),
    "gufo_metadata": (c.c_int, [_P, _U32, _P, _U64, c.POINTER(_U64)]),
    "gufo_host_alloc": (_P, [_P, _U64]),
    "gufo_host_ptr": (_P, [_P]),
    "gufo_host_is_pinned": (c.c_int, [_P]),
    "gufo_host_free": (None, [_P]),
}

_ERRORS: dict[int, type[Exception]] = {
    1: ValueError,
    2: UnsupportedMemory,
    3: SlotNotReady,
    4: StateRejected,
    5: ContextFull,
}


@functools.cache
def bindings() -> types.ModuleType:
    """llama-cpp-python's low-level module, loading our libllama."""
    env.set_bindings_library_dir(library_dir())
    env.forbid_rocblas_atomics()
    import llama_cpp.llama_cpp as low

    return low


@functools.cache
def library() -> c.CDLL:
    """libgufo with its signatures set.

    Raises ConfigError naming ``make native`` when it is absent or of another ABI.
    """
    folder = library_dir()
    bindings()  # loads libllama and the ggml libraries first
    lib = c.CDLL(str(folder / library_name("gufo")))
    for name, (restype, argtypes) in _SIGNATURES.items():
        function = getattr(lib, name, None)
        if function is None:
            raise ConfigError(f"{folder} holds a libgufo without {name}, an older one: run `make native`")
        function.restype = restype
        function.argtypes = argtypes
    if lib.gufo_abi_version() != ABI_VERSION:
        raise ConfigError(
            f"{folder} holds ABI {lib.gufo_abi_version()} of libgufo, {ABI_VERSION} is needed: run `make native`"
        )
    lib.gufo_log_level(3)  # warnings and errors, until the CLI says otherwise
    return lib


def check(code: int) -> None:
    """Turn a status code into the exception it stands for, with the library's message."""
    if code:
        message = library().gufo_last_error().decode("utf-8", "replace")
        raise _ERRORS.get(code, BackendError)(message)


def last_log() -> str:
    """The newest warning or error llama.cpp printed, once; for messages about failed loads."""
    return str(library().gufo_last_log().decode("utf-8", "replace")).strip()


def pointer(array: np.ndarray[Any, Any]) -> int:
    """Address of a contiguous array; the caller keeps the array alive over the call."""
    if not array.flags.c_contiguous:
        raise ValueError("the buffer is not contiguous")
    return array.ctypes.data


def pieces(parts: Sequence[tuple[int, int, Bytes, int]]) -> Any:
    """``gufo_piece[]`` of (first, n, buffer, buffer_rows); the caller keeps the buffers alive."""
    raw = (NativePiece * len(parts))()
    for out, (first, n, buffer, buffer_rows) in zip(raw, parts, strict=True):
        out.buffer, out.buffer_bytes = pointer(buffer), buffer.nbytes
        out.first, out.n, out.buffer_rows = first, n, buffer_rows
        out.region = id(buffer if buffer.base is None else buffer.base)
    return raw


def host_array(state: int, n_bytes: int) -> Bytes:
    """Host memory for transfers as uint8; freed when the last view of it goes."""
    lib = library()
    handle = lib.gufo_host_alloc(state, max(1, n_bytes))
    if not handle:
        raise MemoryError(lib.gufo_last_error().decode("utf-8", "replace"))
    raw = (c.c_uint8 * n_bytes).from_address(lib.gufo_host_ptr(handle))
    # numpy keeps `raw` as the base of every view, so the memory lives as long as any of them
    weakref.finalize(raw, lib.gufo_host_free, handle)
    return np.frombuffer(raw, dtype=np.uint8)
