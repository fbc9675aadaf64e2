"""How much RAM the cache may use when nobody says (half of what is free, at most 32 GiB), and what fits.

"Free" is what the kernel calls available, cut down to what a cgroup still allows; memory-mapped
weights that were just read count as available there, so the model's own bytes are taken off when
they are mapped.
"""

from __future__ import annotations

from pathlib import Path

from gufo_gguf.cache.types import CacheLimits, StateShape
from gufo_gguf.core.memory import CGROUP, available_bytes

AUTOMATIC_MAX = 32 << 30


def automatic_ram_bytes(mapped_model_bytes: int = 0, *, available: int | None = None, root: Path = CGROUP) -> int:
    """The default of --cache-ram-bytes, in bytes."""
    free = available_bytes(root, free=available)
    return min(max(0, free - mapped_model_bytes) // 2, AUTOMATIC_MAX)


def one_checkpoint_bytes(shape: StateShape, n_ctx: int) -> int:
    """What keeps one checkpoint of a full context while the next state is captured."""
    return n_ctx * shape.row_bytes + 2 * (shape.private_bytes + shape.logits_bytes)


def conversations_that_fit(
    budget_bytes: int,
    n_tokens: int,
    row_bytes: int,
    private_bytes: int,
    *,
    max_checkpoints: int | None = None,
    own_bytes: int = 0,
) -> int:
    """How many conversations of ``n_tokens`` a budget keeps warm, each by one checkpoint that shares nothing.

    ``own_bytes`` is what a checkpoint costs besides rows and private state (blocks and manifest on
    disk).  A lower bound: conversations with a common system prompt share its rows.
    """
    each = n_tokens * row_bytes + private_bytes + own_bytes
    fit = budget_bytes // each if each else 0
    return fit if max_checkpoints is None else min(fit, max_checkpoints)


FIT_TOKENS = (2048, 8192, 32_768, 131_072)
_BLOCK = 4096


def fit_table(
    shape: StateShape, limits: CacheLimits, disk_bytes: int, n_ctx: int, lengths: tuple[int, ...] = ()
) -> list[dict[str, int]]:
    """Budgets in conversations of N tokens: N, the bytes of one, and how many RAM and disk keep.

    ``lengths``: the Ns; by default some round ones that fit the context.
    """
    rows = []
    for n_tokens in lengths or tuple(n for n in FIT_TOKENS if n <= n_ctx) or (n_ctx,):
        # on disk: whole blocks per chunk and private file, and a manifest of 4 bytes a token and 40 a chunk
        chunks = n_tokens // shape.chunk_rows if shape.row_bytes else 0
        own = chunks * (-shape.chunk_bytes % _BLOCK) + 1024 + 4 * n_tokens + 40 * chunks + 2 * _BLOCK
        row_bytes, private_bytes, most = shape.row_bytes, shape.private_bytes, limits.max_checkpoints
        rows.append(
            {
                "tokens": n_tokens,
                "bytes": n_tokens * row_bytes + private_bytes,
                "ram": conversations_that_fit(
                    limits.ram_bytes, n_tokens, row_bytes, private_bytes, max_checkpoints=most
                ),
                "disk": conversations_that_fit(disk_bytes, n_tokens, row_bytes, private_bytes, own_bytes=own),
            }
        )
    return rows
