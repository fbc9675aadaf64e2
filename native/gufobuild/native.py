"""The native build: llama.cpp once per recipe, our overlay on top, a finished folder, a pointer to it.

have lib-KIND-KEY?  ── yes ──►  pointer                                   (a second clone: well under a second)
      │ no, under the lock
archive ► source ► upstream build tree ► overlay build tree ► lib-KIND-KEY ► pointer
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from . import cachedir, fetch, hiptools, needs, recipe
from .cachedir import CacheDir
from .console import run_logged, say, step
from .errors import BuildError
from .needs import MIN_CMAKE, Compilers, Probe
from .recipe import Recipe, Upstream

UPSTREAM_TARGETS = ("llama", "llama-common")
_GIB_PER_JOB = 1.5
_LIBRARIES = re.compile(r"lib(llama|llama-common|ggml(-[a-z0-9]+)*)\.(so(\.\d+)*|(\d+\.)*dylib|dylib)")


@dataclass(frozen=True)
class Job:
    """One request for libraries; ``native`` is the folder with our sources, ``checkout`` gets the pointer."""

    checkout: Path
    cache: CacheDir
    kind: str
    gpu_targets: str | None = None
    extra_flags: tuple[str, ...] = ()

    @property
    def native(self) -> Path:
        return self.checkout / "native"

    @property
    def pointer(self) -> Path:
        return self.checkout / ".build" / "native.json"


def ensure(job: Job, environ: Mapping[str, str], probe: Probe | None = None) -> Path:
    """The finished library folder for the checkout's sources, built if need be, and the pointer to it."""
    probe = probe or Probe()
    upstream = Upstream.read(job.native / "upstream.json")
    compilers, plan = plan_of(job, upstream, environ, probe)
    library = job.cache.library(job.kind, plan.library_key(recipe.sources_hash(job.native)))
    if not library.exists():
        library = build(job, upstream, compilers, plan, environ)
    os.utime(library)
    text = json.dumps({"dir": str(library), "kind": job.kind}, indent=2) + "\n"
    if not job.pointer.is_file() or job.pointer.read_text(encoding="utf-8") != text:
        cachedir.write_text_atomic(job.pointer, text)
    return library


def plan_of(job: Job, upstream: Upstream, environ: Mapping[str, str], probe: Probe) -> tuple[Compilers, Recipe]:
    compilers = needs.find_compilers(environ, probe)
    if compilers is None:
        raise BuildError(needs.message(job.kind, needs.missing(job.kind, environ, job.cache.root, probe)))
    return compilers, recipe.make_recipe(
        job.kind, upstream, compilers, environ, job.gpu_targets, job.extra_flags, probe
    )


def build(job: Job, upstream: Upstream, compilers: Compilers, plan: Recipe, environ: Mapping[str, str]) -> Path:
    """Everything between the archive and the finished folder; holds the lock meanwhile."""
    lacks = needs.missing(job.kind, environ, job.cache.root)
    if lacks:
        raise BuildError(needs.message(job.kind, lacks))
    cache = job.cache
    try:
        cache.native.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cachedir.usage_error(cache.root, error) from error
    with cachedir.locked(cache.native / "lock", say) as lock_fd:
        tools = BuildTools(environ, compilers, cache, plan, lock_fd)
        step(4, f"llama.cpp of {upstream.package} {upstream.version}")
        archive = fetch.archive(cache, upstream, cache.native / "fetch.log", environ)
        source = fetch.source(cache, upstream, archive)
        tree = build_upstream(tools, source, UPSTREAM_TARGETS)
        step(6, "overlay libgufo")
        overlay = cache.overlay(plan.kind, plan.key)
        # Built from a copy: what is compiled is exactly what was hashed, even if a file is saved meanwhile,
        # and the path is the same for every checkout, so compiler caches and object files are shared.
        copied = sync_sources(job.native, overlay / "source")
        key = plan.library_key(recipe.sources_hash(copied))
        built = build_overlay(tools, job.native, overlay, source, tree)
        library = cache.library(plan.kind, key)

        def fill(target: Path) -> None:
            for path in sorted((tree / "bin").iterdir()):
                if _LIBRARIES.fullmatch(path.name):
                    cachedir.link_or_copy(path, target / path.name)
            shutil.copy2(built, target / built.name)
            smoke_test(target / built.name, plan.kind)
            info = {**asdict(plan), "upstream_key": plan.key, "library_key": key, "commit": upstream.commit}
            (target / "build.json").write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")

        step(7, str(library))
        cachedir.publish(library, fill)
        cachedir.forget_old_libraries(cache, keep=library)
    return library


