"""Start-up and clean-up: manifests and sizes are read, payloads never.

The order of a start:

    list chunks/, private/, tmp/   sizes only; everything in tmp/ is debris
    sync manifests/                a process killed between a rename or removal and its sync left names
                                   that a power cut could still undo: what we see must be what stays
    read each manifest             intact and all its files there in the right size → Loaded
                                   anything else → Damage, never served

Clean-up is a separate pass that the caller runs in the background, in steps: manifests that must go,
then a sync, and only then files that nothing references.  Files whose manifest could not be *read*
(as opposed to read and found wrong) stay for a later start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gufo_gguf.cache.types import Tokens
from gufo_gguf.core.errors import StoreError
from gufo_gguf.store.catalogue import Catalogue, DiskRecord
from gufo_gguf.store.fs import Entry, FileSystem, close_quietly, read_all, remove_quietly
from gufo_gguf.store.layout import FileClass, Layout, is_ours, key_of
from gufo_gguf.store.manifest import MAX_BYTES, Manifest, ManifestError, NewerFormat, decode
from gufo_gguf.store.types import Damage, DamageReason


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """An intact checkpoint and its tokens, for the index."""

    record: DiskRecord
    tokens: Tokens


def scan(fs: FileSystem, layout: Layout, catalogue: Catalogue) -> Iterator[Loaded | Damage]:
    """Fill an empty catalogue from the folder.  To be run to its end before anything else is done.

    Raises OSError when a folder cannot be listed or synced, StoreError when a manifest is a later
    release's; nothing was changed on disk in either case.
    """
    for suffix in (FileClass.CHUNK, FileClass.PRIVATE):
        for entry in fs.entries(layout.folder_of(suffix)):
            key = key_of(entry.name, suffix)
            if key is not None and is_ours(entry, (suffix,)):
                catalogue.found_file(key, suffix, entry.n_bytes, entry.disk_bytes)
    for entry in fs.entries(layout.tmp):
        if is_ours(entry):
            catalogue.found_debris(layout.tmp, entry.name, entry.disk_bytes)
    for folder, entry in layout.older_files(fs):
        catalogue.found_debris(folder, entry.name, entry.disk_bytes)
    fs.sync_folder(layout.manifests)
    unreadable = False
    entries = [e for e in fs.entries(layout.manifests) if is_ours(e, (FileClass.MANIFEST,))]
    for entry in sorted(entries, key=lambda e: e.name):
        found = read_manifest(fs, layout, entry)
        if isinstance(found, Manifest):
            wrong = catalogue.contradiction(found)
            if wrong is None:
                record = DiskRecord.of(found, entry.disk_bytes)
                catalogue.add(record)
                yield Loaded(record, found.meta.tokens)
                continue
            name, what, _ = wrong
            folder = layout.folder_of(FileClass.CHUNK if name.endswith(FileClass.CHUNK) else FileClass.PRIVATE)
            found = Damage(folder, name, DamageReason(what), f"needed by {entry.name}")
        if found is None:
            continue
        if found.permanent:
            catalogue.found_debris(layout.manifests, entry.name, entry.disk_bytes)
        else:
            unreadable = True
        yield found
    if unreadable:
        catalogue.hold_unlisted()


def read_manifest(fs: FileSystem, layout: Layout, entry: Entry) -> Manifest | Damage | None:
    """Read and parse one manifest; None when it has gone since it was listed."""
    key = key_of(entry.name, FileClass.MANIFEST)
    assert key is not None
    try:
        handle = fs.open(layout.manifests, entry.name)
        try:
            n_bytes, _ = fs.size(handle)
            if n_bytes > MAX_BYTES:
                return Damage(layout.manifests, entry.name, DamageReason.FORMAT, "larger than any manifest")
            data = memoryview(np.empty(n_bytes, dtype=np.uint8).data)
            n_read = read_all(fs, handle, data, 0)
        finally:
            close_quietly(fs, handle)
    except FileNotFoundError:
        return None
    except OSError as e:
        return Damage(layout.manifests, entry.name, DamageReason.UNREADABLE, e.strerror or str(e), permanent=False)
    try:
        return decode(data[:n_read], key)
    except NewerFormat as e:
        raise StoreError(
            f"the cache folder {fs.root} holds checkpoints of a later release ({e}); it is left alone: "
            f"use that release or another folder"
        ) from e
    except ManifestError as e:
        return Damage(layout.manifests, entry.name, DamageReason.FORMAT, str(e))


def reclaim(fs: FileSystem, layout: Layout, catalogue: Catalogue) -> Iterator[int]:
    """Remove what is to go, one file per step; yields the bytes (of blocks) given back so far.

        manifests in limbo, damaged manifests ─► sync manifests/ ─► debris, then unreferenced files

    May be left at any step and begun again.  Raises OSError when the folder cannot be synced; files
    that cannot be removed stay counted and are tried again by the next pass.
    """
    freed = 0
    retired = catalogue.limbo()
    broken = [name for folder, name in catalogue.debris() if folder == layout.manifests]
    gone: list[str] = []
    for name in [key + FileClass.MANIFEST for key in retired] + broken:
        if remove_quietly(fs, layout.manifests, name):
            gone.append(name)
        yield freed
    if gone:
        fs.sync_folder(layout.manifests)
        freed += catalogue.end_retire([key for key in retired if key + FileClass.MANIFEST in gone])
        for name in broken:
            if name in gone:
                freed += catalogue.drop_debris(layout.manifests, name)
        yield freed
    for folder, name in catalogue.debris():
        if folder != layout.manifests and remove_quietly(fs, folder, name):
            freed += catalogue.drop_debris(folder, name)
            yield freed
    for key, suffix in catalogue.loose():
        state = catalogue.take_loose(key)
        if state is not None:
            folder = layout.folder_of(suffix)
            if remove_quietly(fs, folder, key + suffix):
                freed += state.disk_bytes
            else:
                catalogue.found_debris(folder, key + suffix, state.disk_bytes)
            yield freed
