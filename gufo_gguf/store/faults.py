"""Fault injection: a file system that fails a chosen call in a chosen way.

Wraps any ``FileSystem``, so that the same loop runs on the simulated disk and on a real one:

    n = 0
    while True:
        fs = FaultyFS(inner, Fault("write", n, Mode.ERROR, errno.EIO))
        … run the scenario …
        if not fs.fired: break          # the n-th such call did not happen any more
        n += 1
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum

from gufo_gguf.store.fs import Entry, FileSystem
from gufo_gguf.store.simfs import SimFS


class Mode(StrEnum):
    ERROR = "error"
    """Nothing was done; the error is raised."""
    DONE_BUT_ERROR = "done_but_error"
    """The call did its work, and the error is raised all the same (a lost reply)."""
    SHORT = "short"
    """read and write move half of what was asked, at least one byte."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The ``at``-th call of this name (from 0) fails; ``forever``: so do all later ones of that name.

    ``call`` "*" counts every call.
    """

    call: str
    at: int
    mode: Mode = Mode.ERROR
    errno: int = 0
    forever: bool = False


class FaultyFS:
    """A FileSystem that forwards every call but the faulty ones."""

    def __init__(self, inner: FileSystem, fault: Fault | None = None) -> None:
        self.inner = inner
        self.fault = fault
        self.fired = False
        self.counts: dict[str, int] = {}

    @property
    def root(self) -> str:
        return self.inner.root

    def _mode(self, call: str) -> Mode | None:
        """Count the call; how it is to fail, or None."""
        n = self.counts.get(call, 0)
        self.counts[call] = n + 1
        n_all = self.counts.get("*", 0)
        self.counts["*"] = n_all + 1
        f = self.fault
        if f is None or f.call not in (call, "*"):
            return None
        number = n_all if f.call == "*" else n
        if number == f.at or (f.forever and number > f.at):
            self.fired = True
            return f.mode
        return None

    def _error(self, name: str) -> OSError:
        assert self.fault is not None
        return OSError(self.fault.errno, os.strerror(self.fault.errno), name)

    def make_folder(self, folder: str) -> None:
        mode = self._mode("make_folder")
        if mode is not Mode.ERROR:
            self.inner.make_folder(folder)
        if mode is not None:
            raise self._error(folder)

    def entries(self, folder: str) -> list[Entry]:
        if self._mode("entries") is not None:
            raise self._error(folder)
        return self.inner.entries(folder)

    def names(self, folder: str) -> list[str]:
        if self._mode("names") is not None:
            raise self._error(folder)
        return self.inner.names(folder)

    def read_file(self, folder: str, name: str, max_bytes: int) -> tuple[bytes, int]:
        mode = self._mode("read_file")
        if mode is Mode.SHORT:
            data, disk_bytes = self.inner.read_file(folder, name, max_bytes)
            return data[: max(1, len(data) // 2)], disk_bytes
        if mode is not None:
            raise self._error(name)
        return self.inner.read_file(folder, name, max_bytes)

    def create(self, folder: str, name: str) -> int:
        mode = self._mode("create")
        if mode is Mode.ERROR:
            raise self._error(name)
        handle = self.inner.create(folder, name)
        if mode is not None:
            self.inner.close(handle)
            raise self._error(name)
        return handle

    def open(self, folder: str, name: str) -> int:
        if self._mode("open") is not None:
            raise self._error(name)
        return self.inner.open(folder, name)

    def size(self, handle: int) -> tuple[int, int]:
        if self._mode("size") is not None:
            raise self._error("")
        return self.inner.size(handle)

    def write(self, handle: int, data: memoryview) -> int:
        mode = self._mode("write")
        if mode is Mode.ERROR:
            raise self._error("")
        if mode is Mode.SHORT:
            return self.inner.write(handle, data[: max(1, len(data) // 2)])
        n = self.inner.write(handle, data)
        if mode is not None:
            raise self._error("")
        return n

    def read(self, handle: int, out: memoryview, offset: int) -> int:
        mode = self._mode("read")
        if mode is Mode.SHORT:
            return self.inner.read(handle, out[: max(1, len(out) // 2)], offset)
        if mode is not None:
            raise self._error("")
        return self.inner.read(handle, out, offset)

    def sync(self, handle: int) -> None:
        mode = self._mode("sync")
        if mode is Mode.ERROR and isinstance(self.inner, SimFS):
            self.inner.lose_sync(handle)
        if mode is not Mode.ERROR:
            self.inner.sync(handle)
        if mode is not None:
            raise self._error("")

    def close(self, handle: int) -> None:
        # A close always closes; its error is a late report.
        mode = self._mode("close")
        self.inner.close(handle)
        if mode is not None:
            raise self._error("")

    def link(self, folder: str, name: str, to_folder: str) -> None:
        mode = self._mode("link")
        if mode is not Mode.ERROR:
            self.inner.link(folder, name, to_folder)
        if mode is not None:
            raise self._error(name)

    def remove(self, folder: str, name: str) -> None:
        mode = self._mode("remove")
        if mode is not Mode.ERROR:
            self.inner.remove(folder, name)
        if mode is not None:
            raise self._error(name)

    def sync_folder(self, folder: str) -> None:
        mode = self._mode("sync_folder")
        if mode is not Mode.ERROR:
            self.inner.sync_folder(folder)
        if mode is not None:
            raise self._error(folder)

    def lock(self, folder: str, name: str, text: str) -> int:
        if self._mode("lock") is not None:
            raise self._error(name)
        return self.inner.lock(folder, name, text)
