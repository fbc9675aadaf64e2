"""The one door to the file system: a protocol of sixteen calls and its POSIX implementation.

Everything the store does goes through ``FileSystem``, so that a test can put a simulated disk in its
place and cut the power between any two calls.  Files are named by (folder, name): a folder is a
relative path such as ``v1/chunks``, opened once per component with O_NOFOLLOW, and every call on a
file works relative to that descriptor; so neither a link planted in the tree nor a renamed parent
can lead a write outside of it.

Publishing without replacing: Python has no renameat2, therefore link + remove.  Where hard links do
not exist (some network and FUSE file systems) ``link`` renames instead, after looking that the name
is free; names are random and the folder is locked, so nobody can take it in between.

Rejected: pathlib throughout (follows links, hides which calls are made), mmap for reading (a bad
sector becomes SIGBUS), O_DIRECT (needs aligned staging and loses the page cache that makes a warm
restore cheap).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat as stat_bits
from enum import StrEnum
from typing import NamedTuple, Protocol

from gufo_gguf.core.errors import StoreError


class FileKind(StrEnum):
    FILE = "file"
    FOLDER = "folder"
    LINK = "link"
    OTHER = "other"


class Entry(NamedTuple):
    """One name in a folder; a link is not followed."""

    name: str
    kind: FileKind
    n_bytes: int
    disk_bytes: int
    """Blocks really taken, in bytes: what a budget counts."""


_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
"""O_NONBLOCK: a FIFO planted under a chunk's name must be refused, not waited for."""

NOT_A_FILE = (errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.ENXIO)
"""What ``open`` says of a link, a folder, a FIFO or a socket."""

_KINDS = {
    stat_bits.S_IFREG: FileKind.FILE,
    stat_bits.S_IFDIR: FileKind.FOLDER,
    stat_bits.S_IFLNK: FileKind.LINK,
}


class LockHeld(Exception):
    """Another process holds the lock; ``text`` is what it wrote into the file."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class FileSystem(Protocol):
    """All calls raise OSError as the system does; ``read`` and ``write`` may be short."""

    @property
    def root(self) -> str:
        """The folder's name for messages."""
        ...

    def make_folder(self, folder: str) -> None:
        """Create it (0700) unless it is there.  A link, or somebody else's folder, is an OSError."""
        ...

    def entries(self, folder: str) -> list[Entry]: ...

    def names(self, folder: str) -> list[str]:
        """All names in a folder, without looking at what they are."""
        ...

    def read_file(self, folder: str, name: str, max_bytes: int) -> tuple[bytes, int]:
        """A whole small file, at most max_bytes + 1 of it, and the bytes of its blocks.

        Opened as by ``open``; the bytes may be short of its end, like those of any ``read``.
        """
        ...

    def create(self, folder: str, name: str) -> int:
        """A new file (0600) for writing; FileExistsError when the name is taken."""
        ...

    def open(self, folder: str, name: str) -> int:
        """An existing file for reading; a link or anything but a regular file is an OSError."""
        ...

    def size(self, handle: int) -> tuple[int, int]:
        """(length, bytes of blocks taken)."""
        ...

    def write(self, handle: int, data: memoryview) -> int: ...

    def read(self, handle: int, out: memoryview, offset: int) -> int: ...

    def sync(self, handle: int) -> None:
        """The file's bytes and length survive a power cut from here on."""
        ...

    def close(self, handle: int) -> None: ...

    def link(self, folder: str, name: str, to_folder: str) -> None:
        """Give the file the same name in another folder; FileExistsError when that is taken."""
        ...

    def remove(self, folder: str, name: str) -> None: ...

    def sync_folder(self, folder: str) -> None:
        """The folder's names survive a power cut from here on."""
        ...

    def lock(self, folder: str, name: str, text: str) -> int:
        """Take the lock file and write ``text`` into it; LockHeld when another process has it."""
        ...


def write_all(fs: FileSystem, handle: int, data: memoryview) -> None:
    """Write every byte, however short the single writes are."""
    while len(data):
        try:
            n = fs.write(handle, data)
        except InterruptedError:
            continue
        if n <= 0:
            raise OSError(errno.EIO, "write wrote nothing")
        data = data[n:]


def read_all(fs: FileSystem, handle: int, out: memoryview, offset: int) -> int:
    """Fill ``out`` from the file; returns the number of bytes, less than len(out) only at its end."""
    done = 0
    while done < len(out):
        try:
            n = fs.read(handle, out[done:], offset + done)
        except InterruptedError:
            continue
        if n <= 0:
            break
        done += n
    return done


def close_quietly(fs: FileSystem, handle: int) -> None:
    """Close what was only read: an error of that says nothing about the bytes."""
    with contextlib.suppress(OSError):
        fs.close(handle)


def remove_quietly(fs: FileSystem, folder: str, name: str) -> bool:
    """Remove a name that may be gone already; False when the system refused."""
    try:
        fs.remove(folder, name)
    except FileNotFoundError:
        pass
    except OSError:
        return False
    return True


