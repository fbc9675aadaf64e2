"""`make check-hip`: does the pinned HIP backend compile for gfx1151, on a machine without an AMD GPU?

    python native/check_hip.py                       base sources and one instance of each template family
    python native/check_hip.py --every               all sources of a default build
    python native/check_hip.py --gpu-targets gfx1100,gfx1151
    python native/check_hip.py --library FILE        which GPUs a finished libggml-hip.so carries code for
    python native/check_hip.py --load FOLDER         what a finished folder answers when loaded, without a GPU

With ROCm installed its compiler is used; else clang, headers and device libraries are fetched from
Debian and unpacked into the cache folder.  Status 1 when something does not compile, is code for
another GPU, or when the source shares inputs with an integrated GPU unsafely.  Nothing is run on a
GPU: docs/strix-halo.md says what that leaves open.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from build import CHECKOUT, cache_dir
from gufobuild import amdgpu, cachedir, fetch, hipcheck, hiptools, loaded
from gufobuild.cachedir import CacheDir
from gufobuild.console import Progress, say
from gufobuild.errors import BuildError
from gufobuild.hipcheck import Result
from gufobuild.native import parallel_jobs
from gufobuild.recipe import DEFAULT_GPU_TARGETS, Upstream


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    try:
        if options.library is not None:
            print(library_report(options.library.read_bytes()))
            return 0
        if options.load is not None:
            print(loaded.report(options.load, (CHECKOUT / "native/include/gufo.h").read_text(encoding="utf-8")))
            return 0
        return run(options)
    except (BuildError, OSError) as error:
        say(f"\n{error}\n")
        return 1
    except KeyboardInterrupt:
        say("\ninterrupted; objects are kept, run this again to go on\n")
        return 130


def run(options: argparse.Namespace) -> int:
    cache = CacheDir(cache_dir())
    upstream = Upstream.read(CHECKOUT / "native" / "upstream.json")
    targets = [t for t in options.gpu_targets.replace(";", ",").split(",") if t] or [DEFAULT_GPU_TARGETS["hip"]]
    log = cache.root / "hip" / "fetch.log"
    # The archive and its source belong to the native build's lock, the objects and packages to this one.
    with cachedir.locked(cache.native / "lock", say):
        source = fetch.source(cache, upstream, fetch.archive(cache, upstream, log, os.environ))
    with cachedir.locked(cache.root / "hip" / "lock", say):
        tools = hiptools.find(cache, os.environ, options.mirror, options.refresh)
        backend = hipcheck.Backend(source / "ggml", f"{upstream.version} {upstream.sha256}")
        tasks = hipcheck.plan(backend, tools, targets, options.every)
        n_jobs = options.jobs or parallel_jobs()
        say(f"llama.cpp of {upstream.package} {upstream.version}, {len(tasks)} objects, {n_jobs} at a time")
        results = hipcheck.check(tasks, cache.root / "hip" / "objects", tools.env(os.environ), n_jobs, _teller(tasks))
    for name, what in tools.about.items():
        print(f"{name}: {what}")
    print(hipcheck.summary(results, targets))
    hazard = hipcheck.input_hazard((backend.folder / "ggml-cuda.cu").read_text(encoding="utf-8"))
    print(f"inputs of integrated GPUs: {hazard or 'copied before the next are written'}")
    print("Compiled here, not run: there is no AMD GPU in this check.")
    return 1 if hazard or any(r.fault for r in results) else 0


def _teller(tasks: Sequence[hipcheck.Task]) -> hipcheck.Told:
    progress = Progress("device code")
    n_done = 0

    def told(result: Result) -> None:
        nonlocal n_done
        n_done += 1
        if result.fault:
            progress.clear()
            say(f"{result.task.name}: {result.fault}")
        progress.update(f"{n_done}/{len(tasks)}  {result.task.name}")
        if n_done == len(tasks):
            progress.clear()

    return told


def library_report(data: bytes) -> str:
    """One line for each GPU: how many code objects and kernels a linked library carries for it."""
    objects: Counter[str] = Counter()
    kernels: dict[str, set[str]] = {}
    for _, code in amdgpu.bundled(data):
        found = amdgpu.read_code_object(code)
        objects[found.target] += 1
        kernels.setdefault(found.target, set()).update(found.kernels)
    if not objects:
        return "no AMD GPU code"
    return "\n".join(f"{n} code objects carry {t}: {len(kernels[t]):,} kernels" for t, n in sorted(objects.items()))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="check_hip.py", description=__doc__.split("\n")[0])
    parser.add_argument("--gpu-targets", default="", help="GPU architectures, with commas (gfx1151 unless given)")
    parser.add_argument("--every", action="store_true", help="all sources of a default build")
    parser.add_argument("--jobs", type=int, default=0, help="compilers at a time (one per processor)")
    parser.add_argument("--mirror", default="", metavar="URL", help="Debian mirror (that of apt's sources)")
    parser.add_argument("--refresh", action="store_true", help="fetch the packages anew")
    parser.add_argument("--library", type=Path, metavar="FILE", help="look at a finished library instead")
    parser.add_argument("--load", type=Path, metavar="FOLDER", help="load a finished folder's libraries instead")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
