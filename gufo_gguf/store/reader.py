"""Streamed restore: bounded buffers, reading and checksums overlapped, parts handed over in order.

The parts of a checkpoint are cut into pieces.  A few threads take pieces in order; each reads its
piece and then waits for its turn to add it to the part's checksum, so that one thread reads while
another hashes and the caller copies:

    thread 1   read p0 │ hash p0 │ read p2 │ hash p2 │ …
    thread 2   read p1 │          hash p1 │ read p3 │ …
    caller                take p0 │ take p1 │ …

A part goes to the buffer that ``destination`` names (a chunk's place in RAM, in large pieces), or,
where that says None, through a ring of staging buffers.  Either way a read lands in a small buffer
that stays in the cache, is hashed there, and is copied on by the thread: reading straight into RAM
saves the copy and was still slower (1.6 against 3.1 GB/s with two threads; the kernel's copy into
cold pages ran at 2 GB/s where into a hot buffer it ran at 9).  At most ``threads + 1`` descriptors
are open: a file is opened with its first piece and closed with its last.

The last piece of a part is handed over only after its checksum has been found right; a missing,
short, long, unreadable or wrong file ends the iteration with one ``Damage``.  What was handed over
before it must then be thrown away, whole: the slot may run only after the iteration ended without.

Threads live here and nowhere else in the store; they end with the iteration or ``close``.
"""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import numpy.typing as npt
import xxhash

from gufo_gguf.store.fs import NOT_A_FILE, FileSystem, close_quietly, read_all
from gufo_gguf.store.types import Damage, DamageReason, Part

READ_BYTES = 512 << 10
"""One read: small enough to be hashed out of the second-level cache it was just read into.  Each
thread has a buffer of this size beside the staging ring."""

STAGED_BYTES = 2 << 20
"""At most one staged piece; each costs Python a turn, so a larger staging ring has larger pieces."""

DIRECT_BYTES = 8 << 20
"""A piece that goes straight to its destination; it costs one hand-over, however many reads it takes."""

Destination = Callable[[Part], memoryview | None]
"""A writable buffer of part.n_bytes, or None for staging.  Called by the iterating thread, in part
order, when at most ``threads`` parts were begun and not completely handed over."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [offset, offset + len(data)) of a part; staged data is valid until the next piece is asked for."""

    part: Part
    offset: int
    data: memoryview
    last: bool
    """The part is complete and its checksum right."""


class _OpenPart:
    """A part between its first and its last piece."""

    __slots__ = ("damage", "handle", "hash", "hashed", "into", "lock", "part", "to_read")

    def __init__(self, part: Part, into: memoryview | None) -> None:
        self.part = part
        self.into = into
        self.lock = threading.Lock()
        self.handle: int | None = None
        self.to_read = part.n_bytes
        self.hash = xxhash.xxh3_128()
        self.hashed = 0
        """Bytes in the checksum; the piece at this offset is the next to be added."""
        self.damage: Damage | None = None


@dataclass(slots=True)
class _Work:
    """One piece on its way through the threads."""

    of: _OpenPart
    offset: int
    data: memoryview
    ready: bool = False
    error: BaseException | None = None
    """A bug in a thread: raised where the caller waits, who would wait for ever otherwise."""

    @property
    def end(self) -> int:
        return self.offset + len(self.data)


