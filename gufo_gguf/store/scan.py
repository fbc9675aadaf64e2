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
from typing import NamedTuple

from gufo_gguf.cache.types import Tokens
from gufo_gguf.core.errors import StoreError
from gufo_gguf.store.catalogue import Catalogue, DiskRecord
from gufo_gguf.store.fs import NOT_A_FILE, FileSystem, close_quietly, read_all, remove_quietly
from gufo_gguf.store.layout import FileClass, Layout, is_ours, keys_of, ours
from gufo_gguf.store.manifest import MAX_BYTES, Manifest, ManifestError, NewerFormat, decode
from gufo_gguf.store.types import Damage, DamageReason


class Loaded(NamedTuple):
    """An intact checkpoint and its tokens, for the index."""

    record: DiskRecord
    tokens: Tokens


def scan(fs: FileSystem, layout: Layout, catalogue: Catalogue) -> Iterator[Loaded | Damage]:
    """Fill an empty catalogue from the folder.  To be run to its end before anything else is done.

    Raises OSError when a folder cannot be listed or synced, StoreError when a manifest is a later
    release's; nothing was changed on disk in either case.
    """
    for suffix in (FileClass.CHUNK, FileClass.PRIVATE):
        catalogue.found_files(suffix, ours(fs.entries(layout.folder_of(suffix)), suffix))
    for entry in fs.entries(layout.tmp):
        if is_ours(entry):
            catalogue.found_debris(layout.tmp, entry.name, entry.disk_bytes)
    for folder, entry in layout.older_files(fs):
        catalogue.found_debris(folder, entry.name, entry.disk_bytes)
    fs.sync_folder(layout.manifests)
    unreadable = False
    manifests = layout.manifests
    for key in keys_of(fs.names(manifests), FileClass.MANIFEST):
        found, disk_bytes = _read_sized(fs, manifests, key)
        if isinstance(found, Manifest):
            admitted = catalogue.admit(found, disk_bytes)
            if isinstance(admitted, DiskRecord):
                yield Loaded(admitted, found.meta.tokens)
                continue
            folder = layout.folder_of(admitted.suffix)
            found = Damage(folder, admitted.key + admitted.suffix, admitted.reason, f"needed by {key}.manifest")
        if found is None:
            continue
        if found.permanent:
            catalogue.found_debris(manifests, key + FileClass.MANIFEST, disk_bytes)
        else:
            unreadable = True
        yield found
    if unreadable:
        catalogue.hold_unlisted()


def read_manifest(fs: FileSystem, layout: Layout, key: str) -> Manifest | Damage | None:
    """Read and parse one manifest.

    None when it has gone since it was listed, or is no file at all (then it is none of ours).
    """
    return _read_sized(fs, layout.manifests, key)[0]


def _read_sized(fs: FileSystem, folder: str, key: str) -> tuple[Manifest | Damage | None, int]:
    """A manifest and the bytes of its blocks."""
    name, disk_bytes = key + FileClass.MANIFEST, 0
    try:
        try:
            data, disk_bytes = fs.read_file(folder, name, MAX_BYTES)
            return decode(data, key), disk_bytes
        except (InterruptedError, ManifestError):  # one read may bring less than the file has
            data, disk_bytes = _read_whole(fs, folder, name)
            return decode(data, key), disk_bytes
    except FileNotFoundError:
        return None, 0
    except NewerFormat as e:
        raise StoreError(
            f"the cache folder {fs.root} holds checkpoints of a later release ({e}); it is left alone: "
            f"use that release or another folder"
        ) from e
    except ManifestError as e:
        return Damage(folder, name, DamageReason.FORMAT, str(e)), disk_bytes
    except OSError as e:
        if e.errno in NOT_A_FILE:
            return None, 0
        return Damage(folder, name, DamageReason.UNREADABLE, e.strerror or str(e), permanent=False), 0


def _read_whole(fs: FileSystem, folder: str, name: str) -> tuple[bytes, int]:
    """The file's bytes and blocks, however short the single reads are."""
    handle = fs.open(folder, name)
    try:
        n_bytes, disk_bytes = fs.size(handle)
        view = memoryview(bytearray(min(n_bytes, MAX_BYTES) + 1))
        return bytes(view[: read_all(fs, handle, view, 0)]), disk_bytes
    finally:
        close_quietly(fs, handle)


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
