"""Training rows: conversations and documents as token ids, made by worker processes.

A row is (length + 1) tokens and a kind (see ``coding``) per token.

Batch number i of a seed is always the same batch, whoever makes it and whenever: a run that is
resumed goes on as if it had not stopped.
"""

from __future__ import annotations

import hashlib
import multiprocessing as mp
import os
import random
from collections import deque
from dataclasses import dataclass
from multiprocessing.pool import AsyncResult
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from models.owlet import corpus, tokenizer
from models.owlet.cases import Case, numbered
from models.owlet.coding import CONTEXT, TEXT, encode
from models.owlet.dialogues import Writer

_CHARS_PER_TOKEN = 2.4
"""Low on purpose: a conversation should end before the row does, its last questions count most."""


@dataclass(frozen=True, slots=True)
class Batch:
    tokens: npt.NDArray[np.uint16]
    """(rows, length + 1)"""
    kinds: npt.NDArray[np.uint8]
    """(rows, length + 1), the kind of each token."""


class Maker:
    """Makes batches in one process."""

    def __init__(self, seed: int, n_documents_max: int | None = None) -> None:
        self.seed = seed
        self.texts, self.functions = corpus.load()
        self.texts = self.texts[:n_documents_max]
        self.eos = tokenizer.load().token_to_id(tokenizer.END_OF_TEXT)
        self.stream: npt.NDArray[np.uint16] | None = None

    def prepare(self, cache: Path | None = None) -> None:
        """Encode all documents into one stream with an end-of-text token between them.

        With a cache folder that is done once per tokenizer, corpus and seed.
        """
        digest = hashlib.sha256(f"{self.seed} {len(self.texts)}".encode())
        digest.update(tokenizer.FILE.read_bytes() + corpus.CORPUS.read_bytes())
        path = None if cache is None else cache / f"stream-{digest.hexdigest()[:16]}.npy"
        if path is not None and path.exists():
            self.stream = np.load(path)
            return
        coded = tokenizer.load().encode_batch_fast(self.texts)
        order = random.Random(self.seed).sample(range(len(coded)), len(coded))
        self.stream = np.concatenate([np.array([*coded[i].ids, self.eos], np.uint16) for i in order])
        if path is not None:
            np.save(path, self.stream)

    def batch(self, index: int, n_rows: int, length: int, text_share: float) -> Batch:
        rng = random.Random(f"{self.seed}/{index}/{length}")
        rows = [
            self._document_row(rng, length) if rng.random() < text_share else self._dialogue_row(rng, length)
            for _ in range(n_rows)
        ]
        return Batch(np.stack([r[0] for r in rows]), np.stack([r[1] for r in rows]))

    def _document_row(self, rng: random.Random, length: int) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint8]]:
        assert self.stream is not None, "prepare() first"
        first = rng.randrange(len(self.stream) - length - 1)
        return self.stream[first : first + length + 1], np.full(length + 1, TEXT, np.uint8)

    def _dialogue_row(self, rng: random.Random, length: int) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint8]]:
        writer = Writer(rng, self.texts, self.functions)
        ids: list[int] = []
        kinds: list[int] = []
        # now and then a row of several short conversations instead of one long one
        longest = length if rng.random() < 0.7 else rng.randint(min(256, length), length)
        while len(ids) <= length:
            n_tokens = min(longest, max(200, length - len(ids)))
            new_ids, new_kinds = encode(writer.conversation(int(n_tokens * _CHARS_PER_TOKEN)), rng)
            ids += [*new_ids, self.eos]
            kinds += [*new_kinds, CONTEXT]
        return np.array(ids[: length + 1], np.uint16), np.array(kinds[: length + 1], np.uint8)


_maker: Maker | None = None


def _make(index: int, n_rows: int, length: int, text_share: float) -> Batch:
    assert _maker is not None
    return _maker.batch(index, n_rows, length, text_share)


def _case(distance: int, i: int) -> Case:
    assert _maker is not None
    return numbered(_maker.texts, _maker.functions, distance, i)


class Pool:
    """Batches made ahead by worker processes, handed out in the order they were asked for.

    To be created before the process touches a GPU: the workers are forks, so that they share the
    encoded documents.
    """

    def __init__(self, maker: Maker, n_workers: int) -> None:
        global _maker
        _maker = maker
        # a fork inherits the tokenizer's threads as locks that nobody opens any more
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._pool = mp.get_context("fork").Pool(n_workers)
        self._cases: dict[int, AsyncResult[list[Case]]] = {}
        self._pending: deque[AsyncResult[Batch]] = deque()

    def ask(self, *job: Any) -> None:
        """Queue ``Maker.batch(*job)``."""
        self._pending.append(self._pool.apply_async(_make, job))

    def ask_cases(self, distance: int, n: int) -> None:
        """Start to make the first n cases of a distance."""
        self._cases[distance] = self._pool.starmap_async(_case, [(distance, i) for i in range(n)], 4)

    def cases(self, distance: int) -> list[Case]:
        return self._cases[distance].get(timeout=300)

    def take(self) -> Batch:
        return self._pending.popleft().get(timeout=120)

    def __len__(self) -> int:
        return len(self._pending)

    def close(self) -> None:
        self._pool.terminate()
