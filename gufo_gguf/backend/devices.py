"""Which devices the built library sees, and what it was compiled with, for ``gufo doctor``.

ggml's device registry is asked directly: llama.cpp's bindings have no call for it.
"""

from __future__ import annotations

import ctypes as c
import mmap
from dataclasses import dataclass
from pathlib import Path

from gufo_gguf.backend import native
from gufo_gguf.backend.libpath import library_dir, library_name

_KINDS = {0: "CPU", 1: "GPU", 2: "integrated GPU", 3: "accelerator"}

_CUB_TOP_K = b"DeviceTopK"
"""In the symbol names of CUB's top-k kernels, which only exist where that code was compiled."""


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    description: str
    kind: str
    free_bytes: int
    total_bytes: int


def devices() -> list[Device]:
    """Everything a model could run on, in ggml's order.  Raises ConfigError when nothing is built."""
    native.library()  # loads the ggml libraries from the same folder
    registry = c.CDLL(str(library_dir() / library_name("ggml")))
    base = c.CDLL(str(library_dir() / library_name("ggml-base")))
    registry.ggml_backend_dev_count.restype = c.c_size_t
    registry.ggml_backend_dev_get.restype = c.c_void_p
    registry.ggml_backend_dev_get.argtypes = [c.c_size_t]
    for text in ("name", "description"):
        function = getattr(base, f"ggml_backend_dev_{text}")
        function.restype, function.argtypes = c.c_char_p, [c.c_void_p]
    base.ggml_backend_dev_type.argtypes = [c.c_void_p]
    base.ggml_backend_dev_memory.argtypes = [c.c_void_p, c.POINTER(c.c_size_t), c.POINTER(c.c_size_t)]
    base.ggml_backend_dev_memory.restype = None
    found = []
    for i in range(registry.ggml_backend_dev_count()):
        device = registry.ggml_backend_dev_get(i)
        free, total = c.c_size_t(), c.c_size_t()
        base.ggml_backend_dev_memory(device, c.byref(free), c.byref(total))
        found.append(
            Device(
                base.ggml_backend_dev_name(device).decode("utf-8", "replace"),
                base.ggml_backend_dev_description(device).decode("utf-8", "replace"),
                _KINDS.get(base.ggml_backend_dev_type(device), "other"),
                free.value,
                total.value,
            )
        )
    return found


def system_info() -> str:
    """llama.cpp's own line about instruction sets and build options."""
    text: bytes = native.bindings().llama_print_system_info()
    return text.decode("utf-8", "replace").strip()


def has_cub_top_k(folder: Path | None = None) -> bool:
    """Was CUB's top-k compiled in?  It picks among ties in varying order, so equal runs can differ."""
    path = (folder or library_dir()) / library_name("ggml-cuda")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return view.find(_CUB_TOP_K) >= 0
    except (OSError, ValueError):  # no CUDA in this build; an empty file cannot be mapped
        return False