class Restore:
    """Iterate to get ``Piece`` after ``Piece``, at most one ``Damage``, and that last.  Use with ``with``."""

    def __init__(
        self,
        fs: FileSystem,
        parts: Sequence[Part],
        *,
        destination: Destination | None = None,
        staging_bytes: int = 1 << 20,
        staging: memoryview | None = None,
        threads: int = 2,
    ) -> None:
        """``staging_bytes`` bounds what is read ahead into the staging ring; ``staging`` is memory for it
        (that long at least: pinned, say, where pieces go on to a device), else the ring is made here.

        ``threads`` is the most that work: those that staging has no pieces for are not started.
        """
        self._fs = fs
        self._parts = parts
        self._destination = destination
        piece = min(max(READ_BYTES // 2, staging_bytes // 16), STAGED_BYTES)
        self._staged_bytes = max(1, min(piece, staging_bytes // 4))
        self._n_staging = max(1, staging_bytes // self._staged_bytes)
        self._staging = memoryview(b"") if staging is None else staging
        if destination is None:  # one piece is with the caller, one waits for it
            threads = min(threads, max(2, self._n_staging - 2))
        self._n_threads = max(1, threads)
        self._parts_ahead = self._n_threads + 1
        # One lock, three reasons to wait: a wake-up of the wrong thread costs as much as a read.
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._turn = threading.Condition(self._lock)
        self._done = threading.Condition(self._lock)
        self._queue: deque[_Work] = deque()
        """Pieces no thread has taken yet."""
        self._open: set[_OpenPart] = set()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Restore:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading, wait for the threads, close the files; idempotent."""
        with self._lock:
            self._stop.set()
            self._work.notify_all()
            self._turn.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads = []
        for opened in list(self._open):
            self._shut(opened)

    # -- the caller's side -----------------------------------------------------------------------
    def __iter__(self) -> Iterator[Piece | Damage]:
        try:
            yield from self._pieces()
        finally:
            self.close()

    def _pieces(self) -> Iterator[Piece | Damage]:
        ahead: deque[_Work] = deque()
        """Pieces begun and not handed over, in order."""
        n_parts = n_staged = slot = 0
        parts = iter(self._parts)
        opened: _OpenPart | None = None
        at = 0
        more = True
        while True:
            # 1. Begin as many pieces as buffers and the parts ahead allow.
            while more:
                if opened is None or at >= opened.part.n_bytes:
                    if n_parts >= self._parts_ahead:
                        break
                    part = next(parts, None)
                    if part is None:
                        more = False
                        break
                    opened, at = _OpenPart(part, self._buffer_for(part)), 0
                    n_parts += 1
                if opened.into is not None:
                    data = opened.into[at : at + DIRECT_BYTES]
                elif n_staged < self._n_staging:
                    n = min(self._staged_bytes, opened.part.n_bytes - at)
                    data = self._staging[slot * self._staged_bytes :][:n]
                    slot = (slot + 1) % self._n_staging
                    n_staged += 1
                else:
                    break
                work = _Work(opened, at, data)
                ahead.append(work)
                at += len(data)
                self._hand_to_threads(work)
            if not ahead:
                return
            # 2. Hand over the oldest.
            work = ahead.popleft()
            with self._lock:
                while not work.ready:
                    self._done.wait()
            if work.error is not None:
                raise work.error
            if work.of.damage is not None:
                yield work.of.damage
                return
            last = work.end == work.of.part.n_bytes
            yield Piece(work.of.part, work.offset, work.data, last)
            n_parts -= last
            n_staged -= work.of.into is None

    def _buffer_for(self, part: Part) -> memoryview | None:
        if part.n_bytes < 1:
            raise ValueError(f"a part of {part.n_bytes} bytes")
        into = self._destination(part) if self._destination is not None else None
        if into is not None and len(into) != part.n_bytes:
            raise ValueError(f"a destination of {len(into)} bytes for a part of {part.n_bytes}")
        if into is None and not len(self._staging):
            self._staging = memoryview(bytearray(self._n_staging * self._staged_bytes))
        return into

    def _hand_to_threads(self, work: _Work) -> None:
        with self._lock:
            self._queue.append(work)
            self._work.notify()
        if len(self._threads) < self._n_threads:
            thread = threading.Thread(target=self._serve, name="gufo-restore", daemon=True)
            self._threads.append(thread)
            thread.start()

    # -- the threads' side -----------------------------------------------------------------------
    def _serve(self) -> None:
        scratch = np.empty(READ_BYTES, dtype=np.uint8)
        while True:
            with self._lock:
                while not self._queue and not self._stop.is_set():
                    self._work.wait()
                if self._stop.is_set():
                    return
                work = self._queue.popleft()
            try:
                self._do(work, scratch)
            except BaseException as e:
                work.error = e
            with self._lock:
                work.ready = True
                self._done.notify()

    def _do(self, work: _Work, scratch: npt.NDArray[np.uint8]) -> None:
        damage, hashed = self._read(work, scratch)
        of = work.of
        with self._lock:
            while of.hashed != work.offset and of.damage is None and not self._stop.is_set():
                self._turn.wait()
            damage = of.damage or damage
        if damage is None and not self._stop.is_set():
            of.hash.update(work.data[hashed:])
            if work.end == of.part.n_bytes and of.hash.digest() != of.part.checksum:
                damage = Damage(of.part.folder, of.part.name, DamageReason.CHECKSUM, of.part.kind.value)
        with self._lock:
            of.hashed = work.end
            of.damage = damage
            self._turn.notify_all()

    def _read(self, work: _Work, scratch: npt.NDArray[np.uint8]) -> tuple[Damage | None, int]:
        """Fill the piece; returns the damage, and how many of its bytes were hashed on the way."""
        of, part = work.of, work.of.part
        hashed = 0
        into = None if of.into is None else np.frombuffer(work.data, dtype=np.uint8)
        try:
            handle = self._handle(of)
            if isinstance(handle, Damage):
                return handle, 0
            for at in range(0, len(work.data), READ_BYTES):
                n = min(READ_BYTES, len(work.data) - at)
                view = work.data[at : at + n] if into is None else memoryview(scratch[:n].data)
                if read_all(self._fs, handle, view, part.offset + work.offset + at) != len(view):
                    return Damage(part.folder, part.name, DamageReason.SIZE, "shorter than its own size"), hashed
                # Only this thread moves ``of.hashed`` on while it equals the piece's own offset.
                if of.hashed == work.offset and hashed == at:
                    of.hash.update(view)
                    hashed = at + n
                if into is not None:
                    np.copyto(into[at : at + n], scratch[:n])  # without the interpreter's lock
        except OSError as e:
            return refused(part.folder, part.name, e), hashed
        with of.lock:
            of.to_read -= len(work.data)
            done = of.to_read == 0
        if done:
            self._shut(of)
        return None, hashed

    def _handle(self, of: _OpenPart) -> int | Damage:
        part = of.part
        with of.lock:
            if of.handle is None:
                of.handle = self._fs.open(part.folder, part.name)
                with self._lock:
                    self._open.add(of)
                n_bytes, _ = self._fs.size(of.handle)
                if n_bytes != part.file_bytes:
                    return Damage(part.folder, part.name, DamageReason.SIZE, f"{n_bytes} bytes, not {part.file_bytes}")
            return of.handle

    def _shut(self, of: _OpenPart) -> None:
        with of.lock:
            handle, of.handle = of.handle, None
        with self._lock:
            self._open.discard(of)
        if handle is not None:
            close_quietly(self._fs, handle)


def refused(folder: str, name: str, e: OSError) -> Damage:
    """The damage behind an OSError of opening or reading a file."""
    if isinstance(e, FileNotFoundError):
        return Damage(folder, name, DamageReason.MISSING)
    if e.errno in NOT_A_FILE:
        return Damage(folder, name, DamageReason.NOT_A_FILE, permanent=False)
    # A bad sector stays bad; a permission or a lack of descriptors does not.
    return Damage(folder, name, DamageReason.UNREADABLE, e.strerror or str(e), permanent=e.errno == errno.EIO)


def verify_part(fs: FileSystem, part: Part, buffer: memoryview) -> Damage | None:
    """Check one part alone, through ``buffer``; for the folder check."""
    try:
        handle = fs.open(part.folder, part.name)
        try:
            n_bytes, _ = fs.size(handle)
            if n_bytes != part.file_bytes:
                return Damage(part.folder, part.name, DamageReason.SIZE, f"{n_bytes} bytes, not {part.file_bytes}")
            summed = xxhash.xxh3_128()
            for at in range(0, part.n_bytes, len(buffer)):
                view = buffer[: min(len(buffer), part.n_bytes - at)]
                if read_all(fs, handle, view, part.offset + at) != len(view):
                    return Damage(part.folder, part.name, DamageReason.SIZE, "shorter than its own size")
                summed.update(view)
        finally:
            close_quietly(fs, handle)
    except OSError as e:
        return refused(part.folder, part.name, e)
    if summed.digest() != part.checksum:
        return Damage(part.folder, part.name, DamageReason.CHECKSUM, part.kind.value)
    return None
