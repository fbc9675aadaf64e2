"""What lies in a cache folder, for people: read only, so that it also works on a folder in use.

A start-up's scan syncs the manifests' folder before it believes what it sees; a look does not need
to, and must not touch a folder that another process writes.  What it sees may be gone a moment
later: sizes and shares are a snapshot.

``remove`` is the one thing here that changes the folder, and it takes the folder's lock.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter

from gufo_gguf.core.errors import StoreError
from gufo_gguf.store.catalogue import Catalogue, DiskRecord, Usage
from gufo_gguf.store.disk import DiskStore
from gufo_gguf.store.fs import FileSystem, PosixFileSystem
from gufo_gguf.store.layout import LOCK_NAME, FileClass, Layout, is_ours, ours
from gufo_gguf.store.manifest import Manifest
from gufo_gguf.store.scan import read_manifest, reclaim
from gufo_gguf.store.types import Damage


@dataclass(frozen=True, slots=True)
class Shelf:
    """A folder at one moment.  ``catalogue`` answers about files and shares."""

    records: tuple[DiskRecord, ...]
    """Intact checkpoints (manifest and sizes; checksums were not read), oldest first."""
    damaged: tuple[tuple[str, Damage], ...]
    """(key, what is wrong) of checkpoints that cannot be restored."""
    catalogue: Catalogue

    @property
    def usage(self) -> Usage:
        """Bytes of everything, in blocks."""
        return self.catalogue.usage()

    def find(self, ident: str) -> DiskRecord | Damage:
        """The checkpoint whose key begins with ``ident``.  Raises StoreError when none or several do."""
        ident = ident.lower()
        found: dict[str, DiskRecord | Damage] = {r.key: r for r in self.records if r.key.startswith(ident)}
        found.update({key: damage for key, damage in self.damaged if key.startswith(ident)})
        if not ident or not found:
            raise StoreError(f"there is no checkpoint {ident!r} in the folder; `gufo cache ls` shows what is")
        if len(found) > 1:
            some = ", ".join(sorted(found)[:4])
            raise StoreError(f"{ident!r} begins {len(found)} checkpoints ({some}); give more of the id")
        return next(iter(found.values()))

    def short_ids(self, at_least: int = 8) -> dict[str, str]:
        """The shortest beginning, of at least so many digits, that tells each key from all others."""
        keys = sorted([r.key for r in self.records] + [key for key, _ in self.damaged])
        shared = [0] * (len(keys) + 1)
        for i in range(1, len(keys)):
            shared[i] = next((n for n in range(32) if keys[i - 1][n] != keys[i][n]), 32)
        return {key: key[: max(at_least, shared[i] + 1, shared[i + 1] + 1)] for i, key in enumerate(keys)}


def holder(folder: str) -> str | None:
    """The pid, as text, of the process that holds the folder's lock; None when nobody does.

    Asking takes a shared lock for an instant, so it is for people's commands, not for loops.
    """
    try:
        fd = os.open(os.path.join(folder, Layout().base, LOCK_NAME), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(fd, 64, 0).decode("ascii", "replace").strip() or "?"
    except OSError:
        return None
    finally:
        os.close(fd)
    return None


def open_for_reading(folder: str) -> PosixFileSystem:
    """The folder as it is; nothing is created.  Raises StoreError when it is no cache folder."""
    fs = PosixFileSystem(folder, create=False)
    try:
        layout = Layout()
        layout.refuse_newer(fs)
        if not layout.exists(fs):
            raise StoreError(f"{folder} is not a cache folder: there is no {layout.base} in it")
    except BaseException:
        fs.shut()
        raise
    return fs


def browse(fs: FileSystem, layout: Layout | None = None) -> Shelf:
    """Read all manifests and file sizes, no payload.  Raises StoreError when a folder cannot be read."""
    layout = layout or Layout()
    catalogue = Catalogue(0)
    records: list[DiskRecord] = []
    damaged: list[tuple[str, Damage]] = []
    try:
        # manifests before files: what is published meanwhile shows as unlisted files, not as damage
        manifests = sorted(ours(fs.entries(layout.manifests), FileClass.MANIFEST), key=itemgetter(0))
        read = [(key, entry, read_manifest(fs, layout, key)) for key, entry in manifests]
        for suffix in (FileClass.CHUNK, FileClass.PRIVATE):
            catalogue.found_files(suffix, ours(fs.entries(layout.folder_of(suffix)), suffix))
        for entry in fs.entries(layout.tmp):
            if is_ours(entry):
                catalogue.found_debris(layout.tmp, entry.name, entry.disk_bytes)
        still_there = {key for key, _ in ours(fs.entries(layout.manifests), FileClass.MANIFEST)}
    except OSError as e:
        raise StoreError(f"the cache folder {fs.root} cannot be read: {e.strerror or e}") from e
    for key, entry, found in read:
        if found is None or key not in still_there:
            continue  # evicted while we looked
        if isinstance(found, Manifest):
            admitted = catalogue.admit(found, entry.disk_bytes)
            if isinstance(admitted, DiskRecord):
                records.append(admitted)
                continue
            found = Damage(layout.folder_of(admitted.suffix), admitted.key + admitted.suffix, admitted.reason)
        damaged.append((key, found))
    return Shelf(tuple(sorted(records, key=lambda r: r.sequence)), tuple(damaged), catalogue)


def remove(folder: str, idents: Iterable[str] | None) -> tuple[tuple[DiskRecord, ...], int]:
    """Remove checkpoints and the files that only they needed; returns them and the bytes (of blocks) freed.

    ``idents``: beginnings of ids; None = every checkpoint.

    All or none: an id that is not there, or begins several, changes nothing.  Damaged checkpoints and
    debris go too, as at a server's start.  Raises StoreError, with the holder's pid when the folder
    is in use.
    """
    open_for_reading(folder).shut()  # never create what should be emptied
    store = DiskStore.open(folder, 1 << 62)
    try:
        for _ in store.load():
            pass
        shelf = browse(store.fs, store.layout)
        found = [*shelf.records] if idents is None else [shelf.find(ident) for ident in idents]
        records = tuple({r.key: r for r in found if isinstance(r, DiskRecord)}.values())
        store.catalogue.begin_retire(r.key for r in records)
        freed = 0
        for freed in reclaim(store.fs, store.layout, store.catalogue):  # noqa: B007
            pass
        return records, freed
    except OSError as e:
        raise StoreError(f"the cache folder {folder} cannot be changed: {e.strerror or e}") from e
    finally:
        store.close()
