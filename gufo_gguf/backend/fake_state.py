"""The arithmetic of the fake backend: a hash chain that shows one wrong byte.

Token ``j`` is folded into a 64-bit *link*:

    link[j] = step(link[j-1], token[j], salt[j])

The *salt* stands for everything besides tokens that decides the bytes of a real model: how many
tokens shared the micro-batch, how many neighbours, and what attention read (a digest of all rows
before).  It differs between passes of different shape, so equal tokens do not give equal bytes.

Row ``j`` is link, salt, then filler that both determine.  Private state is the last link, the
position, then filler from the link and the digest of all rows.  Hence a chain of rows, and rows
against private state, can be proven or refuted from the bytes alone:

    row j:    [ link 8 ][ salt 8 ][ filler row_bytes - 16 ]
    private:  [ link 4 x u16 in u32 ][ position 2 x u16 in u32 ][ filler, u32 that are never NaN ]

Rejected: a stored checksum beside the state.  It would be state that real models do not have, and
a test could pass because of it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gufo_gguf.cache.types import Tokens

U64 = npt.NDArray[np.uint64]
U8 = npt.NDArray[np.uint8]

MASK = (1 << 64) - 1
SEED_LINK = 0x9D39247E33776D41
MIN_ROW_BYTES = 16
MIN_PRIVATE_BYTES = 32

_TOKEN = 0xD6E8FEB86659FD93
_SALT = 0xA0761D6478BD642F
_GAMMA = 0x9E3779B97F4A7C15
_M1 = 0xBF58476D1CE4E5B9
_M2 = 0x94D049BB133111EB
# Exponent bits of a float32 never all ones: the filler holds no NaN and no infinity.
_FINITE = np.uint32(0xBF7FFFFF)


def scramble(z: int) -> int:
    """Bijective mix of one 64-bit word (the finaliser of splitmix64)."""
    z &= MASK
    z = ((z ^ (z >> 30)) * _M1) & MASK
    z = ((z ^ (z >> 27)) * _M2) & MASK
    return z ^ (z >> 31)


def combine(*words: int) -> int:
    """One word from several, order included."""
    acc = _GAMMA
    for word in words:
        acc = scramble((acc ^ (word & MASK)) * 5 + _GAMMA)
    return acc


def scramble_array(z: U64) -> U64:
    """``scramble`` over an array."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_M1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_M2)
    return z ^ (z >> np.uint64(31))


def step(link: int, token: int, salt: int) -> int:
    """The next link of the chain."""
    return scramble(link + (token + 1) * _TOKEN + salt * _SALT + _GAMMA)


def chain(link: int, tokens: Tokens, salt: int) -> U64:
    """Links after each of the tokens, all of one pass: shape (n,)."""
    links = np.empty(len(tokens), dtype=np.uint64)
    base = salt * _SALT + _GAMMA
    for i, token in enumerate(tokens.tolist()):
        link = scramble(link + (token + 1) * _TOKEN + base)
        links[i] = link
    return links


def rows_from(links: U64, salts: U64, row_bytes: int) -> U8:
    """The rows that these links and salts determine: shape (n, row_bytes)."""
    n_words = -(-row_bytes // 8)
    words = np.empty((len(links), n_words), dtype=np.uint64)
    words[:, 0] = links
    words[:, 1] = salts
    for k in range(2, n_words):
        words[:, k] = scramble_array(links + np.uint64((k * _GAMMA) & MASK))
    return np.ascontiguousarray(words.view(np.uint8)[:, :row_bytes])


def chain_breaks(rows: U8, tokens: Tokens) -> int | None:
    """The first row that does not follow from its predecessor and its token; None when all do."""
    n = len(tokens)
    if n == 0:
        return None
    head = np.ascontiguousarray(rows[:n, :16]).view(np.uint64).reshape(n, 2)
    links, salts = head[:, 0].copy(), head[:, 1].copy()
    before = np.empty(n, dtype=np.uint64)
    before[0] = SEED_LINK
    before[1:] = links[:-1]
    tokens_term = (tokens[:n].astype(np.int64) + 1).astype(np.uint64) * np.uint64(_TOKEN)
    expected = scramble_array(before + tokens_term + salts * np.uint64(_SALT) + np.uint64(_GAMMA))
    bad = (expected != links) | np.any(rows_from(links, salts, rows.shape[1]) != rows[:n], axis=1)
    first = np.flatnonzero(bad)
    return int(first[0]) if len(first) else None


def rows_digest(rows: U8, first: int) -> int:
    """Additive digest of rows that lie at row numbers first, first + 1, ...: every byte and place counts."""
    n, row_bytes = rows.shape
    if n == 0 or row_bytes == 0:
        return 0
    n_words = -(-row_bytes // 8)
    padded = np.zeros((n, n_words * 8), dtype=np.uint8)
    padded[:, :row_bytes] = rows
    weights = scramble_array(np.arange(1, n_words + 1, dtype=np.uint64) * np.uint64(_GAMMA)) | np.uint64(1)
    mixed = scramble_array(padded.view(np.uint64)) * weights
    places = np.arange(first + 1, first + 1 + n, dtype=np.uint64) * np.uint64(_TOKEN)
    return int(scramble_array(mixed.sum(axis=1, dtype=np.uint64) + places).sum(dtype=np.uint64))


def private_from(link: int, n_tokens: int, digest: int, private_bytes: int) -> U8:
    """The private state at a boundary: shape (private_bytes,), a multiple of 4."""
    words = np.empty(private_bytes // 4, dtype=np.uint32)
    for k in range(4):
        words[k] = (link >> (16 * k)) & 0xFFFF
    words[4] = n_tokens & 0xFFFF
    words[5] = n_tokens >> 16
    seed = np.uint64(combine(link, digest, n_tokens))
    filler = scramble_array(seed + np.arange(len(words) - 6, dtype=np.uint64) * np.uint64(_GAMMA))
    words[6:] = filler.astype(np.uint32) & _FINITE
    return words.view(np.uint8)


def private_link(payload: U8) -> tuple[int, int]:
    """(link, position) written in a private payload."""
    words = payload[: 6 * 4].view(np.uint32).tolist()
    link = sum((words[k] & 0xFFFF) << (16 * k) for k in range(4))
    return link, (words[4] & 0xFFFF) | (words[5] << 16)


def has_nan(payload: U8) -> bool:
    """True when the payload, read as float32, holds a NaN."""
    return bool(np.isnan(payload.view(np.float32)).any())


def logits_from(link: int, digest: int, n_vocab: int) -> npt.NDArray[np.float32]:
    """(n_vocab,) in [-8, 8): a function of the whole state."""
    seed = np.uint64(combine(link, digest))
    bits = scramble_array(seed + np.arange(n_vocab, dtype=np.uint64) * np.uint64(_GAMMA))
    return ((bits >> np.uint64(40)).astype(np.float32) / np.float32(1 << 20)) - np.float32(8.0)