@dataclass(frozen=True)
class BuildTools:
    """What both cmake projects are built with."""

    environ: Mapping[str, str]
    compilers: Compilers
    cache: CacheDir
    plan: Recipe
    lock_fd: int

    def env(self) -> dict[str, str]:
        env = dict(self.environ)
        # The compilers of the key, whatever cmake would pick by itself.
        env["CC"], env["CXX"] = " ".join(self.compilers.c), " ".join(self.compilers.cxx)
        env["NINJA_STATUS"] = "[%f/%t] "
        # Upstream's scripts ask git for a commit; the cache folder may lie inside somebody's repository.
        env["GIT_DIR"] = str(self.cache.native / "no-git-here")
        # A compiler cache that does not care where the cache folder lies, and never hands out objects
        # that were made with -march=native on another processor.
        env.setdefault("CCACHE_BASEDIR", str(self.cache.native))
        env.setdefault("CCACHE_NOHASHDIR", "1")
        env.setdefault("CCACHE_NAMESPACE", f"gufo-{self.plan.cpu}")
        if self.plan.kind == "hip":
            for variable, value in hiptools.rocm_variables(Probe()).items():
                env.setdefault(variable, value)
        elif self.plan.kind == "cuda" and not shutil.which("nvcc"):
            env["PATH"] = f"/usr/local/cuda/bin{os.pathsep}{env.get('PATH', '')}"
        return env

    def program(self, name: str) -> str:
        """cmake or ninja: of the virtual environment that runs this, else the system's."""
        own = Path(sys.executable).parent / name
        found = str(own) if own.is_file() else shutil.which(name)
        if found is None:
            raise BuildError(f"{name} is missing; `make native` installs it into .venv (or: pip install {name})")
        return found

    def configure(self, source: Path, tree: Path, flags: Sequence[str], label: str) -> None:
        """Run cmake unless the tree was configured completely before."""
        done = tree / ".configured"
        if done.exists():
            return
        (tree / "CMakeCache.txt").unlink(missing_ok=True)
        command = [self.program("cmake"), "-S", str(source), "-B", str(tree), "-G", "Ninja", *flags]
        command.append(f"-DCMAKE_MAKE_PROGRAM={self.program('ninja')}")
        tree.mkdir(parents=True, exist_ok=True)
        log, fds = tree / "build.log", (self.lock_fd,)
        run_logged(command, log, label, env=self.env(), summarize=_cmake_status, pass_fds=fds)
        done.touch()

    def ninja(self, tree: Path, targets: Sequence[str], label: str, rewrite: tuple[str, str] = ("", "")) -> None:
        command = [self.program("ninja"), "-C", str(tree), "-j", str(parallel_jobs()), *targets]
        run_logged(
            command,
            tree / "build.log",
            label,
            env=self.env(),
            summarize=_ninja_status,
            rewrite=(lambda line: line.replace(*rewrite)) if rewrite[0] else (lambda line: line),
            pass_fds=(self.lock_fd,),
            advice="Object files are kept: run make again to go on from here.",
        )


def build_upstream(tools: BuildTools, source: Path, targets: Sequence[str]) -> Path:
    """llama.cpp's build tree with the targets built; a finished tree is not touched again."""
    plan = tools.plan
    tree = tools.cache.upstream(plan.kind, plan.key)
    stamp = tree / "built.json"
    have = set(json.loads(stamp.read_text())) if stamp.is_file() else set()
    if have >= set(targets) and any((tree / "bin").glob("libllama.*")):
        step(5, f"llama.cpp for {plan.kind}: already built")
        return tree
    names = ", ".join(targets)
    step(5, f"building llama.cpp for {plan.kind} ({names}), {parallel_jobs()} files at a time; once per machine")
    tools.configure(source, tree, plan.flags, "configuring llama.cpp")
    tools.ninja(tree, targets, "llama.cpp")
    cachedir.write_text_atomic(stamp, json.dumps(sorted(have | set(targets))))
    return tree


