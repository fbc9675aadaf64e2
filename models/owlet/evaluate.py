"""Recall: is a fact that stands N tokens back given back word for word?

An answer counts when every one of its tokens, the end of the turn included, is the most probable
one after all tokens before it: that is what greedy decoding would have written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from models.owlet.cases import Case
from models.owlet.coding import RECALL
from models.owlet.reference import Model, Run


@torch.no_grad()
def recall(model: Model, found: Sequence[Case], run: Run | None = None, tokens_max: int = 40_000) -> float:
    """Share of cases answered exactly, in [0, 1]."""
    device = next(model.parameters()).device
    right = 0
    group = max(1, tokens_max // max(len(c.ids) for c in found))
    for first in range(0, len(found), group):
        part = found[first : first + group]
        width = max(len(c.ids) for c in part)
        # padding stands at the end, where a causal model does not see it
        tokens = torch.tensor([c.ids + [0] * (width - len(c.ids)) for c in part], device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            hidden = model.hidden(tokens[:, :-1], run)
            for row, one in enumerate(part):
                at = [i for i, kind in enumerate(one.kinds) if kind == RECALL]
                guess = model.output(hidden[row, at[0] - 1 : at[-1]]).argmax(-1)
                right += bool((guess == tokens[row, at[0] : at[-1] + 1]).all())
    return right / len(found)