def _make_lasting(path: str) -> None:
    """Make a folder (0700) and its parents, each synced into the folder above it."""
    if os.path.isdir(path):
        return
    above = os.path.dirname(path)
    _make_lasting(above)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    fd = os.open(above, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class PosixFileSystem:
    """The real thing, below one root folder.  Calls may come from any thread."""

    _NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)

    def __init__(self, root: str, *, create: bool = True) -> None:
        """Open (and create, 0700) the root.  Raises StoreError naming it when that fails."""
        self._root = root
        try:
            if create:
                _make_lasting(os.path.abspath(root))
            self._folders: dict[str, int] = {"": os.open(root, os.O_RDONLY | os.O_DIRECTORY)}
        except OSError as e:
            raise StoreError(f"the cache folder {root} cannot be opened: {e.strerror or e}") from e

    @property
    def root(self) -> str:
        return self._root

    def shut(self) -> None:
        """Close the folder descriptors; idempotent.  Not part of the protocol: only the owner shuts."""
        for fd in self._folders.values():
            os.close(fd)
        self._folders = {}

    def _folder(self, folder: str) -> int:
        fd = self._folders.get(folder)
        if fd is None:
            parent, _, last = folder.rpartition("/")
            fd = os.open(last, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=self._folder(parent))
            # Two threads may race to the first use of a folder: keep one descriptor, close the other.
            kept = self._folders.setdefault(folder, fd)
            if kept != fd:
                os.close(fd)
            fd = kept
        return fd

    def make_folder(self, folder: str) -> None:
        parent, _, last = folder.rpartition("/")
        with contextlib.suppress(FileExistsError):
            os.mkdir(last, 0o700, dir_fd=self._folder(parent))
        fd = self._folder(folder)
        info = os.fstat(fd)
        if info.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, f"folder belongs to user {info.st_uid}", folder)
        if info.st_mode & 0o077:
            os.fchmod(fd, 0o700)

    def entries(self, folder: str) -> list[Entry]:
        found: list[Entry] = []
        with os.scandir(self._folder(folder)) as entries:
            for entry in entries:
                try:
                    info = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                kind = _KINDS.get(info.st_mode & 0o170000, FileKind.OTHER)
                found.append(Entry(entry.name, kind, info.st_size, info.st_blocks * 512))
        return found

    def names(self, folder: str) -> list[str]:
        return os.listdir(self._folder(folder))

    def read_file(self, folder: str, name: str, max_bytes: int) -> tuple[bytes, int]:
        fd = os.open(name, _OPEN_FLAGS, dir_fd=self._folder(folder))
        try:
            info = os.fstat(fd)
            if not stat_bits.S_ISREG(info.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", name)
            # One byte more than its size: a file that grew shows as longer than it says it is.
            return os.read(fd, min(info.st_size, max_bytes) + 1), info.st_blocks * 512
        finally:
            os.close(fd)

    def create(self, folder: str, name: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        return os.open(name, flags, 0o600, dir_fd=self._folder(folder))

    def open(self, folder: str, name: str) -> int:
        fd = os.open(name, _OPEN_FLAGS, dir_fd=self._folder(folder))
        if not stat_bits.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", name)
        return fd

    def size(self, handle: int) -> tuple[int, int]:
        info = os.fstat(handle)
        return info.st_size, info.st_blocks * 512

    def write(self, handle: int, data: memoryview) -> int:
        return os.write(handle, data)

    def read(self, handle: int, out: memoryview, offset: int) -> int:
        return os.preadv(handle, [out], offset)

    def sync(self, handle: int) -> None:
        full = getattr(fcntl, "F_FULLFSYNC", None)
        if full is not None:  # macOS: fsync alone stops at the drive's own cache
            fcntl.fcntl(handle, full)
        else:
            os.fsync(handle)

    def close(self, handle: int) -> None:
        os.close(handle)

    def link(self, folder: str, name: str, to_folder: str) -> None:
        src, dst = self._folder(folder), self._folder(to_folder)
        try:
            os.link(name, name, src_dir_fd=src, dst_dir_fd=dst, follow_symlinks=False)
        except FileExistsError:
            raise
        except OSError as e:
            if e.errno not in self._NO_HARD_LINKS:
                raise
            self._rename_onto_free_name(src, dst, name)

    @staticmethod
    def _rename_onto_free_name(src: int, dst: int, name: str) -> None:
        try:
            os.stat(name, dir_fd=dst, follow_symlinks=False)
        except FileNotFoundError:
            os.rename(name, name, src_dir_fd=src, dst_dir_fd=dst)
            return
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)

    def remove(self, folder: str, name: str) -> None:
        os.unlink(name, dir_fd=self._folder(folder))

    def sync_folder(self, folder: str) -> None:
        os.fsync(self._folder(folder))

    def lock(self, folder: str, name: str, text: str) -> int:
        parent = self._folder(folder)
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=parent)
        try:
            # flock, not lockf: a POSIX lock would vanish when any other descriptor of the file is closed.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 64, 0).decode("ascii", "replace")
            os.close(fd)
            raise LockHeld(holder) from None
        except OSError:
            os.close(fd)
            raise
        try:
            # The holder's words are for people; the lock itself is the flock.
            os.ftruncate(fd, 0)
            os.pwrite(fd, text.encode("ascii"), 0)
        except OSError:
            os.close(fd)
            raise
        return fd
