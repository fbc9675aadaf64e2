"""`make check-hip` without a compiler: what ELF headers and bundles say, what is compiled, what the keys see."""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "native"))

import check_hip  # noqa: E402
from gufobuild import amdgpu, debian, hipcheck, hiptools  # noqa: E402
from gufobuild.errors import BuildError  # noqa: E402
from gufobuild.hiptools import Toolchain  # noqa: E402
from gufobuild.needs import Probe  # noqa: E402

GFX1151, GFX1100 = 0x4A, 0x41


def code_object(mach: int = GFX1151, kernels: tuple[str, ...] = ("k",), machine: int = amdgpu.EM_AMDGPU) -> bytes:
    """A small ELF file: header, symbol names, symbols, and the two sections that hold them.

    Besides the kernels there is a function without a descriptor and a descriptor defined elsewhere.
    """
    symbols = [(name, 1) for k in kernels for name in (k, f"{k}.kd")] + [("helper", 1), ("elsewhere.kd", 0)]
    names, table = b"\0", b""
    for name, section in symbols:
        # st_name, st_info, st_other, st_shndx (0 = undefined), st_value, st_size
        table += struct.pack("<IBBHQQ", len(names), 1, 0, section, 0, 64)
        names += name.encode() + b"\0"
    at_names, at_table = 64, 64 + len(names)
    at_sections = at_table + len(table)
    header = b"\x7fELF\x02\x01\x01\x40\x04" + bytes(7)
    # The upper bits of the flags are features (xnack, sramecc); they are no part of the processor.
    header += struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, 0, at_sections, 0x500 | mach, 64, 56, 0, 64, 3, 0)
    sections = bytes(64)
    sections += struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, at_names, len(names), 0, 0, 1, 0)
    sections += struct.pack("<IIQQQQIIQQ", 0, 11, 0, 0, at_table, len(table), 1, 0, 8, 24)
    return header + names + table + sections


def bundle(*objects: tuple[str, bytes]) -> bytes:
    """A bundle as the compiler writes one: an empty host entry first, then the code objects."""
    entries = [("host-x86_64-unknown-linux-gnu-", b""), *objects]
    at = 32 + sum(24 + len(name) for name, _ in entries)
    table, payload = b"", b""
    for name, data in entries:
        table += struct.pack("<QQQ", at + len(payload), len(data), len(name)) + name.encode()
        payload += data
    return b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<Q", len(entries)) + table + payload


# -- reading -------------------------------------------------------------------------------------------


def test_an_object_names_its_processor_and_its_kernels() -> None:
    data = code_object(kernels=("one", "two"))
    found = amdgpu.read_code_object(data)
    assert found == amdgpu.CodeObject("gfx1151", frozenset({"one", "two"}), len(data))
    assert amdgpu.read_code_object(code_object(GFX1100)).target == "gfx1100"
    assert amdgpu.read_code_object(code_object(0xFE)).target == "unknown-0xfe"


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "not a 64-bit"),
        (b"BC\xc0\xde" + bytes(100), "not a 64-bit"),
        (b"\x7fELF\x01\x01" + bytes(100), "not a 64-bit"),
        (code_object(machine=62), "ELF machine 62"),
        (code_object()[:-70], "cut off"),
    ],
    ids=["empty", "bitcode", "32-bit", "host", "short"],
)
def test_what_is_no_code_object_is_refused(data: bytes, complaint: str) -> None:
    with pytest.raises(BuildError, match=complaint):
        amdgpu.read_code_object(data)


def test_a_library_is_counted_bundle_by_bundle() -> None:
    first, second = code_object(kernels=("a", "b")), code_object(kernels=("b", "c"))
    other = code_object(GFX1100, kernels=("a",))
    library = b"\x7fELF a message with __CLANG_OFFLOAD_BUNDLE__ in it".ljust(256, b"x")
    library += bundle(("hipv4-amdgcn-amd-amdhsa--gfx1151", first)) + bytes(100)
    library += bundle(("hipv4-amdgcn-amd-amdhsa--gfx1100", other), ("hipv4-amdgcn-amd-amdhsa--gfx1151", second))
    ids = [name.rsplit("-", 1)[1] for name, _ in amdgpu.bundled(library)]
    assert ids == ["gfx1151", "gfx1100", "gfx1151"]
    report = check_hip.library_report(library)
    assert report == "1 code objects carry gfx1100: 1 kernels\n2 code objects carry gfx1151: 3 kernels"


