"""Verify every checksum of a cache folder; reads only, so that it also runs on a folder in use.

Each distinct file is read once, however many checkpoints share it.  In a folder in use a file may go
while it is checked: if the manifests that needed it have gone too, that was eviction, not damage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gufo_gguf.store.fs import FileSystem
from gufo_gguf.store.layout import FileClass, Layout, is_ours, keys_of
from gufo_gguf.store.manifest import Manifest
from gufo_gguf.store.parts import chunk_part, private_parts
from gufo_gguf.store.reader import verify_part
from gufo_gguf.store.scan import read_manifest
from gufo_gguf.store.types import Damage, DamageReason, Part

Progress = Callable[[int, int], None]
"""(bytes checked, bytes in all)."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What is there and what is wrong with it; no damage = every checkpoint can be restored."""

    n_checkpoints: int
    n_files: int
    n_bytes: int
    """Payload bytes whose checksums were verified."""
    damage: tuple[Damage, ...]
    lost: tuple[str, ...]
    """Keys of checkpoints that cannot be restored because of it."""
    n_unlisted: int
    unlisted_bytes: int
    """Files of ours that no manifest lists, in blocks: debris, or a write under way."""


def check_store(
    fs: FileSystem, layout: Layout | None = None, progress: Progress | None = None, buffer_bytes: int = 1 << 20
) -> CheckReport:
    """Read all manifests and every file they list.

    Raises OSError when a folder cannot be listed, StoreError for a later release's folder.
    """
    layout = layout or Layout()
    layout.refuse_newer(fs)
    unlisted = {
        (folder, e.name): e.disk_bytes
        for folder in (layout.chunks, layout.private, layout.tmp)
        for e in fs.entries(folder)
        if is_ours(e)
    }
    damage: list[Damage] = []
    lost: set[str] = set()
    parts: dict[tuple[str, str, int], Part] = {}
    needed_by: dict[tuple[str, str], list[str]] = {}
    n_checkpoints = 0
    for key in keys_of(fs.names(layout.manifests), FileClass.MANIFEST):
        found = read_manifest(fs, layout, key)
        if found is None:
            continue
        n_checkpoints += 1
        if isinstance(found, Damage):
            damage.append(found)
            lost.add(key)
            continue
        for part in _parts_of(layout, found):
            same = parts.setdefault((part.folder, part.name, part.offset), part)
            if same.checksum != part.checksum or same.file_bytes != part.file_bytes:
                damage.append(
                    Damage(
                        layout.manifests, key + FileClass.MANIFEST, DamageReason.FORMAT, f"contradicts on {part.name}"
                    )
                )
                lost.add(key)
            needed_by.setdefault((part.folder, part.name), []).append(key)
            unlisted.pop((part.folder, part.name), None)
        unlisted.pop((layout.private, found.private.key + FileClass.PRIVATE), None)
    total = sum(p.n_bytes for p in parts.values())
    done = 0
    buffer = memoryview(bytearray(buffer_bytes))
    for part in parts.values():
        bad = verify_part(fs, part, buffer)
        if bad is not None and not _gone_meanwhile(fs, layout, needed_by[(part.folder, part.name)], bad):
            damage.append(bad)
            lost.update(needed_by[(part.folder, part.name)])
        done += part.n_bytes
        if progress is not None:
            progress(done, total)
    return CheckReport(
        n_checkpoints, len(needed_by), total, tuple(damage), tuple(sorted(lost)), len(unlisted), sum(unlisted.values())
    )


def _parts_of(layout: Layout, m: Manifest) -> list[Part]:
    chunks = [chunk_part(layout, i, ref) for i, ref in enumerate(m.chunks)]
    return chunks + private_parts(layout, m.private)


def _gone_meanwhile(fs: FileSystem, layout: Layout, keys: list[str], bad: Damage) -> bool:
    if bad.reason is not DamageReason.MISSING:
        return False
    left = set(fs.names(layout.manifests))
    return not any(key + FileClass.MANIFEST in left for key in keys)
