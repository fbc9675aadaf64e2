"""``gufo model``: make model files with random weights, for tests and measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gufo_gguf.models.tiny import TINY_ARCHS, write_tiny

model_app = typer.Typer(help="Make model files with random weights.", no_args_is_help=True)

_Seed = Annotated[int, typer.Option(min=0, help="Same seed, same bytes.")]
_Type = Annotated[str, typer.Option("--type", help="Type of the matrices: f16 or q8_0.")]


@model_app.command()
def tiny(
    arch: Annotated[str, typer.Argument(help=f"One of: {', '.join(TINY_ARCHS)}.")],
    out: Annotated[Path, typer.Argument(help="GGUF file to write.")],
    seed: _Seed = 0,
    ftype: _Type = "f16",
) -> None:
    """Write a model of a few MB that loads, tokenizes, has a chat template, and knows nothing."""
    write_tiny(arch, out, seed=seed, ftype=ftype)
    typer.echo(f"{out}: {out.stat().st_size / 1e6:.1f} MB")
