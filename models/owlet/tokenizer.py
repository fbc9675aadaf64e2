"""Owlet's tokenizer: byte-level BPE learned from our corpus and dialogues, 4,096 tokens in all.

    [0, 256)         bytes              [.., 4087)   merges, the most frequent first
    [4087, 4096)     special tokens, in the order of SPECIALS

Text is cut before merging as llama.cpp cuts it for ``qwen2``: digits stand alone, so a number is
copied figure by figure; newlines never merge with words.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from gguf import GGUFWriter

FILE = Path(__file__).with_name("tokenizer.json")
N_VOCAB = 4096
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL = (END_OF_TEXT, TURN_START, TURN_END)
# not control tokens: the tags are text that a parser of tool calls and reasoning reads
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
SPECIALS = (*CONTROL, *TAGS)
_CUT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train(texts: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_CUT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=N_VOCAB - len(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(SPECIALS))
    assert [tokenizer.token_to_id(s) for s in SPECIALS] == list(range(N_VOCAB - len(SPECIALS), N_VOCAB))
    return tokenizer


@cache
def load() -> Tokenizer:
    return Tokenizer.from_file(str(FILE))


def add_to_gguf(writer: GGUFWriter) -> None:
    """Write vocabulary, merges, special tokens and the chat template into a GGUF file's metadata."""
    from gguf import TokenType

    from gufo_gguf.models.recipe import chat_template

    model = json.loads(FILE.read_text(encoding="utf-8"))
    vocab = {**model["model"]["vocab"], **{t["content"]: t["id"] for t in model["added_tokens"]}}
    tokens = sorted(vocab, key=vocab.__getitem__)
    assert [vocab[t] for t in tokens] == list(range(N_VOCAB))
    kinds = dict.fromkeys(CONTROL, TokenType.CONTROL) | dict.fromkeys(TAGS, TokenType.USER_DEFINED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([int(kinds.get(t, TokenType.NORMAL)) for t in tokens])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["model"]["merges"]])
    writer.add_bos_token_id(vocab[END_OF_TEXT])
    writer.add_eos_token_id(vocab[TURN_END])
    writer.add_eot_token_id(vocab[TURN_END])
    writer.add_pad_token_id(vocab[END_OF_TEXT])
    writer.add_add_bos_token(False)
    writer.add_chat_template(chat_template())


def _training_text() -> Iterator[str]:
    """Every third document, and dialogues, whose names and numbers should not cost much more."""
    import random

    from models.owlet import corpus, dialogues

    texts, functions = corpus.load()
    yield from texts[::3]
    writer = dialogues.Writer(random.Random(1), texts, functions)
    for _ in range(1500):
        for turn in writer.conversation(3000):
            yield turn.text


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    train(_training_text()).save(str(FILE))
    print(f"{FILE}: {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
