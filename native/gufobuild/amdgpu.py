"""Which AMD GPU a piece of compiled code is for, read from the bytes themselves.

A code object is an ELF file whose header names the processor; a linked HIP library carries its code
objects in bundles:

    library: … [magic][count][offset, size, id]×count … code object … code object … [magic][count] …

llvm-readelf and clang-offload-bundler say the same; they were rejected because a machine that only
has a finished library has neither of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from .errors import BuildError

EM_AMDGPU = 224
_MACH_MASK = 0xFF
# The processor numbers of LLVM's AMDGPU usage guide, as far as llama.cpp's HIP build is used with them.
_NUMBERS = (
    "2c:900 2f:906 30:908 3f:90a 4c:942 4f:950 33:1010 36:1030 37:1031 38:1032 3d:1035 45:1036 "
    "41:1100 46:1101 47:1102 44:1103 43:1150 4a:1151 55:1152 58:1153 48:1200 4e:1201"
)
_MACH = {int(number, 16): f"gfx{name}" for number, name in (pair.split(":") for pair in _NUMBERS.split())}
_BUNDLE = b"__CLANG_OFFLOAD_BUNDLE__"
_COMPRESSED = b"CCOB"
_SYMBOL_TABLES = (2, 11)
"""SHT_SYMTAB and SHT_DYNSYM."""
_KERNEL = b".kd"
"""The descriptor that every kernel has, beside its code."""


@dataclass(frozen=True)
class CodeObject:
    """``target`` is the processor (gfx1151), ``kernels`` the names of its kernels, mangled."""

    target: str
    kernels: frozenset[str]
    n_bytes: int


def read_code_object(data: bytes) -> CodeObject:
    """What an AMD GPU code object is for; BuildError when the bytes are something else or cut off."""
    if len(data) < 64 or data[:4] != b"\x7fELF" or data[4:6] != b"\x02\x01":
        raise BuildError("not a 64-bit little-endian ELF file")
    (machine,) = struct.unpack_from("<H", data, 18)
    if machine != EM_AMDGPU:
        raise BuildError(f"compiled for ELF machine {machine}, not for AMD GPUs ({EM_AMDGPU})")
    (flags,) = struct.unpack_from("<I", data, 48)
    mach = flags & _MACH_MASK
    try:
        kernels = frozenset(_kernel_names(data))
    except (struct.error, ValueError) as error:
        raise BuildError(f"the code object is cut off: {error}") from error
    return CodeObject(_MACH.get(mach, f"unknown-0x{mach:02x}"), kernels, len(data))


def _kernel_names(data: bytes) -> Iterator[str]:
    (start,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, start + i * size) for i in range(count)]
    for _, kind, _, _, offset, n_bytes, link, _, _, n_entry in sections:
        if kind not in _SYMBOL_TABLES or not n_entry:
            continue
        names = sections[link][4]
        for at in range(offset, offset + n_bytes, n_entry):
            name, _, _, section, _, _ = struct.unpack_from("<IBBHQQ", data, at)
            text = data[names + name : data.index(b"\0", names + name)]
            if section and text.endswith(_KERNEL):
                yield text.removesuffix(_KERNEL).decode(errors="replace")


def bundled(data: bytes) -> list[tuple[str, bytes]]:
    """The (id, code object) pairs of every bundle in a linked library, those of the host left out.

    BuildError for compressed bundles: this Python may lack their algorithm, and counting them as
    nothing would be wrong.
    """
    found: list[tuple[str, bytes]] = []
    at = data.find(_BUNDLE)
    while at >= 0:
        found += _entries(data, at)
        at = data.find(_BUNDLE, at + len(_BUNDLE))
    if not found and data.find(_COMPRESSED) >= 0:
        raise BuildError("the library's code objects are compressed (--offload-compress); nothing was counted")
    return found


def _entries(data: bytes, start: int) -> Iterator[tuple[str, bytes]]:
    at = start + len(_BUNDLE)
    # The magic is also plain text in programs that read bundles: what does not parse is not one.
    if at + 8 > len(data):
        return
    (count,) = struct.unpack_from("<Q", data, at)
    at += 8
    for _ in range(min(count, 64)):
        if at + 24 > len(data):
            return
        offset, size, n_id = struct.unpack_from("<QQQ", data, at)
        name = data[at + 24 : at + 24 + n_id] if n_id < 256 else b""
        if not name.isascii() or not name or start + offset + size > len(data):
            return
        at += 24 + n_id
        if not name.startswith(b"host") and size:
            yield name.decode(), data[start + offset : start + offset + size]
