"""When two native builds are the same: the keys over recipe and sources, and what is missing on a system."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "native"))

from gufobuild import native, needs, recipe  # noqa: E402
from gufobuild.errors import BuildError  # noqa: E402

UPSTREAM = recipe.Upstream("llama-cpp-python", "0.3.36", "ab" * 32, "vendor/llama.cpp", "0c1e57098")


class FakeSystem(needs.Probe):
    """A system with these programs; every program prints its given text."""

    def __init__(self, programs: dict[str, str], modules: Sequence[str] = ("venv", "ensurepip"), free_gib: int = 50):
        self.programs, self.modules, self.free_gib = programs, modules, free_gib
        self.failing: set[str] = set()
        self.platform = "linux"

    def which(self, name: str) -> str | None:
        return name if name in self.programs else None

    def run(self, command: Sequence[str], stdin: str = "") -> tuple[int, str]:
        if command[0] not in self.programs or command[0] in self.failing:
            return 1, "error: unrecognized option\nsecond line"
        return 0, self.programs[command[0]]

    def has_module(self, name: str) -> bool:
        return name in self.modules

    def free_bytes(self, folder: Path) -> int:
        return self.free_gib * 2**30


def system(**more: str) -> FakeSystem:
    return FakeSystem({"cc": "cc (Debian) 12.2.0", "c++": "c++ (Debian) 12.2.0", **more})


def make(kind: str = "cpu", probe: FakeSystem | None = None, environ: dict[str, str] | None = None, **options):
    probe = probe or system()
    compilers = needs.find_compilers(environ or {}, probe)
    assert compilers is not None
    return recipe.make_recipe(kind, UPSTREAM, compilers, environ or {}, probe=probe, **options)


def test_key_is_a_function_of_its_inputs() -> None:
    assert make().key == make().key
    assert make("hip", system(hipconfig="6.4.0")).key == make("hip", system(hipconfig="6.4.0")).key


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: make("vulkan"), id="kind"),
        pytest.param(lambda: make(extra=("-DGGML_OPENMP=OFF",)), id="flags"),
        pytest.param(lambda: make(extra=("-DGGML_NATIVE=OFF",)), id="native"),
        pytest.param(lambda: make(probe=FakeSystem({"cc": "cc 13.1", "c++": "c++ 13.1"})), id="compiler"),
        pytest.param(lambda: make(environ={"CXXFLAGS": "-O1"}), id="variables"),
        pytest.param(lambda: replace(make(), upstream_version="0.3.37"), id="release"),
        pytest.param(lambda: replace(make(), upstream_sha256="cd" * 32), id="archive"),
        pytest.param(lambda: replace(make(), cpu="x86_64-0000"), id="cpu"),
        pytest.param(lambda: replace(make(), toolkit="13.0"), id="toolkit"),
    ],
)
def test_everything_that_decides_the_bytes_is_in_the_key(other) -> None:
    assert other().key != make().key


def test_cpu_features_are_what_the_compiler_says_of_native() -> None:
    plain, wide = system(), system()
    wide.programs = {**wide.programs, "c++": "#define __AVX512F__ 1"}
    assert make(probe=plain).cpu != make(probe=wide).cpu
    # Portable code does not depend on this machine's processor, whatever the compiler says of it.
    portable = {"extra": ("-DGGML_NATIVE=OFF",)}
    assert make(probe=plain, **portable).cpu == make(probe=wide, **portable).cpu


def test_gpu_targets() -> None:
    hip = system(hipconfig="6.4.0")
    assert "-DGPU_TARGETS=gfx1151" in make("hip", hip).flags
    assert "-DGPU_TARGETS=gfx1100" in make("hip", hip, gpu_targets="gfx1100").flags
    # The loader does not search /opt/rocm/lib by itself; libggml-hip has to name it.
    assert "-DCMAKE_INSTALL_RPATH_USE_LINK_PATH=ON" in make("hip", hip).flags
    cuda = system(nvcc="12.8")
    assert not any("ARCHITECTURES" in flag for flag in make("cuda", cuda).flags), "cuda takes the GPUs it finds"
    assert "-DCMAKE_CUDA_ARCHITECTURES=90" in make("cuda", cuda, gpu_targets="90").flags
    with pytest.raises(BuildError, match="cpu, cuda, hip, vulkan, metal"):
        recipe.cmake_flags("rocm", None, (), UPSTREAM)


def test_the_users_flags_come_last_and_win() -> None:
    assert make(extra=("-DLLAMA_OPENSSL=ON",)).flags[-1] == "-DLLAMA_OPENSSL=ON"


@pytest.fixture
def overlay(tmp_path: Path) -> Path:
    native = tmp_path / "native"
    for name, text in {"CMakeLists.txt": "project(x)", "include/gufo.h": "int f();", "src/a.cpp": "int f(){}"}.items():
        (native / name).parent.mkdir(parents=True, exist_ok=True)
        (native / name).write_text(text)
    return native


def test_sources_hash_sees_contents_and_names_but_not_times(overlay: Path) -> None:
    first = recipe.sources_hash(overlay)
    os.utime(overlay / "src" / "a.cpp", (1, 1))
    (overlay / "notes.md").write_text("not compiled")
    (overlay / "src" / "a.cpp.orig").write_text("not compiled")
    assert recipe.sources_hash(overlay) == first

    seen = {first}
    (overlay / "src" / "a.cpp").write_text("int f(){ }")
    seen.add(recipe.sources_hash(overlay))
    (overlay / "src" / "a.cpp").rename(overlay / "src" / "b.cpp")
    seen.add(recipe.sources_hash(overlay))
    (overlay / "include" / "gufo.h").write_text("long f();")
    seen.add(recipe.sources_hash(overlay))
    (overlay / "CMakeLists.txt").write_text("project(y)")
    seen.add(recipe.sources_hash(overlay))
    assert len(seen) == 5


def test_our_sources_change_the_library_key_alone(overlay: Path) -> None:
    plan = make()
    before = plan.library_key(recipe.sources_hash(overlay))
    (overlay / "src" / "a.cpp").write_text("int g(){}")
    assert plan.library_key(recipe.sources_hash(overlay)) != before
    assert make().key == plan.key


def test_copied_sources_keep_their_times_unless_they_changed(overlay: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    (overlay / "src" / "gone.cpp").write_text("int old;")
    native.sync_sources(overlay, target)
    for path in target.rglob("*.*"):
        os.utime(path, (1, 1))
    (overlay / "src" / "gone.cpp").unlink()
    (overlay / "src" / "new.cpp").write_text("int n;")
    (overlay / "include" / "gufo.h").write_text("long f();")
    native.sync_sources(overlay, target)
    times = {p.relative_to(target).as_posix(): p.stat().st_mtime for p in target.rglob("*.*")}
    assert times.pop("src/new.cpp") > 1 and times.pop("include/gufo.h") > 1
    assert times == {"CMakeLists.txt": 1, "src/a.cpp": 1}
    assert recipe.sources_hash(target) == recipe.sources_hash(overlay)


# -- system needs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "programs"),
    [("cpu", {}), ("cuda", {"nvcc": "12"}), ("hip", {"hipcc": "", "hipconfig": "6.1.0"}), ("vulkan", {"glslc": ""})],
)
def test_a_complete_system_lacks_nothing(kind: str, programs: dict[str, str], tmp_path: Path) -> None:
    assert needs.missing(kind, {}, tmp_path, system(**programs)) == []


def test_all_needs_are_named_in_one_message(tmp_path: Path) -> None:
    bare = FakeSystem({}, modules=("venv",), free_gib=0)
    lacks = needs.missing("hip", {}, tmp_path, bare)
    text = needs.message("hip", lacks)
    assert len(lacks) == 4
    for word in ("'hip'", "python3-venv", "C++17 compiler", "build-essential", "ROCm 6.1", "free disk", str(tmp_path)):
        assert word in text


@pytest.mark.parametrize(
    ("kind", "programs", "expected"),
    [
        ("cuda", {}, "nvcc"),
        ("hip", {"hipcc": ""}, "hipconfig"),
        ("hip", {"hipcc": "", "hipconfig": "5.7.31921"}, "5.7.31921"),
        ("vulkan", {}, "glslc"),
        ("metal", {}, "macOS"),
    ],
)
def test_each_kind_names_its_own_needs(kind: str, programs: dict[str, str], expected: str, tmp_path: Path) -> None:
    lacks = needs.missing(kind, {}, tmp_path, system(**programs))
    assert len(lacks) == 1 and expected in lacks[0]


@pytest.mark.parametrize(
    ("kind", "compiler", "header"), [("cuda", "nvcc", "cublas_v2.h"), ("hip", "hipcc", "hipBLAS and rocBLAS")]
)
def test_a_toolkit_without_its_libraries_is_incomplete(kind: str, compiler: str, header: str, tmp_path: Path) -> None:
    bare = system(**{compiler: "", "hipconfig": "6.4"})
    bare.failing.add(compiler)
    (lack,) = needs.missing(kind, {}, tmp_path, bare)
    assert header in lack


def test_a_compiler_that_is_too_old_is_shown_with_its_complaint(tmp_path: Path) -> None:
    old = system()
    old.failing.add("c++")
    (lack,) = needs.missing("cpu", {}, tmp_path, old)
    assert "C++17" in lack and "unrecognized option" in lack and "second line" not in lack


def test_compilers_named_by_the_user_are_taken_or_missed() -> None:
    probe = system(**{"clang++-19": "", "clang-19": ""})
    found = needs.find_compilers({"CC": "clang-19 -m64", "CXX": "clang++-19"}, probe)
    assert found == needs.Compilers(("clang-19", "-m64"), ("clang++-19",))
    assert needs.find_compilers({"CXX": "no-such-compiler"}, probe) is None


@pytest.mark.parametrize(
    ("n_cpu", "free_gib", "jobs"), [(16, 64, 16), (16, 6, 4), (2, 0.5, 1), (8, 1.4, 1), (8, None, 8)]
)
def test_parallel_jobs_fit_the_memory(n_cpu: int, free_gib: float | None, jobs: int, monkeypatch) -> None:
    monkeypatch.setattr(native, "free_memory_bytes", lambda: None)
    assert native.parallel_jobs(n_cpu, None if free_gib is None else int(free_gib * 2**30)) == jobs


def test_free_memory_respects_the_control_group(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    group = tmp_path / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 64 kB\nMemAvailable:    4096 kB\n")
    assert native.free_memory_bytes(tmp_path) == 4096 * 1024
    (group / "memory.max").write_text("max\n")
    assert native.free_memory_bytes(tmp_path) == 4096 * 1024
    (group / "memory.max").write_text("3000\n")
    (group / "memory.current").write_text("2500\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 400\n")
    assert native.free_memory_bytes(tmp_path) == 900
    assert native.free_memory_bytes(tmp_path / "nothing") is None
