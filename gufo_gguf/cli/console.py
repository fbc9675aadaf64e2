"""What several commands show on a terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table


def plain_table(*columns: str, header: bool = True) -> Table:
    """A table without frames; a column named ``x>`` is aligned to the right.

    Cells that find no room are folded, never cut: a number without its last digits is a wrong one.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD if header else None, show_header=header, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name.rstrip(">"), justify="right" if name.endswith(">") else "left", overflow="fold")
    return table


def print_table(table: Table, console: Console | None = None) -> None:
    """A terminal's width limits it; a pipe or a file has none, and takes each row on a line."""
    from rich.console import Console

    console = console or Console()
    if not console.is_terminal:
        unlimited = console.options.update(max_width=1 << 16)
        console.width = max(console.width, console.measure(table, options=unlimited).maximum)
    console.print(table)


def loading_bar(name: str) -> tuple[Progress, Callable[[float], None]]:
    """A progress bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    bar = Progress(
        TextColumn("loading {task.fields[name]}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task("load", total=1.0, name=name)

    def update(done: float) -> None:
        bar.update(task, completed=done)

    return bar, update
