"""Names and folders of the disk tier, and what their version means.

    DIR/v1/LOCK
           manifests/K.manifest     a checkpoint exists if and only if its manifest is here
           chunks/K.chunk           rows shared by checkpoints
           private/K.private        private state, tail and logits of one checkpoint
           tmp/K.*                  files being written; whatever lies here at a start is debris

Only names of exactly these forms are ours.  Anything else in these folders (other names, links,
folders) is never read, counted or removed.

A folder v2 beside v1 was left by a later release: the tier is refused and nothing is touched, since
that release may hold the same state in it.  Folders of earlier versions that this release knows
are emptied by the background pass: their state cannot be read, and it must not eat the budget.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from gufo_gguf.core.errors import StoreError
from gufo_gguf.store.fs import Entry, FileKind, FileSystem

VERSION = 1
OLDER_VERSIONS: tuple[int, ...] = ()
"""Versions that earlier releases wrote and that may be emptied."""

LOCK_NAME = "LOCK"

Names = Callable[[], str]
"""Draws a fresh key: 32 lower-case hex digits that were never drawn before."""

_KEY = re.compile(r"[0-9a-f]{32}")
_VERSION_FOLDER = re.compile(r"v([1-9][0-9]{0,5})")


def random_key() -> str:
    """128 random bits: unique without asking the disk."""
    return secrets.token_hex(16)


class FileClass:
    """The suffixes, one per folder."""

    MANIFEST = ".manifest"
    CHUNK = ".chunk"
    PRIVATE = ".private"


_SUFFIXES = (FileClass.MANIFEST, FileClass.CHUNK, FileClass.PRIVATE)


def key_of(name: str, suffix: str) -> str | None:
    """The key in a file name of ours, or None when the name is foreign."""
    key = name[:32]
    return key if name[32:] == suffix and _KEY.fullmatch(key) else None


@dataclass(frozen=True, slots=True)
class Layout:
    """The folders of one layout version."""

    version: int = VERSION
    older: tuple[int, ...] = OLDER_VERSIONS

    @property
    def base(self) -> str:
        return f"v{self.version}"

    @property
    def manifests(self) -> str:
        return f"v{self.version}/manifests"

    @property
    def chunks(self) -> str:
        return f"v{self.version}/chunks"

    @property
    def private(self) -> str:
        return f"v{self.version}/private"

    @property
    def tmp(self) -> str:
        return f"v{self.version}/tmp"

    @property
    def folders(self) -> tuple[str, ...]:
        return (self.manifests, self.chunks, self.private, self.tmp)

    def folder_of(self, suffix: str) -> str:
        """Where a published file of this suffix lies."""
        return {
            FileClass.MANIFEST: self.manifests,
            FileClass.CHUNK: self.chunks,
            FileClass.PRIVATE: self.private,
        }[suffix]

    # -- versions --------------------------------------------------------------------------------
    def refuse_newer(self, fs: FileSystem) -> None:
        """Raise StoreError when a later release has written here; nothing was touched then."""
        newest = max((v for v in _versions(fs) if v > self.version), default=None)
        if newest is not None:
            raise StoreError(
                f"the cache folder {fs.root} was written by a later release (layout v{newest}, this one "
                f"knows v{self.version}); it is left alone: use that release or another folder"
            )

    def prepare(self, fs: FileSystem) -> None:
        """Make what is missing and make it last.  Raises StoreError naming the folder."""
        self.refuse_newer(fs)
        try:
            fs.make_folder(self.base)
            for folder in self.folders:
                fs.make_folder(folder)
            # A process may have died between making folders and syncing them: that all are there proves
            # nothing.  A manifest does, since nobody publishes before this has succeeded.
            if not any(key_of(name, FileClass.MANIFEST) for name in fs.names(self.manifests)):
                fs.sync_folder(self.base)
                fs.sync_folder("")
        except OSError as e:
            raise StoreError(f"the cache folder {fs.root} cannot be used: {e.strerror or e}") from e

    def exists(self, fs: FileSystem) -> bool:
        return self.version in _versions(fs)

    def older_files(self, fs: FileSystem) -> Iterator[tuple[str, Entry]]:
        """(folder, entry) of every file that an earlier layout version of ours left."""
        for version in _versions(fs):
            if version in self.older:
                for folder in Layout(version, ()).folders:
                    try:
                        entries = fs.entries(folder)
                    except OSError:
                        continue
                    yield from ((folder, e) for e in entries if is_ours(e, _SUFFIXES))


def is_ours(entry: Entry, suffixes: tuple[str, ...] = _SUFFIXES) -> bool:
    """A regular file with a name of our form; everything else is foreign and stays untouched."""
    return entry.kind is FileKind.FILE and any(key_of(entry.name, suffix) for suffix in suffixes)


def keys_of(names: Iterable[str], suffix: str) -> list[str]:
    """The keys among these names, in order; foreign names are left out."""
    return sorted(name[:32] for name in names if name[32:] == suffix and _KEY.fullmatch(name, 0, 32))


def ours(entries: list[Entry], suffix: str) -> list[tuple[str, Entry]]:
    """(key, entry) of the files in a folder that are ours."""
    found = []
    for entry in entries:
        name = entry.name
        if name[32:] == suffix and entry.kind is FileKind.FILE and _KEY.fullmatch(name, 0, 32):
            found.append((name[:32], entry))
    return found


def _versions(fs: FileSystem) -> list[int]:
    try:
        entries = fs.entries("")
    except OSError as e:
        raise StoreError(f"the cache folder {fs.root} cannot be read: {e.strerror or e}") from e
    matches = (_VERSION_FOLDER.fullmatch(e.name) for e in entries if e.kind is FileKind.FOLDER)
    return sorted(int(m.group(1)) for m in matches if m)
