"""One checkpoint on its way to disk, in the only order that survives a power cut at any point.

    for each new chunk, then the private file:
        create in tmp/ → write pieces → sync the file → link into its folder → remove from tmp/
    sync chunks/ (unless all its chunks are known to last) → sync private/
    create the manifest in tmp/ → write → sync → link into manifests/ → remove from tmp/
    sync manifests/
    only now the catalogue shows it

Until the last sync the checkpoint does not exist for anyone.  A failure anywhere is an OSError; then
``abandon``: an unfinished file is removed, finished chunk files stay as loose files, so that a later
write of the same rows can reference them (or the next clean-up takes them).  If the manifest's link
was already attempted, nobody can say whether it exists: the checkpoint goes into limbo, which keeps
its files until its removal is durable.

A sync that failed is not repeated in the hope of better luck: the kernel may have dropped the dirty
pages while reporting the error once, so a second, successful sync proves nothing.  An unfinished file
is thrown away; chunk files whose folder could not be synced are never referenced again.

The caller moves the bytes, one piece at a time, and may pause between any two calls.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable, Iterator

import xxhash

from gufo_gguf.store.catalogue import Catalogue, DiskRecord
from gufo_gguf.store.fs import FileSystem, remove_quietly, write_all
from gufo_gguf.store.layout import FileClass, Layout, Names
from gufo_gguf.store.manifest import ChunkTable, Manifest, encode
from gufo_gguf.store.types import CheckpointMeta, FileRef, PrivateFile, Section

BLOCK_BYTES = 4096


def disk_estimate(n_bytes: int) -> int:
    """Blocks a file of this length will take, one more for what the file system adds to it."""
    return (n_bytes + BLOCK_BYTES - 1) // BLOCK_BYTES * BLOCK_BYTES + BLOCK_BYTES


class Publication:
    """Use: hold and reserve, chunks in row order, the private file, then run ``commit`` to its end.

    Or ``abandon`` at any point.  One file is open at a time.
    """

    def __init__(self, fs: FileSystem, layout: Layout, catalogue: Catalogue, names: Names) -> None:
        self._fs = fs
        self._layout = layout
        self._catalogue = catalogue
        self._names = names
        self._reserved = 0
        self._pinned: list[str] = []
        self._reusable: dict[str, FileRef] = {}
        self._chunks: list[FileRef] = []
        self._private: PrivateFile | None = None
        self._handle: int | None = None
        self._file = ("", "")
        self._file_bytes = 0
        self._hash = xxhash.xxh3_128()
        self._sections: list[Section] = []
        self._section_bytes = 0
        self._doubtful: DiskRecord | None = None
        self.done = False

    # -- before the first byte -------------------------------------------------------------------
    def hold(self, keys: Iterable[str]) -> dict[str, FileRef]:
        """Pin chunk files that are on disk already, so that nothing evicts them meanwhile.

        Returns those that can be relied on; the others must be written.
        """
        for key in keys:
            if key not in self._reusable:
                ref = self._catalogue.pin_chunk(key)
                if ref is not None:
                    self._pinned.append(key)
                    self._reusable[key] = ref
        return dict(self._reusable)

    def reserve(self, n_bytes: int) -> None:
        """Charge the blocks this write will take; given back as files are finished, or at the end."""
        self._catalogue.reserve(n_bytes)
        self._reserved += n_bytes

    # -- chunks ----------------------------------------------------------------------------------
    def reuse_chunk(self, key: str) -> None:
        """The next chunk is a file held before."""
        self._chunks.append(self._reusable[key])

    def begin_chunk(self) -> None:
        self._begin(FileClass.CHUNK)

    def end_chunk(self) -> FileRef:
        """Sync the file and give it its place; the next chunk may begin."""
        checksum = self._hash.digest()
        key, n_bytes = self._finish(checksum)
        ref = FileRef(key, n_bytes, checksum)
        self._chunks.append(ref)
        return ref

    # -- the private file ------------------------------------------------------------------------
    def begin_private(self) -> None:
        self._begin(FileClass.PRIVATE)
        self._sections = []

    def end_section(self) -> None:
        """The bytes since the last section form one; three are due: private, tail, logits."""
        self._sections.append(Section(self._section_bytes, self._hash.digest()))
        self._hash = xxhash.xxh3_128()
        self._section_bytes = 0

    def end_private(self) -> None:
        private, tail, logits = self._sections
        key, _ = self._finish(b"")
        self._private = PrivateFile(key, private, tail, logits)

    # -- bytes -----------------------------------------------------------------------------------
    def write(self, piece: memoryview) -> None:
        """Append to the file begun last.  Checksum and disk see the same buffer."""
        assert self._handle is not None
        self._hash.update(piece)
        write_all(self._fs, self._handle, piece)
        self._file_bytes += len(piece)
        self._section_bytes += len(piece)

    # -- the end ---------------------------------------------------------------------------------
    def commit(self, meta: CheckpointMeta) -> Iterator[DiskRecord | None]:
        """Publish the manifest; yields None between operations and the record last."""
        assert self._private is not None
        fs, layout = self._fs, self._layout
        fresh = self._catalogue.not_lasting(ref.key for ref in self._chunks)
        if fresh:
            try:
                fs.sync_folder(layout.chunks)
            except OSError:
                for name in fresh:
                    self._catalogue.mark_bad(name)
                raise
            self._catalogue.mark_lasting(fresh)
            yield None
        fs.sync_folder(layout.private)
        yield None
        key = self._names()
        manifest = Manifest(key, self._catalogue.next_sequence(), meta, ChunkTable.of(self._chunks), self._private)
        data = encode(manifest)
        self._create(FileClass.MANIFEST, key)
        write_all(fs, self._take_handle(), memoryview(data))
        yield None
        disk_bytes = self._sync_and_close(len(data))
        yield None
        record = DiskRecord.of(manifest, disk_bytes)
        self._doubtful = record
        self._link(layout.manifests)
        yield None
        fs.sync_folder(layout.manifests)
        self._doubtful = None
        self._catalogue.add(record)
        self._leave()
        self.done = True
        yield record

    def abandon(self) -> None:
        """Give up; idempotent, and without effect after the commit.  Never raises."""
        if self.done:
            return
        if self._handle is not None:
            with contextlib.suppress(OSError):
                self._close()
        folder, name = self._file
        if name:
            self._unlink_or_remember(self._layout.tmp, name)
            # The link may have been made although it reported an error.
            self._unlink_or_remember(folder, name, unless_doubtful=True)
        if self._doubtful is not None:
            self._catalogue.add_in_limbo(self._doubtful)
            self._doubtful = None
        self._leave()
        self.done = True

    # -- inside ----------------------------------------------------------------------------------
    def _begin(self, suffix: str) -> None:
        self._create(suffix, self._names())
        self._hash = xxhash.xxh3_128()
        self._section_bytes = 0

    def _create(self, suffix: str, key: str) -> None:
        assert self._handle is None
        # Remembered before the call: a create that reports an error may have left the name behind.
        self._file = (self._layout.folder_of(suffix), key + suffix)
        self._file_bytes = 0
        self._handle = self._fs.create(self._layout.tmp, key + suffix)

    def _finish(self, checksum: bytes) -> tuple[str, int]:
        disk_bytes = self._sync_and_close(self._file_bytes)
        folder, name = self._file
        self._link(folder)
        suffix = FileClass.CHUNK if name.endswith(FileClass.CHUNK) else FileClass.PRIVATE
        key = name.removesuffix(suffix)
        self._catalogue.add_file(key, suffix, self._file_bytes, disk_bytes, checksum)
        self._pinned.append(key)
        self._use_reserved(disk_estimate(self._file_bytes))
        return key, self._file_bytes

    def _sync_and_close(self, n_bytes: int) -> int:
        """Make the file's bytes last; returns its blocks in bytes."""
        self._fs.sync(self._take_handle())
        n_written, disk_bytes = self._fs.size(self._take_handle())
        if n_written != n_bytes:
            raise OSError(errno.EIO, f"a file of {n_written} bytes after {n_bytes} were written")
        self._close()
        return disk_bytes

    def _link(self, folder: str) -> None:
        name = self._file[1]
        self._fs.link(self._layout.tmp, name, folder)
        self._file = ("", "")
        self._unlink_or_remember(self._layout.tmp, name)

    def _unlink_or_remember(self, folder: str, name: str, *, unless_doubtful: bool = False) -> None:
        if unless_doubtful and self._doubtful is not None:
            return  # a manifest's removal counts only once it is synced: that is limbo's work
        if not remove_quietly(self._fs, folder, name):
            self._catalogue.found_debris(folder, name, disk_estimate(self._file_bytes))

    def _take_handle(self) -> int:
        assert self._handle is not None
        return self._handle

    def _close(self) -> None:
        handle = self._take_handle()
        self._handle = None
        self._fs.close(handle)

    def _use_reserved(self, n_bytes: int) -> None:
        n_bytes = min(n_bytes, self._reserved)
        self._reserved -= n_bytes
        self._catalogue.unreserve(n_bytes)

    def _leave(self) -> None:
        self._catalogue.unpin(self._pinned)
        self._pinned = []
        self._use_reserved(self._reserved)