def test_a_library_without_device_code_says_so_and_compressed_code_is_not_taken_for_none() -> None:
    assert check_hip.library_report(b"\x7fELF" + bytes(500)) == "no AMD GPU code"
    with pytest.raises(BuildError, match="compressed"):
        check_hip.library_report(b"\x7fELF" + bytes(500) + b"CCOB\x02\x00" + bytes(100))


# -- what is compiled --------------------------------------------------------------------------------

INSTANCES = (
    *("fattn-mma-f16-instance-ncols1_1-ncols2_8.cu", "fattn-mma-f16-instance-ncols1_1-ncols2_16.cu"),
    *("fattn-tile-instance-dkq112-dv112.cu", "fattn-tile-instance-dkq256-dv256.cu"),
    *("fattn-vec-instance-f16-f16.cu", "fattn-vec-instance-q4_0-q4_0.cu", "fattn-vec-instance-q4_0-f16.cu"),
    *("mmf-instance-ncols_2.cu", "mmq-instance-q4_k.cu", "mmq-instance-q8_0.cu"),
)
QUANTS = 'set   (GGML_CUDA_FA_QUANTS "q4_0-q4_0;f16-f16" CACHE STRING\n    "which")\n'


@pytest.fixture
def backend(tmp_path: Path) -> hipcheck.Backend:
    found = hipcheck.Backend(tmp_path / "ggml", "0.3.36 abc")
    (found.folder / "template-instances").mkdir(parents=True)
    for name in ("softmax.cu", "acc.cu", "acc.cuh", *(f"template-instances/{n}" for n in INSTANCES)):
        (found.folder / name).touch()
    (found.ggml / "CMakeLists.txt").write_text(QUANTS)
    return found


def tools(clang: str = "clang++", **about: str) -> Toolchain:
    return Toolchain(Path(clang), ("--rocm-path=/r",), (), about or {"compiler": "19"})


def test_the_quick_form_takes_base_sources_and_one_of_each_family(backend: hipcheck.Backend) -> None:
    assert [p.name for p in backend.sources(every=False)] == [
        *("acc.cu", "softmax.cu"),
        "fattn-mma-f16-instance-ncols1_1-ncols2_16.cu",
        *("fattn-tile-instance-dkq256-dv256.cu", "fattn-vec-instance-f16-f16.cu"),
        *("mmf-instance-ncols_2.cu", "mmq-instance-q8_0.cu"),
    ]


def test_the_full_form_leaves_out_what_a_default_build_does_not_compile(backend: hipcheck.Backend) -> None:
    names = {p.name for p in backend.sources(every=True)}
    assert names == {"acc.cu", "softmax.cu", *INSTANCES} - {"fattn-vec-instance-q4_0-f16.cu"}
    switches = [d for d in backend.defines() if d.startswith("GGML_CUDA_FA_")]
    assert switches == [
        'GGML_CUDA_FA_QUANTS="q4_0-q4_0,f16-f16"',
        *("GGML_CUDA_FA_F16_F16=1", "GGML_CUDA_FA_Q4_0_F16=0", "GGML_CUDA_FA_Q4_0_Q4_0=1"),
    ]


def test_a_release_that_the_recipe_does_not_know_is_refused(backend: hipcheck.Backend) -> None:
    (backend.ggml / "CMakeLists.txt").write_text("project(ggml)")
    with pytest.raises(BuildError, match="out of date"):
        backend.sources(every=False)
    for path in backend.base():
        path.unlink()
    with pytest.raises(BuildError, match=r"no \.cu file"):
        backend.sources(every=False)


