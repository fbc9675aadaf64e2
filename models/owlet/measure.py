"""Recall of an exported file as llama.cpp computes it: prefill, then greedy decoding.

    python -m models.owlet.measure FILE [--cases 256:48 1024:48 4096:24 8192:6]

The same cases as ``evaluate``, which asks the PyTorch model.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from gufo_gguf.backend.base import Span
from gufo_gguf.backend.llama import LlamaBackend, LlamaOptions
from models.owlet import corpus
from models.owlet.cases import Case, numbered
from models.owlet.coding import RECALL

_N_BATCH = 512


def answered(backend: LlamaBackend, one: Case) -> bool:
    """Does greedy decoding write the answer, the end of the turn included?"""
    first = one.kinds.index(RECALL)
    last = len(one.kinds) - one.kinds[::-1].index(RECALL)
    prompt, expected = one.ids[:first], one.ids[first:last]
    backend.truncate(0, 0)
    for start in range(0, len(prompt), _N_BATCH):
        part = np.array(prompt[start : start + _N_BATCH], np.int32)
        backend.decode([Span(0, part, start + _N_BATCH >= len(prompt))])
    for token in expected:
        if int(backend.logits(0).argmax()) != token:
            return False
        backend.decode([Span(0, np.array([token], np.int32), True)])
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--cases", nargs="+", default=["256:48", "1024:48", "4096:24", "8192:6"], metavar="TOKENS:N")
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    texts, functions = corpus.load()
    with LlamaBackend(args.file, LlamaOptions(n_batch=_N_BATCH, n_threads=args.threads)) as backend:
        for distance, n in (map(int, pair.split(":")) for pair in args.cases):
            started = time.monotonic()
            right = sum(answered(backend, numbered(texts, functions, distance, i)) for i in range(n))
            took = time.monotonic() - started
            print(f"{distance:>6} tokens: {right} of {n} ({took / n:.2f} s each)", flush=True)


if __name__ == "__main__":
    main()
