"""The bookkeeping llama.cpp writes for a slot, parsed so that two slots can be compared.

The raw stream names the slot and counts the context's streams; everything else in it must be
equal for equal states:

    KV cache    n_stream, then per stream: n_cells, cells (position, 1, [extras], slot), tensor list
    recurrent   n_cells, cells (position, 0), tensor list

Written from the layout alone, independently of the native code, which also reads it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

EXTRA_BYTES = 12
"""x, y and the token of a cell, where the cache keeps them."""
_LAYERS_MAX = 1024


class Unreadable(ValueError):
    """The bytes are not such a section."""


@dataclass(frozen=True, slots=True)
class Section:
    cells: tuple[tuple[int, bytes], ...]
    """(position, extras) of each cell, in cell order."""
    tensors: bytes
    """Types and row sizes, as written."""


def parse(raw: bytes, memory: str, slot: int) -> tuple[Section, ...]:
    """Sections of a slot's stream by memory kind; Unreadable if it is of another slot or damaged."""
    if memory == "recurrent":
        return (_recurrent(raw, len(raw)),)
    first, at = _kv(raw, 0, slot)
    if memory == "kv":
        _require(at == len(raw), "bytes follow the last cache")
        return (first,)
    if memory == "iswa":
        second, end = _kv(raw, at, slot)
        _require(end == len(raw), "bytes follow the last cache")
        return (first, second)
    if memory == "hybrid":
        return (first, _recurrent(raw[at:], len(raw) - at))
    if memory == "hybrid_idx":
        # the recurrent section does not say its length; the indexer's ends where the stream ends
        for start in range(at + 12, len(raw)):
            try:
                indexer, end = _kv(raw, start, slot)
            except (Unreadable, struct.error):
                continue
            if end == len(raw) and len(indexer.cells) == len(first.cells):
                return (first, _recurrent(raw[at:], start - at), indexer)
        raise Unreadable("no indexer section")
    raise Unreadable(f"memory kind {memory}")


def _require(condition: bool, why: str) -> None:
    if not condition:
        raise Unreadable(why)


def _kv(raw: bytes, at: int, slot: int) -> tuple[Section, int]:
    (n_stream,) = struct.unpack_from("<I", raw, at)
    at += 4
    _require(slot < n_stream <= 256, "stream count")
    section = Section((), b"")
    for stream in range(n_stream):
        (n_cells,) = struct.unpack_from("<I", raw, at)
        at += 4
        if stream != slot:
            _require(n_cells == 0, f"stream {stream} holds cells of slot {slot}")
        elif n_cells:
            section, at = _stream(raw, at, n_cells, slot)
    return section, at


def _stream(raw: bytes, at: int, n_cells: int, slot: int) -> tuple[Section, int]:
    for n_extra in (0, EXTRA_BYTES):
        end = at + n_cells * (12 + n_extra)
        tensors_end = _tensor_list_end(raw, end)
        if tensors_end is None:
            continue
        layout = np.dtype([("position", "<i4"), ("n_slots", "<u4"), ("extra", f"V{n_extra}"), ("slot", "<i4")])
        cells = np.frombuffer(raw, layout, n_cells, at)
        if (cells["n_slots"] == 1).all() and (cells["slot"] == slot).all() and (cells["position"] >= 0).all():
            extras = (raw[c + 8 : c + 8 + n_extra] for c in range(at, end, layout.itemsize))
            pairs = zip(cells["position"].tolist(), extras, strict=True)
            return Section(tuple(pairs), raw[end:tensors_end]), tensors_end
    raise Unreadable("cells")


def _tensor_list_end(raw: bytes, at: int) -> int | None:
    """Where the list of K and then V tensors ends; a cache of keys only (the indexer's) has no V."""
    if at + 8 > len(raw):
        return None
    transposed, n_layer = struct.unpack_from("<II", raw, at)
    if transposed or not 0 < n_layer <= _LAYERS_MAX:
        return None
    for n_entries in (2 * n_layer, n_layer):
        end = int(at + 8 + n_entries * 12)
        if end <= len(raw):
            entries = np.frombuffer(raw, np.dtype([("type", "<u4"), ("row_bytes", "<u8")]), n_entries, at + 8)
            if (entries["type"] < 64).all() and ((entries["row_bytes"] - 1) < 1 << 24).all():
                return end
    return None


def _recurrent(raw: bytes, length: int) -> Section:
    (n_cells,) = struct.unpack_from("<I", raw, 0)
    _require(n_cells <= 1, f"{n_cells} recurrent cells for one slot")
    end = 4 + 8 * n_cells
    cells = []
    for at in range(4, end, 8):
        position, n_slots = struct.unpack_from("<iI", raw, at)
        _require(n_slots == 0, "a recurrent cell names slots")
        cells.append((position, b""))
    return Section(tuple(cells), raw[end:length])
