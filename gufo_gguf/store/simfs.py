"""A simulated file system whose power can be cut between any two calls.

It keeps, beside what a running process sees, what a disk is *obliged* to hold: the bytes of a file
as of its last sync and the names of a folder as of its last sync.  Everything since is pending, and
a power cut may keep or lose each pending item by itself:

    a write          kept, lost, or torn at a sector: only its first or only its last sectors kept
                     (a torn or lost write before a kept one leaves zeros, as a hole)
    a name change    made or not, each by itself, in any combination (a link and the removal it
                     belongs to are two changes)

``images`` builds the disks that may result.  All combinations while they are few; else every single
deviation from "all kept" and "all lost", and a seeded sample.  Name changes in folders that are never
synced (tmp/) pile up and matter to nobody, so all but the last two are taken together.

It ships with the package, like the fake backend: a design that changes the order of its operations
should be able to try it against this first.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gufo_gguf.store.fs import Entry, FileKind, LockHeld

_FOLDER = -1
"""Stands for a subfolder where a name's file number is expected."""


@dataclass(slots=True)
class _File:
    live: bytearray
    """What a process reads."""
    kept: bytes
    """What a disk holds for sure."""
    writes: list[tuple[int, bytes]] = field(default_factory=list)
    """(offset, data) since the last sync."""
    lost: bool = False
    """A sync has failed: later ones report success and keep nothing, as kernels do."""


@dataclass(slots=True)
class _Folder:
    live: dict[str, int]
    kept: dict[str, int]
    changes: list[tuple[str, int | None]] = field(default_factory=list)
    """(name, new file number or None for a removal) since the last sync."""


@dataclass(frozen=True, slots=True)
class _Item:
    """Something pending, or several things that are kept or lost together."""

    folder: str | None
    file: int | None
    indexes: tuple[int, ...]
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Operation:
    """One call, for the record."""

    number: int
    call: str
    folder: str
    name: str


