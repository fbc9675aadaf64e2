"""Which file holds a chunk of the cache: many chunks to one file, one file to a chunk.

A chunk that came back from a file, and the chunk that was once written to it, are two chunks of the
cache with one file.  Chunk ids and file keys are never used twice.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator


class Bindings:
    def __init__(self) -> None:
        self._file_of: dict[Hashable, str] = {}
        self._chunks_of: dict[str, set[Hashable]] = {}

    def __len__(self) -> int:
        """Bound chunks."""
        return len(self._file_of)

    def bind(self, chunk: Hashable, key: str) -> None:
        """The chunk's bytes are those of the file; a later file replaces an earlier one."""
        self.unbind(chunk)
        self._file_of[chunk] = key
        self._chunks_of.setdefault(key, set()).add(chunk)

    def unbind(self, chunk: Hashable) -> None:
        """The cache has freed the chunk."""
        key = self._file_of.pop(chunk, None)
        if key is None:
            return
        chunks = self._chunks_of[key]
        chunks.remove(chunk)
        if not chunks:
            del self._chunks_of[key]

    def forget(self, key: str) -> None:
        """The file is gone."""
        for chunk in self._chunks_of.pop(key, ()):
            del self._file_of[chunk]

    def key_of(self, chunk: Hashable) -> str | None:
        return self._file_of.get(chunk)

    def files(self) -> Iterator[str]:
        return iter(tuple(self._chunks_of))
