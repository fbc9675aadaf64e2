"""Recall: is a fact that stands N tokens back given back word for word?

An answer counts when every one of its tokens, the end of the turn included, is the most probable
one after all tokens before it: that is what greedy decoding would have written.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from models.owlet.batches import RECALL, encode
from models.owlet.dialogues import Fact, Turn, Writer
from models.owlet.reference import Model, Run

EVAL_SEED = 977
"""Training seeds are other ones: no conversation of an evaluation was ever trained on."""


@dataclass(frozen=True, slots=True)
class Case:
    turns: list[Turn]
    ids: list[int]
    kinds: list[int]
    fact: Fact
    distance: int
    """Tokens from the fact's text to the end of the question."""


def case(writer: Writer, distance: int) -> Case:
    """A conversation whose last question asks for something ``distance`` tokens back, or up to a
    tenth more."""
    fillers = [writer.lines(writer.rng.uniform(80, 300))]
    counts = [len(encode(writer.quote(fillers[0], []))[0])]
    while sum(counts[1:]) < distance - 60:
        missing = distance - sum(counts[1:])
        text = writer.lines(min(writer.rng.uniform(300, 2500), missing * 2.6))
        fillers.append(text)
        counts.append(len(encode(writer.quote(text, []))[0]))
    turns, fact = writer.needle(fillers)
    ids, kinds = encode(turns)
    before, _ = encode(turns[:2])
    return Case(turns, ids, kinds, fact, len(ids) - len(before))


def cases(texts: Sequence[str], functions: Sequence[dict[str, object]], distance: int, n: int) -> list[Case]:
    """n cases, the same for every model and at any time."""
    return [
        case(Writer(random.Random(f"{EVAL_SEED}/{distance}/{i}"), texts, functions), distance) for i in range(n)
    ]


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