def build_overlay(tools: BuildTools, native: Path, overlay: Path, source: Path, tree: Path) -> Path:
    """libgufo from the copied sources; compiler messages name the files in the checkout."""
    copied, out = overlay / "source", overlay / "build"
    flags = ["-DCMAKE_BUILD_TYPE=Release", f"-DGUFO_LLAMA_SOURCE={source}", f"-DGUFO_LLAMA_BUILD={tree}"]
    ccache = shutil.which("ccache")
    if ccache:
        flags.append(f"-DCMAKE_CXX_COMPILER_LAUNCHER={ccache}")
    if not list((copied / "src").glob("*.cpp")):
        raise BuildError(f"{native / 'src'} holds no .cpp file")
    tools.configure(copied, out, flags, "configuring libgufo")
    tools.ninja(out, ("gufo",), "libgufo", rewrite=(str(copied), str(native)))
    return next(p for p in (out / "bin").iterdir() if p.name.startswith("libgufo."))


def sync_sources(native: Path, target: Path) -> Path:
    """Make ``target`` hold exactly the overlay's files; a file that did not change keeps its time."""
    wanted = recipe.overlay_files(native)
    for relative in wanted:
        content, path = (native / relative).read_bytes(), target / relative
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    for relative in set(recipe.overlay_files(target)) - set(wanted):
        (target / relative).unlink()
    return target


def smoke_test(library: Path, kind: str) -> None:
    """Load the finished library in a fresh process, with every symbol resolved.

    Not for kinds whose driver library need not exist on the machine that builds.
    """
    if kind not in ("cpu", "metal"):
        return
    program = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).gufo_abi_version())"
    done = subprocess.run(
        [sys.executable, "-c", program, str(library)],
        env={**os.environ, "LD_BIND_NOW": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0 or not done.stdout.strip().isdigit():
        raise BuildError(f"{library.name} was built but does not load:\n{done.stderr.strip()}")


def parallel_jobs(n_cpu: int | None = None, free_bytes: int | None = None) -> int:
    """One job per processor we may use, but no more than one per 1.5 GiB of free memory."""
    if n_cpu is None:
        n_cpu = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if free_bytes is None:
        free_bytes = free_memory_bytes()
    if free_bytes is None:
        return max(1, n_cpu)
    return max(1, min(n_cpu, int(free_bytes / (_GIB_PER_JOB * 2**30))))


def free_memory_bytes(root: Path = Path("/")) -> int | None:
    """Memory that can be had now: the machine's, or what the control group leaves; None if unknown."""
    free: int | None = None
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    except OSError:
        return None
    try:
        limit = (root / "sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            left = int(limit) - int((root / "sys/fs/cgroup/memory.current").read_text())
            # The group is charged for cached files too, which the kernel gives back when asked.
            stat = dict(line.split() for line in (root / "sys/fs/cgroup/memory.stat").read_text().splitlines())
            left += int(stat.get("inactive_file", "0"))
            free = left if free is None else min(free, left)
    except (OSError, ValueError):
        pass
    return free


def cmake_is_usable(probe: Probe, name: str = "cmake") -> bool:
    return probe.which(name) is not None and needs.version_in(probe.run([name, "--version"])[1]) >= MIN_CMAKE


def _ninja_status(line: str) -> str | None:
    found = re.match(r"\[(\d+)/(\d+)\] (.*)", line)
    if not found:
        return None
    n_done, n_all, what = int(found[1]), int(found[2]), found[3].strip()
    return f"{100 * n_done // n_all:3d} %  {n_done}/{n_all}  {what.rsplit('/', 1)[-1].removesuffix('.o')}"


def _cmake_status(line: str) -> str | None:
    return line.strip()[3:80] if line.startswith("-- ") else None