def test_the_key_sees_what_decides_the_bytes_and_no_folder(backend: hipcheck.Backend, tmp_path: Path) -> None:
    def key(identity: str = "r1", made_by: Toolchain | None = None, target: str = "gfx1151") -> str:
        other = hipcheck.Backend(backend.ggml, identity)
        return hipcheck.plan(other, made_by or tools(), [target])[0].key

    keys = [key(), key("r2"), key(made_by=tools(compiler="20")), key(target="gfx1100")]
    assert len(set(keys)) == 4
    assert key(made_by=tools("/elsewhere/clang++")) == key()
    tasks = hipcheck.plan(backend, tools(), ["gfx1151", "gfx1100"])
    assert len({t.key for t in tasks}) == len(tasks) == 14
    moved = backend.ggml.rename(tmp_path / "moved")
    assert hipcheck.plan(hipcheck.Backend(moved, backend.identity), tools(), ["gfx1151"])[0].key == tasks[0].key


def test_sharing_inputs_with_an_integrated_gpu_is_noticed() -> None:
    assert hipcheck.input_hazard("info.devices[id].integrated = false; // off\n") == ""
    on = "#if HIP\n d[id].integrated = prop.integrated;\n#else\n d[id].integrated = false;\n#endif"
    assert "integrated = prop.integrated" in hipcheck.input_hazard(on)
    assert "no longer says" in hipcheck.input_hazard("struct device { int n; };")


# -- the run -----------------------------------------------------------------------------------------

FAKE_COMPILER = """#!{python}
import pathlib, sys
source, out = sys.argv[sys.argv.index("-c") + 1], sys.argv[sys.argv.index("-o") + 1]
with open("{log}", "a") as log:
    log.write(pathlib.Path(source).name + "\\n")
text = pathlib.Path(source).read_text()
if text == "error":
    sys.exit("error: no such kernel")
target = "gfx1100" if text == "wrong" else "gfx1151"
pathlib.Path(out).write_bytes(pathlib.Path("{objects}", target).read_bytes())
"""


@pytest.fixture
def compiler(tmp_path: Path) -> tuple[Toolchain, Path]:
    log = tmp_path / "compiled.txt"
    for target, mach in (("gfx1151", GFX1151), ("gfx1100", GFX1100)):
        (tmp_path / target).write_bytes(code_object(mach, ("one", "two")))
    program = tmp_path / "clang++"
    program.write_text(FAKE_COMPILER.format(python=sys.executable, log=log, objects=tmp_path))
    program.chmod(0o755)
    return tools(str(program)), log


def test_objects_are_compiled_once_and_judged_every_time(
    backend: hipcheck.Backend, compiler: tuple[Toolchain, Path], tmp_path: Path
) -> None:
    made_by, log = compiler
    tasks = hipcheck.plan(backend, made_by, ["gfx1151"])
    told: list[str] = []
    first = hipcheck.check(tasks, tmp_path / "objects", os.environ, 2, lambda r: told.append(r.task.name))
    assert sorted(told) == sorted(t.name for t in tasks)
    assert [r.task for r in first] == tasks and not any(r.fault or r.cached for r in first)
    assert hipcheck.summary(first, ["gfx1151"]).startswith("7 of 7 objects carry gfx1151: 2 kernels")
    n_compiled = len(log.read_text().splitlines())
    second = hipcheck.check(tasks, tmp_path / "objects", os.environ, 2)
    assert len(log.read_text().splitlines()) == n_compiled == 7
    assert all(r.cached for r in second) and "(7 from the cache)" in hipcheck.summary(second, ["gfx1151"])
    # A damaged object is not believed because it lies in the cache.
    (tmp_path / "objects" / f"{tasks[0].key}.o").write_bytes(b"\x7fELF")
    assert hipcheck.check(tasks, tmp_path / "objects", os.environ, 1)[0].fault


