"""``gufo``: the command line, one file per command, and one way of failing.

An expected failure (a wrong flag, a file that is no model, a port in use) is one line on stderr and
exit status 1; a traceback means a bug.
"""

from __future__ import annotations

import sys

import typer

from gufo_gguf import __version__
from gufo_gguf.cli.bench import ANY_ARGUMENTS, bench
from gufo_gguf.cli.cache import cache_app
from gufo_gguf.cli.chat import chat
from gufo_gguf.cli.demo import demo
from gufo_gguf.cli.doctor import doctor
from gufo_gguf.cli.model import model_app
from gufo_gguf.cli.serve import serve
from gufo_gguf.core.errors import GufoError

app = typer.Typer(
    help="A local server for hybrid GGUF models that remembers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"gufo {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


app.command()(serve)
app.command()(chat)
app.command()(demo)
app.command(context_settings=ANY_ARGUMENTS)(bench)
app.command()(doctor)
app.add_typer(cache_app, name="cache")
app.add_typer(model_app, name="model")


def main() -> None:
    """Entry point of the ``gufo`` command."""
    try:
        app()
    except GufoError as error:
        print(f"gufo: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
