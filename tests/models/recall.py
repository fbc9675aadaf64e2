"""Documents with planted facts, and questions about them, for tests of the trained model.

Made by Owlet's own generators from seeds of their own (none of these was trained on), around text of
the standard library that is there wherever Python is.  Neither PyTorch nor the corpus is needed.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from gufo_gguf.backend.base import Span
from gufo_gguf.backend.llama import LlamaBackend, LlamaOptions
from gufo_gguf.backend.vocab import Vocab
from gufo_gguf.cache.types import ComponentKind, Tokens
from gufo_gguf.engine.types import as_tokens
from gufo_gguf.models.default import owlet
from models.owlet.dialogues import SYSTEM, Turn, Writer
from models.owlet.facts import Fact

_MODULES = ("argparse", "heapq", "random", "shutil", "statistics", "textwrap", "traceback", "zipfile")
_PASS = 128
SMALL = LlamaOptions(n_ctx=10_240, n_batch=512, n_ubatch=256, n_threads=1)
ANSWER_TOKENS_MAX = 24


@cache
def texts() -> tuple[str, ...]:
    stdlib = Path(sysconfig.get_path("stdlib"))
    found = [
        stdlib / f"{name}.py" if (stdlib / f"{name}.py").is_file() else stdlib / name / "__init__.py"
        for name in _MODULES
    ]
    return tuple(path.read_text(encoding="utf-8") for path in found)


def rendered(turns: Sequence[Turn]) -> str:
    """The text that the chat template makes of finished turns."""
    return "".join(f"<|im_start|>{turn.role}\n{turn.text}<|im_end|>\n" for turn in turns)


@dataclass(frozen=True)
class Question:
    fact: Fact
    text: str
    """The user's turn and the assistant's opening."""

    @property
    def answer(self) -> str:
        return self.fact.value


@dataclass(frozen=True)
class Document:
    """A text that was read, and questions about it; ``turns`` are the messages before the question."""

    turns: tuple[Turn, ...]
    questions: tuple[Question, ...]

    @property
    def text(self) -> str:
        return rendered(self.turns)


def document(seed: int, n_chars: int, n_facts: int) -> Document:
    """Facts on lines of their own, spread over about n_chars of source text, a turn per 1,500."""
    writer = Writer(random.Random(f"recall/{seed}"), texts(), [])
    facts = [writer.facts.new() for _ in range(n_facts)]
    turns = [Turn("system", SYSTEM)]
    n_turns = max(1, n_chars // 1500)
    for i in range(n_turns):
        turns += writer.quote(writer.lines(n_chars / n_turns), facts[i::n_turns])
    asked = [
        Question(
            fact,
            f"<|im_start|>user\nWhat is the {fact.attribute} of {fact.key}?<|im_end|>\n<|im_start|>assistant\n",
        )
        for fact in facts
    ]
    return Document(tuple(turns), tuple(asked))


class Reader:
    """One context that reads, saves its state after a document, and answers from what it restored."""

    def __init__(self, path: Path | None = None, options: LlamaOptions = SMALL) -> None:
        self.backend = LlamaBackend(path or owlet(), options)
        self.vocab: Vocab = self.backend.vocab()
        inventory = self.backend.info.inventory
        assert inventory is not None
        self.inventory = inventory
        self.tokens: Tokens = as_tokens([])

    def ids(self, text: str) -> list[int]:
        return self.vocab.tokenize(text, add_special=False, parse_special=True)

    def read(self, text: str | Sequence[int]) -> None:
        """Evaluate a text, or tokens, at the current position."""
        ids = self.ids(text) if isinstance(text, str) else list(text)
        for first in range(0, len(ids), _PASS):
            part = as_tokens(ids[first : first + _PASS])
            self.backend.decode([Span(0, part, first + _PASS >= len(ids))])
        self.tokens = as_tokens([*self.tokens, *ids])

    def forget(self) -> None:
        self.backend.truncate(0, 0)
        self.tokens = as_tokens([])

    def answer(self) -> str:
        """Greedy, until the turn ends."""
        return self.vocab.detokenize(self.following(ANSWER_TOKENS_MAX)).decode("utf-8", "replace")

    def following(self, n_max: int) -> list[int]:
        """The most likely tokens after what was read, without the one that ends the turn."""
        out: list[int] = []
        while len(out) < n_max:
            token = int(self.backend.logits(0).argmax())
            if self.vocab.is_eog(token):
                break
            out.append(token)
            self.backend.decode([Span(0, as_tokens([token]), True)])
        return out

    def saved(self) -> Saved:
        n = len(self.tokens)
        rows = np.zeros(n * self.inventory.row_bytes, np.uint8)
        private = np.zeros(self.inventory.private_bytes, np.uint8)
        self.backend.rows_out(0, 0, n, rows)
        self.backend.private_out(0, private)
        return Saved(self.tokens, rows, private)

    def restore(self, saved: Saved) -> None:
        n = len(saved.tokens)
        self.backend.begin_restore(0, saved.tokens)
        self.backend.load_rows(0, 0, n, saved.rows, n)
        self.backend.load_private(0, saved.private)
        self.backend.finish_restore(0)
        self.tokens = saved.tokens

    def without(self, saved: Saved, prefix: str) -> Saved:
        """The same payload with the components whose names start so zeroed; AssertionError if none does."""
        rows, private = saved.rows.copy(), saved.private.copy()
        offsets = {ComponentKind.ROWS: 0, ComponentKind.PRIVATE: 0}
        n_found = 0
        for part in self.inventory.components:
            n_bytes = part.n_bytes * (len(saved.tokens) if part.kind is ComponentKind.ROWS else 1)
            if part.id.startswith(prefix):
                n_found += 1
                target = rows if part.kind is ComponentKind.ROWS else private
                target[offsets[part.kind] : offsets[part.kind] + n_bytes] = 0
            offsets[part.kind] += n_bytes
        assert n_found, f"no component is called {prefix}*"
        return Saved(saved.tokens, rows, private)

    def close(self) -> None:
        self.backend.close()


@dataclass(frozen=True)
class Saved:
    """A captured state: rows packed component after component, private state whole."""

    tokens: Tokens
    rows: np.ndarray
    private: np.ndarray