def test_what_fails_is_named_and_not_kept(
    backend: hipcheck.Backend, compiler: tuple[Toolchain, Path], tmp_path: Path
) -> None:
    (backend.folder / "acc.cu").write_text("error")
    (backend.folder / "softmax.cu").write_text("wrong")
    tasks = hipcheck.plan(backend, compiler[0], ["gfx1151"])
    results = hipcheck.check(tasks, tmp_path / "objects", os.environ, 1)
    faults = {r.task.source.name: r.fault for r in results if r.fault}
    assert set(faults) == {"acc.cu", "softmax.cu"}
    assert "no such kernel" in faults["acc.cu"] and faults["softmax.cu"] == "carries gfx1100, not gfx1151"
    report = hipcheck.summary(results, ["gfx1151"])
    assert report.startswith("5 of 7 objects carry gfx1151") and "acc (gfx1151): does not compile" in report
    assert len(list((tmp_path / "objects").iterdir())) == 5


# -- where the compiler comes from -------------------------------------------------------------------


class System(Probe):
    """These programs exist; a command's output is looked up by its last word."""

    def __init__(self, programs: tuple[str, ...], said: dict[str, str]) -> None:
        self.programs, self.said = programs, said

    def which(self, name: str) -> str | None:
        return name if name in self.programs else None

    def run(self, command, stdin: str = "") -> tuple[int, str]:
        return 0, self.said.get(command[-1], "")


ROCM = {"--version": "6.4.43483-a187df25c\n", "-l": "/opt/rocm/lib/llvm/bin\n", "-R": "/opt/rocm\n"}
ROCM_CLANG = "/opt/rocm/lib/llvm/bin/clang++"


def test_an_installed_rocm_is_used() -> None:
    found = hiptools.of_rocm("hipconfig", System((ROCM_CLANG,), ROCM))
    assert str(found.clang) == ROCM_CLANG and found.options == ("--rocm-path=/opt/rocm",)
    assert found.env({"A": "b"}) == {"A": "b"}
    debians = {**ROCM, "-l": "/usr/lib/llvm-21/bin", "-R": "/usr"}
    distribution = hiptools.of_rocm("hipconfig", System(("/usr/lib/llvm-21/bin/clang++",), debians))
    assert distribution.options == (), "with --rocm-path=/usr a distribution's clang finds no device libraries"
    newer = hiptools.of_rocm("hipconfig", System((ROCM_CLANG,), {**ROCM, "--version": "7.2.1"}))
    assert newer.key != found.key
    with pytest.raises(BuildError, match=r"6\.1 or newer.*5\.7"):
        hiptools.of_rocm("hipconfig", System((ROCM_CLANG,), {**ROCM, "--version": "5.7.1"}))
    with pytest.raises(BuildError, match=r"no clang\+\+"):
        hiptools.of_rocm("hipconfig", System((), ROCM))


def test_cmake_is_told_where_this_rocm_lies() -> None:
    at_home = {"--version": "7.2.1\n", "-l": "warning: no GPU\n/home/u/rocm/llvm/bin\n", "-R": "/home/u/rocm\n"}
    assert hiptools.rocm_variables(System(("hipconfig",), at_home)) == {
        "HIPCXX": "/home/u/rocm/llvm/bin/clang++",
        "HIP_PATH": "/home/u/rocm",
        "ROCM_PATH": "/home/u/rocm",
    }
    # Nor may ROCM_PATH name /usr: llama.cpp looks there anyway, clang would look nowhere else.
    debians = {"-l": "/usr/lib/llvm-21/bin", "-R": "/usr"}
    assert hiptools.rocm_variables(System(("hipconfig",), debians)) == {
        "HIPCXX": "/usr/lib/llvm-21/bin/clang++",
        "HIP_PATH": "/usr",
    }
    assert hiptools.rocm_variables(System(("hipconfig",), {})) == {}
    assert hiptools.rocm_variables(System((), at_home)) == {}


