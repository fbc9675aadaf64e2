"""What must be on the system before anything is downloaded or compiled, named in one message.

All needs are probed and every missing one is listed with its remedy: being sent back three times for
three packages was the thing to avoid.  cmake and ninja are no needs: they come from the Python
package index when the system's are missing or too old.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

KINDS = ("cpu", "cuda", "hip", "vulkan", "metal")
MIN_HIP = (6, 1)
MIN_CMAKE = (3, 21)
_CPP17_PROGRAM = "#include <filesystem>\n#include <optional>\nint main() { if constexpr (sizeof(int) > 1) return 0; }\n"
_VULKAN_PROGRAM = "#include <vulkan/vulkan.h>\n"
_HIP_REMEDY = "(Debian 14, Ubuntu 26.04: apt install hipcc libamdhip64-dev libhipblas-dev librocblas-dev)"
# Source, objects and libraries; measured 0.3 GiB for cpu, about 1.5 GiB for one GPU architecture.
_FREE_GIB = {"cpu": 1.0, "metal": 1.0}
_FREE_GIB_GPU = 3.0


class Probe:
    """What the checks ask the system; tests put another one in its place."""

    platform = sys.platform

    def which(self, name: str) -> str | None:
        return shutil.which(name)

    def run(self, command: Sequence[str], stdin: str = "") -> tuple[int, str]:
        """Exit status and output (both streams); 127 when the program cannot be started."""
        try:
            done = subprocess.run(
                command, input=stdin, text=True, errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        except OSError as error:
            return 127, str(error)
        return done.returncode, done.stdout

    def has_module(self, name: str) -> bool:
        return importlib.util.find_spec(name) is not None

    def free_bytes(self, folder: Path) -> int:
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free


@dataclass(frozen=True)
class Compilers:
    """The commands cmake will be told to use."""

    c: tuple[str, ...]
    cxx: tuple[str, ...]


def find_compilers(environ: Mapping[str, str], probe: Probe) -> Compilers | None:
    """CC and CXX when set, else the usual names; None when one of the two is missing."""

    def pick(variable: str, names: Sequence[str]) -> tuple[str, ...] | None:
        if environ.get(variable):
            command = tuple(shlex.split(environ[variable]))
            return command if command and probe.which(command[0]) else None
        return next(((path,) for name in names if (path := probe.which(name))), None)

    c, cxx = pick("CC", ("cc", "gcc", "clang")), pick("CXX", ("c++", "g++", "clang++"))
    return None if c is None or cxx is None else Compilers(c, cxx)


def version_in(text: str) -> tuple[int, ...]:
    """The first dotted number of a text, as a tuple; empty when there is none."""
    found = re.search(r"\d+(?:\.\d+)+", text)
    return tuple(map(int, found.group().split("."))) if found else ()


def find_program(name: str, probe: Probe) -> str | None:
    """A ROCm program: in PATH, else where AMD's packages put it without adding that to PATH."""
    return next((c for c in (name, f"/opt/rocm/bin/{name}") if probe.which(c)), None)


def missing(kind: str, environ: Mapping[str, str], cache: Path, probe: Probe | None = None) -> list[str]:
    """Everything this system lacks for a build of ``kind``; empty = ready."""
    probe = probe or Probe()
    lacks: list[str] = []
    if not (probe.has_module("venv") and probe.has_module("ensurepip")):
        lacks.append("the Python module venv with pip (Debian and Ubuntu: apt install python3-venv)")
    lacks += _compiler_needs(environ, probe)
    lacks += {"cuda": _cuda, "hip": _hip, "vulkan": _vulkan, "metal": _metal}.get(kind, lambda e, p: [])(environ, probe)
    need = _FREE_GIB.get(kind, _FREE_GIB_GPU)
    free = probe.free_bytes(cache) / 2**30
    if free < need:
        lacks.append(f"{need:.0f} GiB of free disk for {cache}, which has {free:.1f} (GUFO_CACHE_DIR moves it)")
    return lacks


def message(kind: str, lacks: Sequence[str]) -> str:
    lines = "\n".join(f"  - {item}" for item in lacks)
    return f"This system lacks what a build of kind '{kind}' needs:\n{lines}\nInstall these, then run make again."


def _compiler_needs(environ: Mapping[str, str], probe: Probe) -> list[str]:
    remedy = "(Debian, Ubuntu: apt install build-essential; Fedora: dnf install gcc-c++; macOS: xcode-select --install)"
    found = find_compilers(environ, probe)
    if found is None:
        return [f"a C and a C++17 compiler {remedy}"]
    status, output = probe.run([*found.cxx, "-std=c++17", "-fsyntax-only", "-x", "c++", "-"], _CPP17_PROGRAM)
    if status != 0:
        first = output.strip().splitlines()[0] if output.strip() else f"exit status {status}"
        return [f"a C++17 compiler; {' '.join(found.cxx)} cannot compile a small C++17 program: {first} {remedy}"]
    return []


def _can_include(compiler: str, headers: Sequence[str], suffix: str, probe: Probe) -> bool:
    """Whether the GPU compiler finds these headers; a file, because nvcc reads no standard input."""
    with tempfile.TemporaryDirectory(prefix="gufo-needs-") as folder:
        file = Path(folder) / f"probe{suffix}"
        file.write_text("".join(f"#include <{header}>\n" for header in headers))
        return probe.run([compiler, "-E", str(file)])[0] == 0


def _cuda(environ: Mapping[str, str], probe: Probe) -> list[str]:
    nvcc = next((c for c in ("nvcc", "/usr/local/cuda/bin/nvcc") if probe.which(c)), None)
    if nvcc is None:
        return ["the CUDA toolkit: nvcc is not in PATH"]
    if not _can_include(nvcc, ("cublas_v2.h",), ".cu", probe):
        return [f"the CUDA toolkit's cuBLAS development files: {nvcc} does not find cublas_v2.h"]
    return []


def _hip(environ: Mapping[str, str], probe: Probe) -> list[str]:
    need = ".".join(map(str, MIN_HIP))
    config, hipcc = find_program("hipconfig", probe), find_program("hipcc", probe)
    if config is None or hipcc is None:
        return [f"ROCm {need} or newer: no hipcc and hipconfig in PATH or /opt/rocm/bin {_HIP_REMEDY}"]
    version = version_in(probe.run([config, "--version"])[1])
    if version < MIN_HIP:
        return [f"ROCm {need} or newer: {config} says {'.'.join(map(str, version)) or 'no version'}"]
    if not _can_include(hipcc, ("hipblas/hipblas.h", "rocblas/rocblas.h"), ".hip", probe):
        return [f"the development files of hipBLAS and rocBLAS: {hipcc} does not find their headers {_HIP_REMEDY}"]
    return []


def _vulkan(environ: Mapping[str, str], probe: Probe) -> list[str]:
    lacks = []
    if not probe.which("glslc"):
        lacks.append("the shader compiler glslc (Debian and Ubuntu: apt install glslc)")
    found = find_compilers(environ, probe)
    if found and probe.run([*found.cxx, "-fsyntax-only", "-x", "c++", "-"], _VULKAN_PROGRAM)[0] != 0:
        lacks.append("the Vulkan and SPIR-V headers (Debian and Ubuntu: apt install libvulkan-dev spirv-headers)")
    return lacks


def _metal(environ: Mapping[str, str], probe: Probe) -> list[str]:
    return [] if probe.platform == "darwin" else ["macOS: Metal exists nowhere else"]
