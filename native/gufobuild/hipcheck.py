"""Compiles the device code of the pinned HIP backend for a GPU that need not be here, and looks at the result.

llama.cpp's HIP backend is its CUDA sources compiled as HIP.  The quick form takes every base source and
one instance of each family of template instances; ``every`` takes all that a default build compiles.

    sources ► one object each, cached under a key of everything that decides its bytes ► ELF header, kernels

Device code alone: the host part needs the whole of ROCm to link.  That it compiles says nothing about
whether it computes the right thing; only a GPU can.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import amdgpu
from .amdgpu import CodeObject
from .errors import BuildError
from .hiptools import Toolchain

_INSTANCE = re.compile(r"(?P<family>.+)-instance-(?P<variant>.+)\.cu")
# Which instance stands for its family: what Flash-Next's head size and the usual quantisation use.
_PREFERRED = {"fattn-tile": "dkq256-dv256", "fattn-vec": "f16-f16", "mmq": "q8_0"}
_VECTOR_FAMILY = "fattn-vec"
_DEFINES = ("__HIP_PLATFORM_AMD__=1", "GGML_USE_HIP", "GGML_HIP_GRAPHS", "GGML_HIP_NO_VMM", "NDEBUG")
_BUILD_DEFINES = ("GGML_BACKEND_BUILD", "GGML_BACKEND_SHARED", "GGML_SHARED", "_GNU_SOURCE", "_XOPEN_SOURCE=600")


@dataclass(frozen=True)
class Backend:
    """The CUDA/HIP sources inside an unpacked llama.cpp; ``identity`` names that release."""

    ggml: Path
    identity: str

    @property
    def folder(self) -> Path:
        return self.ggml / "src" / "ggml-cuda"

    def base(self) -> list[Path]:
        return sorted(self.folder.glob("*.cu"))

    def instances(self) -> list[Path]:
        """The template instances of a default build: of the vector family only the chosen type pairs."""
        chosen = set(self.attention_pairs())
        found = sorted((self.folder / "template-instances").glob("*.cu"))
        return [p for p in found if (m := _INSTANCE.fullmatch(p.name)) and _wanted(m, chosen)]

    def attention_pairs(self) -> list[str]:
        """The default K-V type pairs of flash attention's vector kernels, as llama.cpp's build has them."""
        text = (self.ggml / "CMakeLists.txt").read_text(encoding="utf-8")
        found = re.search(r"GGML_CUDA_FA_QUANTS\s+\"([a-z0-9_;,-]+)\"", text)
        if found is None:
            raise BuildError(f"{self.ggml / 'CMakeLists.txt'} sets no GGML_CUDA_FA_QUANTS; the recipe is out of date")
        return re.split("[;,]", found[1])

    def sources(self, every: bool) -> list[Path]:
        """What is compiled, base sources first."""
        base = self.base()
        if not base:
            raise BuildError(f"{self.folder} holds no .cu file")
        instances = self.instances()
        return base + (instances if every else one_per_family(instances))

    def defines(self) -> list[str]:
        """The definitions of llama.cpp's own HIP build; which type pairs exist decides what fattn.cu calls."""
        pairs = self.attention_pairs()
        names = (_INSTANCE.fullmatch(p.name) for p in (self.folder / "template-instances").glob("*.cu"))
        all_pairs = sorted(m["variant"] for m in names if m and m["family"] == _VECTOR_FAMILY)
        switches = [f"GGML_CUDA_FA_{p.replace('-', '_').upper()}={int(p in pairs)}" for p in all_pairs]
        return [*_DEFINES, *_BUILD_DEFINES, f'GGML_CUDA_FA_QUANTS="{",".join(pairs)}"', *switches]


def _wanted(match: re.Match[str], pairs: set[str]) -> bool:
    return match["family"] != _VECTOR_FAMILY or match["variant"] in pairs


def one_per_family(instances: Sequence[Path]) -> list[Path]:
    """One instance of each template family: the preferred one, else the first by name."""
    families: dict[str, list[Path]] = {}
    for path in sorted(instances):
        match = _INSTANCE.fullmatch(path.name)
        if match is not None:
            families.setdefault(match["family"], []).append(path)
    chosen = []
    for family, members in sorted(families.items()):
        wanted = f"{family}-instance-{_PREFERRED.get(family)}.cu"
        chosen.append(next((p for p in members if p.name == wanted), members[0]))
    return chosen


@dataclass(frozen=True)
class Task:
    """One object to make: the whole command but for the output's name, and the key of its bytes."""

    source: Path
    target: str
    command: tuple[str, ...]
    key: str

    @property
    def name(self) -> str:
        return f"{self.source.stem} ({self.target})"


