"""The disk tier as the engine sees it: one folder, opened, scanned, written and read.

    store = DiskStore.open(folder, budget_bytes=…)      lock, layout; StoreError says why not
    for found in store.load(): …                        Loaded → the index, Damage → the log
    writer = store.writer(rank=…)                       the queue; somebody calls writer.step
    with store.restore(record) as pieces: …             checked bytes, in order

Whoever opens the store owns it; ``close`` gives the folder free for another process.
"""

from __future__ import annotations

from collections.abc import Iterator

from gufo_gguf.cache.types import Tokens
from gufo_gguf.core.errors import StoreError
from gufo_gguf.store.catalogue import Catalogue, DiskRecord, Rank
from gufo_gguf.store.fs import FileSystem, PosixFileSystem
from gufo_gguf.store.layout import FileClass, Layout, Names, random_key
from gufo_gguf.store.lock import FolderLock
from gufo_gguf.store.manifest import Manifest
from gufo_gguf.store.parts import restore_parts
from gufo_gguf.store.reader import Destination, Restore
from gufo_gguf.store.scan import Loaded, read_manifest, scan
from gufo_gguf.store.types import Damage, DamageReason, PartKind
from gufo_gguf.store.writer import Writer


class DiskStore:
    def __init__(
        self, fs: FileSystem, budget_bytes: int, *, layout: Layout | None = None, names: Names = random_key
    ) -> None:
        """Make the folders and take the lock.  Raises StoreError naming the folder and the reason."""
        self.fs = fs
        self.layout = layout or Layout()
        self.names = names
        self.catalogue = Catalogue(budget_bytes)
        self.layout.prepare(fs)
        self._lock = FolderLock(fs, self.layout)

    @classmethod
    def open(cls, folder: str, budget_bytes: int) -> DiskStore:
        """A store in a real folder, created (0700) when missing."""
        fs = PosixFileSystem(folder)
        try:
            return cls(fs, budget_bytes)
        except BaseException:
            fs.shut()
            raise

    def close(self) -> None:
        """Release the lock and the descriptors; idempotent.  Restores and writes must have ended."""
        self._lock.release()
        if isinstance(self.fs, PosixFileSystem):
            self.fs.shut()

    # -- start-up --------------------------------------------------------------------------------
    def load(self) -> Iterator[Loaded | Damage]:
        """Every intact checkpoint and every damage, reading manifests and sizes only.

        To be run to its end first.  Raises StoreError when the folder cannot be read or belongs to a
        later release.
        """
        try:
            yield from scan(self.fs, self.layout, self.catalogue)
        except OSError as e:
            raise StoreError(f"the cache folder {self.fs.root} cannot be read: {e.strerror or e}") from e

    def tokens(self, record: DiskRecord) -> Tokens | Damage:
        """A checkpoint's tokens, read from its manifest again."""
        found = read_manifest(self.fs, self.layout, record.key)
        if isinstance(found, Manifest):
            return found.meta.tokens
        return found or Damage(self.layout.manifests, record.key + FileClass.MANIFEST, DamageReason.MISSING)

    # -- writing ---------------------------------------------------------------------------------
    def writer(self, rank: Rank, *, staging_bytes: int = 1 << 20, queue_bytes: int = 1 << 30) -> Writer:
        """The one writer of this store; see ``Writer``."""
        return Writer(
            self.fs,
            self.layout,
            self.catalogue,
            names=self.names,
            rank=rank,
            staging_bytes=staging_bytes,
            queue_bytes=queue_bytes,
        )

    # -- reading ---------------------------------------------------------------------------------
    def restore(
        self,
        record: DiskRecord,
        *,
        first_chunk: int = 0,
        end_chunk: int | None = None,
        kinds: frozenset[PartKind] = frozenset(PartKind),
        destination: Destination | None = None,
        staging_bytes: int = 1 << 20,
        staging: memoryview | None = None,
        threads: int = 2,
    ) -> Restore:
        """Stream a checkpoint's parts (see ``restore_parts``), checked; pin the record meanwhile."""
        parts = restore_parts(
            self.layout, record.chunks, record.private, first_chunk=first_chunk, end_chunk=end_chunk, kinds=kinds
        )
        return Restore(
            self.fs, parts, destination=destination, staging_bytes=staging_bytes, staging=staging, threads=threads
        )
