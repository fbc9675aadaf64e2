"""Which tokens a query may attend to, from the indexer's scores per block of ``ratio`` tokens.

    query at position p, r = ratio, top = indexer_top_k

    [0 ......................... tail) [tail .. p]      tail = (p + 1) // r * r
     whole blocks compete by score      always visible

top + r - 1 cells are taken in all.  Cells of one block share its score, so with a tail shorter than
r - 1 the budget ends inside a block: which cells of it get in, and which of several equal blocks,
is then decided by the order in which the sort happens to keep equals.  llama.cpp's CPU code sorts
with the C++ library's partial sort; ``cpu_order`` repeats what libstdc++ does there, so that the
oracle can be compared cell by cell.  Elsewhere that choice is arbitrary and so are we.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

TAIL_SCORE = 1e9
"""Above every score: what llama.cpp gives to the unfinished block."""


def cell_scores(blocks: Tensor, n_tokens: int, ratio: int) -> Tensor:
    """Scores per cell: (B, T, n_blocks) of whole blocks -> (B, T, T); -inf where the future is."""
    positions = torch.arange(n_tokens, device=blocks.device)
    spread = blocks.repeat_interleave(ratio, -1)
    # cells after the last whole block belong to a tail wherever they are visible
    spread = torch.nn.functional.pad(spread, (0, n_tokens - spread.shape[-1]), value=TAIL_SCORE)
    tail = (positions + 1) // ratio * ratio
    spread = spread.masked_fill(positions >= tail[:, None], TAIL_SCORE)
    return spread.masked_fill(positions > positions[:, None], -torch.inf)


def selected(scores: Tensor, top_k: int, ratio: int, *, cpu_order: bool = False) -> Tensor:
    """Mask (B, T, T), True where the query of a row may attend."""
    n_tokens = scores.shape[-1]
    width = min(n_tokens, top_k + ratio - 1)
    if cpu_order:
        picks = [[_partial_sort(row, width) for row in rows] for rows in scores.tolist()]
        index = torch.tensor(picks, device=scores.device)
    else:
        index = scores.topk(width, -1, sorted=False).indices
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, index, True)
    return mask & (scores > -torch.inf)


def _partial_sort(values: Sequence[float], n: int) -> list[int]:
    """Indices of the n largest, with libstdc++'s choice among equals: a heap of the first n whose
    top is the smallest, in which every later larger value replaces the top."""
    heap = list(range(n))
    for start in range(n // 2 - 1, -1, -1):
        _sift(heap, values, start, heap[start])
    for i in range(n, len(values)):
        if values[i] > values[heap[0]]:
            _sift(heap, values, 0, i)
    return heap


def _sift(heap: list[int], values: Sequence[float], hole: int, item: int) -> None:
    """Move the hole down to a leaf along the smaller children, then the item up from there."""
    top, n = hole, len(heap)
    child = hole
    while child < (n - 1) // 2:
        child = 2 * (child + 1)
        # equals go right: the left child is taken only when strictly smaller
        if values[heap[child]] > values[heap[child - 1]]:
            child -= 1
        heap[hole] = heap[child]
        hole = child
    if n % 2 == 0 and child == (n - 2) // 2:
        child = 2 * (child + 1)
        heap[hole] = heap[child - 1]
        hole = child - 1
    while hole > top and values[heap[(hole - 1) // 2]] > values[item]:
        heap[hole] = heap[(hole - 1) // 2]
        hole = (hole - 1) // 2
    heap[hole] = item