def plan(backend: Backend, tools: Toolchain, targets: Sequence[str], every: bool = False) -> list[Task]:
    """The tasks for these targets; pure but for listing the sources."""
    defines = [f"-D{d}" for d in backend.defines()]
    folders = (backend.folder, backend.folder.parent, backend.ggml / "include")
    shared = ["-O3", "-std=gnu++17", "-fPIC", "-w", *defines]
    tasks = []
    for target in targets:
        fixed = ["-x", "hip", f"--offload-arch={target}", "--offload-device-only", "--no-gpu-bundle-output", *shared]
        for source in backend.sources(every):
            relative = source.relative_to(backend.ggml).as_posix()
            key = object_key(backend.identity, tools.key, relative, fixed)
            includes = [part for folder in folders for part in ("-I", str(folder))]
            command = (str(tools.clang), *fixed, *tools.options, *includes, "-c", str(source))
            tasks.append(Task(source, target, command, key))
    return tasks


def object_key(identity: str, tools: str, source: str, flags: Sequence[str]) -> str:
    """Release, toolchain, source and flags; folders do not count, so a moved cache stays valid."""
    text = json.dumps([identity, tools, source, list(flags)])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Result:
    """``fault`` is why this is no code for the target, empty when it is."""

    task: Task
    found: CodeObject | None
    fault: str
    cached: bool


Told = Callable[[Result], None]
"""Called once for each finished task, in the order they finish."""


def judge(task: Task, data: bytes, cached: bool) -> Result:
    """Whether an object is code for the task's target."""
    try:
        found = amdgpu.read_code_object(data)
    except BuildError as error:
        return Result(task, None, str(error), cached)
    fault = "" if found.target == task.target else f"carries {found.target}, not {task.target}"
    return Result(task, found, fault, cached)


def check(
    tasks: Sequence[Task],
    objects: Path,
    env: Mapping[str, str],
    n_jobs: int,
    told: Told = lambda result: None,
) -> list[Result]:
    """Compile what the cache lacks, ``n_jobs`` at a time, and judge every object; in the tasks' order."""
    objects.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(n_jobs) as pool:
        futures = [pool.submit(_make, task, objects / f"{task.key}.o", env) for task in tasks]
        try:
            for future in concurrent.futures.as_completed(futures):
                told(future.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in futures]


def _make(task: Task, path: Path, env: Mapping[str, str]) -> Result:
    if path.is_file():
        return judge(task, path.read_bytes(), cached=True)
    temporary = path.with_suffix(".tmp")
    done = subprocess.run([*task.command, "-o", str(temporary)], env=dict(env), capture_output=True, text=True)
    if done.returncode != 0:
        temporary.unlink(missing_ok=True)
        lines = done.stderr.strip().splitlines()
        shown = "\n".join(lines[:20]) or f"exit status {done.returncode}"
        return Result(task, None, f"does not compile:\n{shown}", cached=False)
    result = judge(task, temporary.read_bytes(), cached=False)
    # Only what passed is kept: a wrong object should be looked at again, not remembered.
    if result.fault:
        temporary.unlink()
    else:
        temporary.replace(path)
    return result


def input_hazard(text: str) -> str:
    """Why inputs may be overwritten while an integrated GPU still reads them, "" = they are not.

    ``text`` is ggml-cuda.cu.  A device marked as integrated computes straight from pinned host memory, which the
    next micro-batch writes without waiting: other requests' text in answers (llama.cpp issues 25992, 28211).  The
    pinned release marks none; a later one that does needs a wait of ours between passes first.
    """
    values = re.findall(r"\.integrated\s*=\s*([^;]+);", text)
    if not values:
        return "ggml-cuda.cu no longer says which devices are integrated: read how it shares inputs with them"
    on = [v.strip() for v in values if v.strip() != "false"]
    return f"integrated GPUs read inputs in host memory (integrated = {on[0]}) while the next are written" if on else ""


def summary(results: Sequence[Result], targets: Sequence[str]) -> str:
    """One line for each target and one for each fault."""
    lines = []
    for target in targets:
        mine = [r for r in results if r.task.target == target]
        good = [r.found for r in mine if not r.fault and r.found is not None]
        kernels = {name for found in good for name in found.kernels}
        size = sum(found.n_bytes for found in good)
        cached = sum(r.cached for r in mine)
        lines.append(
            f"{len(good)} of {len(mine)} objects carry {target}: {len(kernels):,} kernels, {size / 2**20:.1f} MiB"
            f" ({cached} from the cache)"
        )
    lines += [f"{r.task.name}: {r.fault}" for r in results if r.fault]
    return "\n".join(lines)
