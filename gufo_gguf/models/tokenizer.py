"""The tokenizer of the generated models: byte-level BPE learned from our own text.

The vocabulary, in order:

    [0, 256)                       one token per byte
    [256, 256 + N_MERGES)          merges, the most frequent pair first
    [.., N_TOKENS)                 special tokens
    [N_TOKENS, n_vocab)            padding, only where a model wants a larger vocabulary

Nothing is taken from another model's tokenizer: its vocabulary would come with a licence, and
reading one takes longer than learning this one (a fraction of a second, once per process).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from gguf import TokenType

from gufo_gguf.models.corpus import CORPUS

PRE_TOKENIZER = "qwen2"
"""How llama.cpp cuts text before merging; the pieces below never cross its cuts."""
N_MERGES = 496
_PIECE = re.compile(r" ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|[0-9]|\n+|[ ]+")

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
_CONTROL = (END_OF_TEXT, TURN_START, TURN_END)
# user-defined, not control: these belong to the text that a tool-call parser reads
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

N_TOKENS = 768
"""Tokens with a meaning, then rounded up with padding; a multiple of 32."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as a GGUF file holds it."""

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...]
    quiet: tuple[int, ...]
    """Ids whose output rows are zero in a generated model, so that greedy decoding never picks
    them: padding, specials (a random model would open a tool call or end its answer by accident)
    and bytes that are not printable ASCII (a stream of broken UTF-8 compares badly)."""

    def id_of(self, token: str) -> int:
        return self.tokens.index(token)


@cache
def vocabulary(n_vocab: int = N_TOKENS) -> Vocabulary:
    """The vocabulary padded to n_vocab tokens; ValueError if n_vocab < N_TOKENS."""
    if n_vocab < N_TOKENS:
        raise ValueError(f"n_vocab is {n_vocab}, the tokenizer needs at least {N_TOKENS}")
    alphabet = byte_alphabet()
    merges = _learn(alphabet)
    text = [alphabet[byte] for byte in range(256)] + [left + right for left, right in merges]
    specials = [*_CONTROL, *_TAGS]
    n_padding = n_vocab - len(text) - len(specials)
    types = [TokenType.NORMAL] * len(text)
    types += [TokenType.CONTROL] * len(_CONTROL) + [TokenType.USER_DEFINED] * len(_TAGS)
    types += [TokenType.UNUSED] * n_padding
    printable = {ord("\n"), *range(0x20, 0x7F)}
    return Vocabulary(
        tokens=(*text, *specials, *(f"<|unused_{i}|>" for i in range(n_padding))),
        types=tuple(int(t) for t in types),
        merges=tuple(f"{left} {right}" for left, right in merges),
        quiet=(*(byte for byte in range(256) if byte not in printable), *range(len(text), n_vocab)),
    )


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's convention).

    Bytes that print as Latin-1 stand for themselves; the others get code points from 256 upwards.
    """
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in prints else chr(next(spare)) for byte in range(256)]


def _learn(alphabet: list[str]) -> list[tuple[str, str]]:
    """The N_MERGES most frequent pairs, each counted after the merges before it.

    Ties go to the pair that sorts first: a Counter's own order would depend on the text's order.
    """
    counts = Counter(_PIECE.findall(CORPUS))
    pieces = [([alphabet[byte] for byte in piece.encode()], n) for piece, n in sorted(counts.items())]
    merges: list[tuple[str, str]] = []
    while len(merges) < N_MERGES:
        pairs: Counter[tuple[str, str]] = Counter()
        for symbols, n in pieces:
            for pair in pairwise(symbols):
                pairs[pair] += n
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for symbols, _ in pieces:
            _merge(symbols, best)
    return merges


def _merge(symbols: list[str], pair: tuple[str, str]) -> None:
    i = 0
    while i + 1 < len(symbols):
        if (symbols[i], symbols[i + 1]) == pair:
            symbols[i : i + 2] = [pair[0] + pair[1]]
        i += 1
