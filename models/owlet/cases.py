"""The conversations that recall is measured with: one fact, a long way, one question."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from models.owlet.coding import encode
from models.owlet.dialogues import Turn, Writer
from models.owlet.facts import Fact

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


def numbered(texts: Sequence[str], functions: Sequence[dict[str, Any]], distance: int, i: int) -> Case:
    """Case i of a distance: the same for every model and at any time."""
    return case(Writer(random.Random(f"{EVAL_SEED}/{distance}/{i}"), texts, functions), distance)
