"""What is built, and the keys that say when two builds are the same.

Two layers, so that editing our own sources never recompiles llama.cpp:

    upstream key = release + sha256, build kind, cmake flags, compilers, toolkit, CPU features
    library key  = upstream key + hash of native/{CMakeLists.txt,include,src}

CPU features belong to the key because llama.cpp is compiled for the machine at hand
(``-march=native``): a cache folder on a shared disk must not hand one machine's instructions to another.
Hashing llama.cpp's tree was rejected: the release is pinned by the sha256 of its archive.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .errors import BuildError
from .needs import KINDS, Compilers, Probe

SCHEMA = 1
"""Raise it when the steps of a build change in a way that the fields below do not show."""
DEFAULT_GPU_TARGETS = {"hip": "gfx1151"}
_FLAG_VARIABLES = ("CFLAGS", "CXXFLAGS", "LDFLAGS", "CUDAFLAGS", "HIPFLAGS", "CUDAARCHS")
_OVERLAY_SUFFIXES = (".cpp", ".h", ".hpp", ".txt")


@dataclass(frozen=True)
class Upstream:
    """The pinned release, as native/upstream.json says it."""

    package: str
    version: str
    sha256: str
    source: str
    commit: str

    @classmethod
    def read(cls, path: Path) -> Upstream:
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    @property
    def archive(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}.tar.gz"


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the bytes of the upstream libraries."""

    kind: str
    upstream_version: str
    upstream_sha256: str
    flags: tuple[str, ...]
    compiler: str
    toolkit: str
    cpu: str
    variables: tuple[tuple[str, str], ...]
    schema: int = SCHEMA

    @property
    def key(self) -> str:
        return _digest(asdict(self))

    def library_key(self, sources_hash: str) -> str:
        return _digest({"upstream": self.key, "sources": sources_hash})


def cmake_flags(kind: str, gpu_targets: str | None, extra: Sequence[str], upstream: Upstream) -> tuple[str, ...]:
    """The cmake definitions of one build kind; ``extra`` comes last and wins."""
    if kind not in KINDS:
        raise BuildError(f"unknown build kind '{kind}': BACKEND is one of {', '.join(KINDS)}")
    origin = "@loader_path" if sys.platform == "darwin" else "$ORIGIN"
    flags = {
        "CMAKE_BUILD_TYPE": "Release",
        "BUILD_SHARED_LIBS": "ON",
        # Libraries find each other in their own folder, wherever that lies.
        "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
        "CMAKE_INSTALL_RPATH": origin,
        "LLAMA_BUILD_COMMON": "ON",
        # Tools are configured so that `--tools` can build one later; nothing of them is built by default.
        "LLAMA_BUILD_TOOLS": "ON",
        "LLAMA_BUILD_SERVER": "ON",
        "LLAMA_BUILD_TESTS": "OFF",
        "LLAMA_BUILD_EXAMPLES": "OFF",
        "LLAMA_BUILD_APP": "OFF",
        "LLAMA_BUILD_UI": "OFF",
        "LLAMA_USE_PREBUILT_UI": "OFF",
        "LLAMA_OPENSSL": "OFF",
        # The archive is no git checkout; without these the commit would be read from whatever lies above it.
        "LLAMA_BUILD_COMMIT": upstream.commit,
        "LLAMA_BUILD_NUMBER": "0",
    }
    targets = gpu_targets or DEFAULT_GPU_TARGETS.get(kind)
    flags["GGML_METAL"] = "ON" if kind == "metal" else "OFF"
    if kind == "cuda":
        flags |= {"GGML_CUDA": "ON", "GGML_CUDA_NCCL": "OFF"}
        if targets:
            flags["CMAKE_CUDA_ARCHITECTURES"] = targets
    elif kind == "hip":
        # ROCm's own packages put its libraries into /opt/rocm/lib, where the loader does not look by itself.
        flags |= {"GGML_HIP": "ON", "GPU_TARGETS": str(targets), "CMAKE_INSTALL_RPATH_USE_LINK_PATH": "ON"}
    elif kind == "vulkan":
        flags["GGML_VULKAN"] = "ON"
    elif kind == "metal":
        flags["GGML_METAL_EMBED_LIBRARY"] = "ON"
    return (*(f"-D{name}={value}" for name, value in flags.items()), *extra)


def make_recipe(
    kind: str,
    upstream: Upstream,
    compilers: Compilers,
    environ: Mapping[str, str],
    gpu_targets: str | None = None,
    extra: Sequence[str] = (),
    probe: Probe | None = None,
) -> Recipe:
    probe = probe or Probe()
    flags = cmake_flags(kind, gpu_targets, extra, upstream)
    native = not any(flag.upper() in ("-DGGML_NATIVE=OFF", "-DGGML_NATIVE=0") for flag in extra)
    return Recipe(
        kind=kind,
        upstream_version=upstream.version,
        upstream_sha256=upstream.sha256,
        flags=flags,
        compiler=compiler_id(compilers, probe),
        toolkit=toolkit_id(kind, probe),
        cpu=cpu_features(compilers, probe) if native else platform.machine(),
        variables=tuple((name, environ[name]) for name in _FLAG_VARIABLES if environ.get(name)),
    )


def compiler_id(compilers: Compilers, probe: Probe) -> str:
    """Version line and target of both compilers."""
    parts = []
    for command in (compilers.c, compilers.cxx):
        line = probe.run([*command, "--version"])[1].strip().splitlines()[:1]
        target = probe.run([*command, "-dumpmachine"])[1].strip()
        parts.append(f"{Path(command[0]).name} {' '.join(command[1:])} {' '.join(line)} {target}")
    return "; ".join(parts)


def toolkit_id(kind: str, probe: Probe) -> str:
    """Version of the GPU toolkit of a kind; empty where there is none."""
    commands = {
        "cuda": (("nvcc", "--version"), ("/usr/local/cuda/bin/nvcc", "--version")),
        "hip": (("hipconfig", "--version"), ("/opt/rocm/bin/hipconfig", "--version")),
        "vulkan": (("glslc", "--version"),),
    }
    for command in commands.get(kind, ()):
        if probe.which(command[0]):
            return probe.run(command)[1].strip()
    return ""


def cpu_features(compilers: Compilers, probe: Probe) -> str:
    """What ``-march=native`` means here, as a short text.

    The compiler is asked for its predefined macros: they name exactly the instruction sets it may use,
    while the kernel's list of CPU flags changes with every kernel.
    """
    for option in ("-march=native", "-mcpu=native"):
        status, macros = probe.run([*compilers.cxx, option, "-dM", "-E", "-x", "c++", "-"])
        if status == 0:
            text = "\n".join(sorted(macros.splitlines()))
            break
    else:
        text = platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def overlay_files(native: Path) -> list[Path]:
    """The files of the overlay that a build reads, as sorted paths relative to ``native``."""
    found: Iterable[Path] = [native / "CMakeLists.txt", *(native / "include").rglob("*"), *(native / "src").rglob("*")]
    return sorted(p.relative_to(native) for p in found if p.is_file() and p.suffix in _OVERLAY_SUFFIXES)


def sources_hash(native: Path) -> str:
    """Hash over names and contents of the overlay's files; times do not count."""
    total = hashlib.sha256()
    for relative in overlay_files(native):
        content = hashlib.sha256((native / relative).read_bytes()).hexdigest()
        total.update(f"{relative.as_posix()} {content}\n".encode())
    return total.hexdigest()


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
