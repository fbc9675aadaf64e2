"""What the GPU benchmarks run: a model with Flash-Next's state, and texts that mean nothing.

Random weights and random tokens: only shapes matter.  The measured conversation is that of the
design: 95,439 tokens, edits at 85,385 and 47,734.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from gufo_gguf.models.shape import shape_geometry, write_shape

N_TOKENS = 95_439
EDITS = (85_385, 47_734)
N_WARM = 600
"""Tokens asked for first: the first passes of a process are slower."""


def text(seed: int, n: int) -> list[int]:
    return [int(x) for x in np.random.default_rng(seed).integers(0, 500, n)]


def edited(tokens: list[int], at: int) -> list[int]:
    """The same text with one token changed."""
    out = list(tokens)
    out[at] = (out[at] + 1) % 500
    return out


def edits(n_tokens: int) -> dict[str, int]:
    """Where the conversation is edited: the design's places, scaled to a shorter text."""
    near, middle = (round(n_tokens * at / N_TOKENS) for at in EDITS)
    return {f"edit near the end, token {near}": near, f"edit in the middle, token {middle}": middle}


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=N_TOKENS)
    parser.add_argument("--model", type=Path, help="default: one is made")
    parser.add_argument("--experts", type=int, default=12, help="of a made model")
    parser.add_argument("--layers", type=int, help="of a made model; default 48")
    parser.add_argument("--n-embd", type=int, help="of a made model; default 2560")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where temporary files go")
    return parser


@contextmanager
def place(args: argparse.Namespace) -> Iterator[tuple[Path, Path]]:
    """(model, empty folder) of a run; the folder goes afterwards."""
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        yield args.model or _made(args, folder), folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _made(args: argparse.Namespace, folder: Path) -> Path:
    path = folder / "flash-next.gguf"
    started = time.perf_counter()
    sizes = {k: v for k, v in (("n_layer", args.layers), ("n_embd", args.n_embd)) if v}
    write_shape("flash-next", shape_geometry("flash-next", args.experts, **sizes), path, ftype="q8_0")
    took = time.perf_counter() - started
    print(f"model: {path.stat().st_size / 1e9:.2f} GB written in {took:.0f} s", flush=True)
    return path
