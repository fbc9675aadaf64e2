"""Conversations as token ids, and what the loss makes of each token.

<|im_start|>user\\n ... <|im_end|>\\n    CONTEXT
<|im_start|>assistant\\n                CONTEXT
answer <|im_end|>                      RECALL or ANSWER
documents                              TEXT
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from models.owlet import tokenizer
from models.owlet.dialogues import Turn

CONTEXT, TEXT, ANSWER, RECALL = range(4)
_NO_REASONING = "<think>\n\n</think>\n\n"
"""What the chat template opens an answer with when reasoning is switched off."""


def encode(turns: Sequence[Turn], rng: random.Random | None = None) -> tuple[list[int], list[int]]:
    """Ids and kinds of a conversation, cut into tokens exactly as the rendered text would be.

    With an rng, one answer in ten is opened as it is when reasoning is switched off.

    Special tokens end a piece of text, and an answer never starts with white space, so pieces may
    be encoded one by one.
    """
    coder = tokenizer.load()
    start, end = coder.token_to_id(tokenizer.TURN_START), coder.token_to_id(tokenizer.TURN_END)
    newline = coder.encode("\n").ids
    ids: list[int] = []
    kinds: list[int] = []
    for turn in turns:
        if turn.role == "assistant":
            opening = _NO_REASONING if rng is not None and rng.random() < 0.1 else ""
            head, body = [start, *coder.encode("assistant\n" + opening).ids], [*coder.encode(turn.text).ids, end]
            kind = RECALL if turn.recall else ANSWER
        else:
            head, body = [start, *coder.encode(f"{turn.role}\n{turn.text}").ids, end], []
            kind = CONTEXT
        ids += head + body + newline
        kinds += [CONTEXT] * len(head) + [kind] * len(body) + [CONTEXT] * len(newline)
    return ids, kinds
