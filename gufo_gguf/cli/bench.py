"""``gufo bench``: run a benchmark of the checkout this package was installed from.

The benchmarks are no part of the package (they need peers to compare with, and a place for results),
so they are found beside it: in a clone with an editable install, which is what ``make`` sets up.
Every argument behind the name goes to the benchmark, whose own --help lists them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from gufo_gguf.core.errors import ConfigError

BENCHMARKS = {
    "agent": "an agent's day against llama-server: tokens prefilled, first tokens, memory, wrong answers",
    "ablations": "what each choice of the cache earns",
    "serve": "speed while serving, as ratios to llama-server",
    "restart": "first token after a restart, against llama-server's slot restore",
    "table": "write the newest results into the README",
}
_MODULES = {
    "agent": "benchmarks.agent",
    "ablations": "benchmarks.agent.ablations",
    "serve": "benchmarks.serve",
    "restart": "benchmarks.agent.restart",
    "table": "benchmarks.table",
}

ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""For registering the command: --help belongs to the benchmark."""


def checkout(package: Path | None = None) -> Path:
    """The clone whose benchmarks/ stands beside the package.  ConfigError says what to do without one."""
    root = (package or Path(__file__).resolve().parents[1]).parent
    if not (root / "benchmarks" / "agent").is_dir():
        raise ConfigError(
            "the benchmarks are not part of the installed package; clone the repository and run "
            "`make tools`, then `.venv/bin/gufo bench` there"
        )
    return root


def bench(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help=", ".join(BENCHMARKS), show_default=False)] = None,
) -> None:
    """Run a benchmark (from a checkout); without a name, list them."""
    if name in (None, "--help", "-h"):
        typer.echo("gufo bench NAME [--help | FLAGS]\n")
        for key, what in BENCHMARKS.items():
            typer.echo(f"  {key:<10} {what}")
        return
    if name not in _MODULES:
        raise ConfigError(f"no benchmark {name!r}; there are {', '.join(BENCHMARKS)}")
    root = checkout()
    done = subprocess.run([sys.executable, "-m", _MODULES[name], *context.args], cwd=root, check=False)
    if done.returncode:
        raise typer.Exit(done.returncode)