class SimFS:
    """A FileSystem in memory.  Not for use from several threads, except for reading."""

    def __init__(self, *, sector_bytes: int = 512, block_bytes: int = 512, capacity_bytes: int | None = None) -> None:
        self.sector_bytes = sector_bytes
        self.block_bytes = block_bytes
        self.capacity_bytes = capacity_bytes
        self.read_only = False
        self.root_name = "(simulated)"
        self.on_operation: Callable[[Operation], None] | None = None
        """Called after each operation that changed something or made something lasting."""
        self.n_operations = 0
        self.bytes_read: dict[str, int] = {}
        """By folder."""
        self._files: dict[int, _File] = {}
        self._folders: dict[str, _Folder] = {"": _Folder({}, {})}
        self._next_file = 1
        self._next_handle = 1000
        self._handles: dict[int, tuple[int, str, str]] = {}
        self._locked: dict[tuple[str, str], int] = {}
        """Lock file to the handle that holds it."""

    @property
    def root(self) -> str:
        return self.root_name

    @property
    def n_open(self) -> int:
        return len(self._handles)

    # -- the protocol ----------------------------------------------------------------------------
    def make_folder(self, folder: str) -> None:
        parent, _, name = folder.rpartition("/")
        if name in self._at(parent).live:
            if self._at(parent).live[name] != _FOLDER:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name)
            return
        self._may_change()
        self._change(parent, name, _FOLDER)
        self._folders[folder] = _Folder({}, {})
        self._did("make_folder", folder, "")

    def entries(self, folder: str) -> list[Entry]:
        found = []
        for name, number in self._at(folder).live.items():
            if number == _FOLDER:
                found.append(Entry(name, FileKind.FOLDER, 0, 0))
            else:
                n = len(self._files[number].live)
                found.append(Entry(name, FileKind.FILE, n, self._blocks(n)))
        return found

    def names(self, folder: str) -> list[str]:
        return list(self._at(folder).live)

    def read_file(self, folder: str, name: str, max_bytes: int) -> tuple[bytes, int]:
        handle = self.open(folder, name)
        try:
            n_bytes, disk_bytes = self.size(handle)
            out = bytearray(min(n_bytes, max_bytes) + 1)
            return bytes(out[: self.read(handle, memoryview(out), 0)]), disk_bytes
        finally:
            self.close(handle)

    def create(self, folder: str, name: str) -> int:
        self._may_change()
        if name in self._at(folder).live:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        number = self._next_file
        self._next_file += 1
        self._files[number] = _File(bytearray(), b"")
        self._change(folder, name, number)
        handle = self._handle(number, folder, name)
        self._did("create", folder, name)
        return handle

    def open(self, folder: str, name: str) -> int:
        number = self._at(folder).live.get(name)
        if number is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        if number == _FOLDER:
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), name)
        return self._handle(number, folder, name)

    def size(self, handle: int) -> tuple[int, int]:
        n = len(self._files[self._handles[handle][0]].live)
        return n, self._blocks(n)

    def write(self, handle: int, data: memoryview) -> int:
        self._may_change()
        number, folder, name = self._handles[handle]
        f = self._files[number]
        if self.capacity_bytes is not None and self.used_bytes() + len(data) > self.capacity_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        f.writes.append((len(f.live), bytes(data)))
        f.live += data
        self._did("write", folder, name)
        return len(data)

    def read(self, handle: int, out: memoryview, offset: int) -> int:
        number, folder, _ = self._handles[handle]
        data = self._files[number].live[offset : offset + len(out)]
        out[: len(data)] = data
        self.bytes_read[folder] = self.bytes_read.get(folder, 0) + len(data)
        return len(data)

    def sync(self, handle: int) -> None:
        number, folder, name = self._handles[handle]
        f = self._files[number]
        if not f.lost:
            f.kept, f.writes = bytes(f.live), []
        self._did("sync", folder, name)

    def close(self, handle: int) -> None:
        _, folder, name = self._handles.pop(handle)
        if self._locked.get((folder, name)) == handle:
            del self._locked[(folder, name)]

    def link(self, folder: str, name: str, to_folder: str) -> None:
        self._may_change()
        number = self._at(folder).live.get(name)
        if number is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        if name in self._at(to_folder).live:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        self._change(to_folder, name, number)
        self._did("link", to_folder, name)

    def remove(self, folder: str, name: str) -> None:
        self._may_change()
        number = self._at(folder).live.get(name)
        if number is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        if number == _FOLDER:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
        self._change(folder, name, None)
        self._did("remove", folder, name)

    def sync_folder(self, folder: str) -> None:
        at = self._at(folder)
        at.kept, at.changes = dict(at.live), []
        self._did("sync_folder", folder, "")

    def lock(self, folder: str, name: str, text: str) -> int:
        self._may_change()
        if (folder, name) in self._locked:
            raise LockHeld(text)
        if name not in self._at(folder).live:
            self.close(self.create(folder, name))
        handle = self._handle(self._at(folder).live[name], folder, name)
        self._locked[(folder, name)] = handle
        return handle

    # -- failing ---------------------------------------------------------------------------------
    def lose_sync(self, handle: int) -> None:
        """What a failed sync of a file leaves: its pending bytes may never reach the disk."""
        self._files[self._handles[handle][0]].lost = True

    # -- inspection ------------------------------------------------------------------------------
    def used_bytes(self) -> int:
        """Blocks of all files that have a name."""
        numbers = {n for f in self._folders.values() for n in f.live.values() if n != _FOLDER}
        return sum(self._blocks(len(self._files[n].live)) for n in numbers)

    def content(self, folder: str, name: str) -> bytes:
        return bytes(self._files[self._at(folder).live[name]].live)

    def put(self, folder: str, name: str, data: bytes) -> None:
        """Place a file from outside, lasting at once: damage, debris, foreign files."""
        number = self._next_file
        self._next_file += 1
        self._files[number] = _File(bytearray(data), data)
        at = self._at(folder)
        at.live[name] = at.kept[name] = number

    def fingerprint(self) -> int:
        """Equal for disks with equal names and bytes."""
        return hash(
            frozenset(
                (path, name, bytes(self._files[n].live) if n != _FOLDER else None)
                for path, folder in self._folders.items()
                for name, n in folder.live.items()
            )
        )

    def clone(self, *, killed: bool = False) -> SimFS:
        """A copy, pending items included.  ``killed``: as after kill -9: no handles and no locks."""
        copy = SimFS(sector_bytes=self.sector_bytes, block_bytes=self.block_bytes, capacity_bytes=self.capacity_bytes)
        copy._files = {n: _File(bytearray(f.live), f.kept, list(f.writes), f.lost) for n, f in self._files.items()}
        copy._folders = {p: _Folder(dict(f.live), dict(f.kept), list(f.changes)) for p, f in self._folders.items()}
        copy._next_file = self._next_file
        if not killed:
            copy._handles, copy._locked = dict(self._handles), dict(self._locked)
        return copy

    # -- power cuts ------------------------------------------------------------------------------
    def images(self, limit: int, rng: random.Random) -> Iterator[SimFS]:
        """Disks that a power cut now may leave, at most about ``limit`` of them, no two choices equal."""
        items = self._pending()
        total = 1
        for item in items:
            total *= len(item.options)
        if total <= limit:
            choices: Iterator[tuple[str, ...]] = itertools.product(*(item.options for item in items))
        else:
            choices = iter(dict.fromkeys(self._some_choices(items, limit, rng)))
        for choice in choices:
            yield self._image(dict(zip(items, choice, strict=True)))

    @staticmethod
    def _some_choices(items: list[_Item], limit: int, rng: random.Random) -> Iterator[tuple[str, ...]]:
        extremes = (tuple(i.options[0] for i in items), tuple(i.options[-1] for i in items))
        yield from extremes
        singles = [
            (*base[:k], option, *base[k + 1 :])
            for k, item in enumerate(items)
            for option in item.options
            for base in extremes
        ]
        yield from singles if len(singles) <= limit else rng.sample(singles, limit)
        for _ in range(limit - min(len(singles), limit)):
            yield tuple(rng.choice(i.options) for i in items)

    def _pending(self) -> list[_Item]:
        items: list[_Item] = []
        for path, folder in self._folders.items():
            n = len(folder.changes)
            if n > 4 and path.endswith("/tmp"):
                items.append(_Item(path, None, tuple(range(n - 2)), ("old", "new")))
                items.extend(_Item(path, None, (i,), ("old", "new")) for i in range(n - 2, n))
            else:
                items.extend(_Item(path, None, (i,), ("old", "new")) for i in range(n))
        for number, f in self._files.items():
            for i, (_, data) in enumerate(f.writes):
                torn = ("head", "rest") if len(data) > self.sector_bytes else ()
                items.append(_Item(None, number, (i,), ("lost", *torn, "kept")))
        return items

    def _image(self, choice: dict[_Item, str]) -> SimFS:
        image = SimFS(sector_bytes=self.sector_bytes, block_bytes=self.block_bytes, capacity_bytes=self.capacity_bytes)
        image._next_file = self._next_file
        kept_changes: dict[str, set[int]] = {}
        kept_writes: dict[int, dict[int, str]] = {}
        for item, option in choice.items():
            for i in item.indexes:
                if item.folder is not None and option == "new":
                    kept_changes.setdefault(item.folder, set()).add(i)
                elif item.file is not None:
                    kept_writes.setdefault(item.file, {})[i] = option
        for path, folder in sorted(self._folders.items()):
            parent, _, name = path.rpartition("/")
            if path and (parent not in image._folders or name not in image._folders[parent].live):
                continue  # the folder's own name was lost, and everything in it with it
            names = dict(folder.kept)
            for i, (changed, number) in enumerate(folder.changes):
                if i in kept_changes.get(path, ()):
                    if number is None:
                        names.pop(changed, None)
                    else:
                        names[changed] = number
            image._folders[path] = _Folder(names, dict(names))
        numbers = {n for f in image._folders.values() for n in f.live.values() if n != _FOLDER}
        for number in numbers:
            data = self._survives(self._files[number], kept_writes.get(number, {}))
            image._files[number] = _File(bytearray(data), data)
        return image

    def _survives(self, f: _File, options: dict[int, str]) -> bytes:
        data = bytearray(f.kept)
        for i, (offset, written) in enumerate(f.writes):
            option = options.get(i, "lost")
            if option == "lost":
                continue
            half = (offset + len(written) // 2) // self.sector_bytes * self.sector_bytes - offset
            half = max(half, 0)
            start, end = {"kept": (0, len(written)), "head": (0, half), "rest": (half, len(written))}[option]
            if len(data) < offset + end:
                data += bytes(offset + end - len(data))
            data[offset + start : offset + end] = written[start:end]
        return bytes(data)

    # -- inside ----------------------------------------------------------------------------------
    def _at(self, folder: str) -> _Folder:
        found = self._folders.get(folder)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)
        return found

    def _change(self, folder: str, name: str, number: int | None) -> None:
        at = self._at(folder)
        at.changes.append((name, number))
        if number is None:
            del at.live[name]
        else:
            at.live[name] = number

    def _handle(self, number: int, folder: str, name: str) -> int:
        self._next_handle += 1
        self._handles[self._next_handle] = (number, folder, name)
        return self._next_handle

    def _blocks(self, n_bytes: int) -> int:
        return (n_bytes + self.block_bytes - 1) // self.block_bytes * self.block_bytes

    def _may_change(self) -> None:
        if self.read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def _did(self, call: str, folder: str, name: str) -> None:
        self.n_operations += 1
        if self.on_operation is not None:
            self.on_operation(Operation(self.n_operations, call, folder, name))
