"""``gufo model``: make model files with random weights, for tests and measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from gufo_gguf.models.shape import SHAPES, shape_geometry, state_size, write_shape
from gufo_gguf.models.tiny import TINY_ARCHS, write_tiny

model_app = typer.Typer(help="Make model files with random weights.", no_args_is_help=True)

_Out = Annotated[Path, typer.Argument(help="GGUF file to write.")]
_Seed = Annotated[int, typer.Option(min=0, help="Same seed, same bytes.")]
_Type = Annotated[str, typer.Option("--type", help="Type of the matrices: f16 or q8_0.")]


@model_app.command()
def tiny(
    arch: Annotated[str, typer.Argument(help=f"One of: {', '.join(TINY_ARCHS)}.")],
    out: _Out,
    seed: _Seed = 0,
    ftype: _Type = "f16",
) -> None:
    """Write a model of a few MB that loads, tokenizes, has a chat template, and knows nothing."""
    write_tiny(arch, out, seed=seed, ftype=ftype)
    typer.echo(f"{out}: {out.stat().st_size / 1e6:.1f} MB")


@model_app.command()
def shape(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(SHAPES)}.")],
    out: _Out,
    experts: Annotated[int, typer.Option(min=1, help="Experts per layer; most of the file, none of the state.")] = 16,
    layers: Annotated[int | None, typer.Option(min=2, help="Fewer layers than the real model.")] = None,
    n_embd: Annotated[int | None, typer.Option(min=32, help="A smaller width than the real model's.")] = None,
    n_vocab: Annotated[int | None, typer.Option(help="A smaller vocabulary than the real model's.")] = None,
    seed: _Seed = 0,
    ftype: _Type = "q8_0",
) -> None:
    """Write a model with a real one's layers, heads, state and row sizes, and fewer experts."""
    geometry = shape_geometry(name, experts, n_layer=layers, n_embd=n_embd, n_vocab=n_vocab)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("tensors", total=None)
        write_shape(
            name,
            geometry,
            out,
            ftype=ftype,
            seed=seed,
            progress=lambda n_done, n_total: bar.update(task, completed=n_done, total=n_total),
        )
    state = state_size(geometry)
    typer.echo(
        f"{out}: {out.stat().st_size / 1e9:.2f} GB; state with f16 KV: {state.row_bytes:,} bytes of rows a token, "
        f"{state.private_bytes / 1e6:.1f} MB private"
    )