BOOKWORM = 'PRETTY_NAME="Debian GNU/Linux 12"\nID=debian\nVERSION_CODENAME=bookworm\n# ID=other\n'
INDEX = "mirror://security/|bookworm-security\nmirror://main/|bookworm-updates\nmirror://main/|bookworm\n"


def test_the_mirror_is_the_one_that_serves_the_systems_own_release() -> None:
    assert debian.find_mirror(debian.os_release(BOOKWORM), INDEX) == "mirror://main/"
    assert debian.find_mirror(debian.os_release(BOOKWORM), "mirror://main/|trixie\n") is None
    ubuntu = debian.os_release('ID=ubuntu\nVERSION_CODENAME="noble"\n')
    assert debian.find_mirror(ubuntu, "mirror://ubuntu/|noble\n") is None


def test_without_a_way_to_fetch_the_remedy_is_named() -> None:
    apt = System(("apt-get", "dpkg-deb"), {"Created-By: Packages": INDEX})
    assert debian.mirror(apt, "", BOOKWORM) == "mirror://main/"
    assert debian.mirror(apt, "mirror://mine/", "ID=ubuntu\n") == "mirror://mine/"
    with pytest.raises(BuildError, match="--mirror"):
        debian.mirror(apt, "", "ID=ubuntu\nVERSION_CODENAME=noble\n")
    with pytest.raises(BuildError, match=r"ROCm 6\.1 or newer"):
        debian.mirror(System((), {}), "mirror://mine/", BOOKWORM)


def test_packages_are_named_by_their_files_and_told_apart_by_their_hashes(tmp_path: Path) -> None:
    path = tmp_path / "lld-19_1%3a19.1.7-3~deb12u1_amd64.deb"
    path.write_bytes(b"one")
    first = debian.package_of(path, "bookworm")
    assert (first.name, first.version, first.suite) == ("lld-19", "1:19.1.7-3~deb12u1", "bookworm")
    path.write_bytes(b"two")
    second = debian.package_of(path, "bookworm")
    other = debian.Package("libz", "1", "bookworm", "00")
    assert debian.packages_digest([first, other]) == debian.packages_digest([other, first])
    assert debian.packages_digest([first, other]) != debian.packages_digest([second, other])
    with pytest.raises(BuildError, match="not named"):
        debian.package_of(tmp_path / "odd.deb", "bookworm")


def test_the_packages_belong_to_a_release() -> None:
    assert hiptools.debian_key(BOOKWORM) == hiptools.debian_key(BOOKWORM + "VERSION_ID=12\n")
    assert hiptools.debian_key(BOOKWORM) != hiptools.debian_key(BOOKWORM.replace("bookworm", "trixie"))


def test_an_unpacked_folder_becomes_a_toolchain(tmp_path: Path) -> None:
    (tmp_path / "packages.json").write_text(
        '[{"name": "clang-19", "version": "1:19.1.7-3", "suite": "bookworm", "sha256": "aa"}]'
    )
    with pytest.raises(BuildError, match="not complete"):
        hiptools.toolchain_in(tmp_path)
    home = tmp_path / "clang/usr/lib/llvm-19"
    bitcode = tmp_path / "rocm/usr/lib/amdgcn/bitcode"
    for path in (home / "bin/clang++", home / "lib/libLLVM.so", bitcode / "ocml.bc"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    found = hiptools.toolchain_in(tmp_path)
    assert found.clang == home / "bin/clang++" and f"--rocm-device-lib-path={bitcode}" in found.options
    assert found.about["clang-19"] == "1:19.1.7-3 (bookworm)"
    env = found.env({"LD_LIBRARY_PATH": "/own"})
    assert env["LD_LIBRARY_PATH"] == f"{home / 'lib'}{os.pathsep}/own"


def test_the_version_in_hips_header() -> None:
    header = "#define HIP_VERSION_MAJOR 6\n#define HIP_VERSION_MINOR 4\n#define HIP_VERSION_PATCH 43483\n"
    assert hiptools.hip_version(header) == "6.4.43483"
    assert hiptools.hip_version("#define OTHER 1\n") == ""
