"""The command behind the Makefile: environment, native libraries, upstream tools, places.

    python3 native/build.py venv [--extras dev]        make or renew .venv
    python  native/build.py native [--kind cpu]        build libgufo and link the checkout to it
    python  native/build.py tools llama-bench ...      build upstream's programs next to the libraries
    python  native/build.py where                      print the folders in use

Standard library only.  `venv` is run by the system's Python, the others by the environment's.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - said before anything that older versions cannot import
    sys.exit("gufo-gguf needs Python 3.11 or newer, not " + sys.version.split()[0] + "; see `make PYTHON=...`")

import argparse
import importlib.util
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from gufobuild import cachedir, fetch, native, needs
from gufobuild.cachedir import CacheDir
from gufobuild.console import say
from gufobuild.errors import BuildError
from gufobuild.recipe import Upstream
from gufobuild.venv import Venv
from gufobuild.venv import ensure as ensure_venv

CHECKOUT = Path(__file__).resolve().parents[1]


def cache_dir() -> Path:
    """The package's own rule, loaded by path: the package's dependencies may not be installed yet."""
    spec = importlib.util.spec_from_file_location("gufo_env", CHECKOUT / "gufo_gguf" / "core" / "env.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path: Path = module.cache_dir()
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    cache = CacheDir(cache_dir())
    flags = tuple(shlex.split(options.cmake_flags))
    job = native.Job(CHECKOUT, cache, options.kind, options.gpu_targets or None, flags)
    try:
        if options.command == "venv":
            ensure_venv(Venv(CHECKOUT), options.extras, cache, options.kind, os.environ)
        elif options.command == "native":
            native.ensure(job, os.environ)
        elif options.command == "tools":
            print(build_tools(job, options.targets))
        else:
            print(f"cache folder    {cache.root}\nnative builds   {cache.native}\npointer         {job.pointer}")
    except BuildError as error:
        say(f"\n{error}\n")
        return 1
    except OSError as error:
        say(f"\n{cachedir.usage_error(cache.root, error) if cache.root in _paths(error) else error}\n")
        return 1
    except KeyboardInterrupt:
        say("\ninterrupted; what was built is kept, run make again to go on\n")
        return 130
    return 0


def build_tools(job: native.Job, targets: Sequence[str]) -> Path:
    """Upstream's programs, built into the same tree as the libraries; returns their folder."""
    upstream = Upstream.read(job.native / "upstream.json")
    lacks = needs.missing(job.kind, os.environ, job.cache.root)
    if lacks:
        raise BuildError(needs.message(job.kind, lacks))
    compilers, plan = native.plan_of(job, upstream, os.environ, needs.Probe())
    with cachedir.locked(job.cache.native / "lock", say) as lock_fd:
        tools = native.BuildTools(os.environ, compilers, job.cache, plan, lock_fd)
        archive = fetch.archive(job.cache, upstream, job.cache.native / "fetch.log", os.environ)
        source = fetch.source(job.cache, upstream, archive)
        return native.build_upstream(tools, source, (*native.UPSTREAM_TARGETS, *targets)) / "bin"


def _paths(error: OSError) -> list[Path]:
    names = [n for n in (error.filename, error.filename2) if isinstance(n, str)]
    return [folder for name in names for folder in (Path(name), *Path(name).parents)]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--kind", choices=needs.KINDS, default="cpu", help="what the libraries run on")
    common.add_argument("--gpu-targets", default="", help="GPU architectures (hip: gfx1151 unless given)")
    common.add_argument("--cmake-flags", default="", help="more definitions for llama.cpp (-DGGML_NATIVE=OFF)")
    parser = argparse.ArgumentParser(prog="build.py", description="Build steps of gufo-gguf; usually run by make.")
    commands = parser.add_subparsers(dest="command", required=True)
    venv = commands.add_parser("venv", parents=[common])
    venv.add_argument("--extras", nargs="*", default=[], metavar="NAME")
    commands.add_parser("native", parents=[common])
    tools = commands.add_parser("tools", parents=[common])
    tools.add_argument("targets", nargs="+", metavar="TARGET")
    commands.add_parser("where", parents=[common])
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
