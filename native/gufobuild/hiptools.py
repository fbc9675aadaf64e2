"""A compiler and headers that turn HIP sources into device code: the system's ROCm, else Debian's packages.

    hipconfig there?  ── yes ──►  its clang, its headers, its device libraries
          │ no
    <cache>/hip/debian-KEY/   clang and lld of this system's release, HIP's headers of one that has HIP 6.1
                              or newer, device libraries that this clang can read; unpacked, not installed

Three releases because no stable one has all three: the newest clang that runs here is 19, its matching
HIP headers are too old, and newer device libraries are bitcode that it cannot read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from . import cachedir, debian, needs
from .cachedir import CacheDir
from .console import say
from .debian import Apt, Package
from .errors import BuildError
from .needs import Probe

SCHEMA = 1
CLANG = 19
COMPILER = (f"clang-{CLANG}", f"lld-{CLANG}")
DEVICE_LIBRARIES = ("trixie", ("rocm-device-libs-17",))
HEADERS = (
    "forky",
    ("libamdhip64-dev", "libhipblas-dev", "libhipblas-common-dev", "librocblas-dev", "libhsa-runtime-dev"),
)


@dataclass(frozen=True)
class Toolchain:
    """What every compile command begins with; ``about`` says where it comes from, for people and keys."""

    clang: Path
    options: tuple[str, ...]
    library_path: tuple[Path, ...]
    about: Mapping[str, str]

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(dict(self.about), sort_keys=True).encode()).hexdigest()

    def env(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The environment of a compiler run: its own shared libraries first, whatever else was set."""
        if not self.library_path:
            return dict(environ)
        before = [environ["LD_LIBRARY_PATH"]] if environ.get("LD_LIBRARY_PATH") else []
        return {**environ, "LD_LIBRARY_PATH": os.pathsep.join([*map(str, self.library_path), *before])}


def find(
    cache: CacheDir, environ: Mapping[str, str], mirror: str = "", refresh: bool = False, probe: Probe | None = None
) -> Toolchain:
    """The toolchain of this system; BuildError that says what to install.  The caller holds the lock."""
    probe = probe or Probe()
    hipconfig = needs.find_program("hipconfig", probe)
    if hipconfig is not None:
        return of_rocm(hipconfig, probe)
    return of_debian(cache, environ, mirror, refresh, probe)


# -- ROCm ------------------------------------------------------------------------------------------


def ask(hipconfig: str, option: str, probe: Probe) -> str:
    """One answer of hipconfig; its warnings come before it on the same stream."""
    status, text = probe.run([hipconfig, option])
    lines = text.strip().splitlines()
    return lines[-1].strip() if status == 0 and lines else ""


_DISTRIBUTION = "/usr"
"""Where a distribution's own packages lie.  Its clang knows by itself where the device libraries are, and finds
none once ROCM_PATH or --rocm-path names /usr (clang 21.1.8 of Debian: its own folder is then not searched)."""


def rocm_variables(probe: Probe) -> dict[str, str]:
    """What llama.cpp's cmake needs to find the ROCm that hipconfig belongs to, wherever it is installed.

    Without ROCM_PATH it looks in /opt/rocm and /usr alone.
    """
    hipconfig = needs.find_program("hipconfig", probe)
    if hipconfig is None:
        return {}
    clang, root = ask(hipconfig, "-l", probe), ask(hipconfig, "-R", probe)
    found = {"HIPCXX": f"{clang}/clang++" if clang else "", "HIP_PATH": root}
    found["ROCM_PATH"] = root if root != _DISTRIBUTION else ""
    return {variable: value for variable, value in found.items() if value}


def of_rocm(hipconfig: str, probe: Probe) -> Toolchain:
    """The compiler that ``make native BACKEND=hip`` would use."""
    said = ask(hipconfig, "--version", probe)
    if needs.version_in(said) < needs.MIN_HIP:
        need = ".".join(map(str, needs.MIN_HIP))
        raise BuildError(f"ROCm {need} or newer is needed: {hipconfig} says {said or 'no version'}")
    folder, root = ask(hipconfig, "-l", probe), ask(hipconfig, "-R", probe)
    clang = Path(folder) / "clang++"
    if not probe.which(str(clang)):
        raise BuildError(f"{hipconfig} -l names {folder}, which holds no clang++")
    compiler = (probe.run([str(clang), "--version"])[1].splitlines() or ["unknown"])[0].strip()
    options = (f"--rocm-path={root}",) if root != _DISTRIBUTION else ()
    return Toolchain(clang, options, (), {"compiler": compiler, "HIP": f"{said} in {root}"})


# -- Debian ----------------------------------------------------------------------------------------


def of_debian(cache: CacheDir, environ: Mapping[str, str], mirror: str, refresh: bool, probe: Probe) -> Toolchain:
    """The unpacked packages in the cache folder, fetched if need be."""
    release = debian.read_os_release()
    root = cache.root / "hip" / f"debian-{debian_key(release)}"
    if refresh:
        shutil.rmtree(root, ignore_errors=True)
    if not root.exists():
        uri = debian.mirror(probe, mirror, release)
        say(f"    fetching clang {CLANG}, HIP's headers and device libraries (unpacked below {root.parent})")
        cachedir.publish(root, lambda target: _fill(target, uri, environ, debian.os_release(release)))
    return toolchain_in(root)


def debian_key(os_release_text: str) -> str:
    """What was asked for, on which system; what came of it is in packages.json."""
    release = debian.os_release(os_release_text)
    asked = [SCHEMA, release.get("ID"), release.get("VERSION_CODENAME"), os.uname().machine]
    text = json.dumps([*asked, COMPILER, DEVICE_LIBRARIES, HEADERS])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _fill(target: Path, uri: str, environ: Mapping[str, str], release: Mapping[str, str]) -> None:
    packages: list[Package] = []
    log = target.parent / "packages.log"
    for suite, names in (DEVICE_LIBRARIES, HEADERS):
        apt = Apt(target / "apt" / suite, log, environ)
        packages += apt.unpack(apt.suite(uri, suite, names), target / "rocm", suite)
    apt = Apt(target / "apt" / "system", log, environ)
    # Nothing comes down for what the system has already, the compiler itself included.
    packages += apt.unpack(apt.system(COMPILER), target / "clang", release.get("VERSION_CODENAME", "system"))
    shutil.rmtree(target / "apt")
    text = json.dumps([asdict(p) for p in packages], indent=2)
    (target / "packages.json").write_text(text + "\n", encoding="utf-8")


def toolchain_in(root: Path) -> Toolchain:
    """The toolchain of an unpacked folder."""
    packages = [Package(**entry) for entry in json.loads((root / "packages.json").read_text(encoding="utf-8"))]
    home = f"usr/lib/llvm-{CLANG}"
    own = root / "clang"
    clang = next((p for p in (own / home / "bin/clang++", Path("/") / home / "bin/clang++") if p.exists()), None)
    bitcode = next(iter(sorted((root / "rocm").rglob("ocml.bc"))), None)
    if clang is None or bitcode is None:
        raise BuildError(f"{root} is not complete; delete it and run this again")
    rocm = root / "rocm" / "usr"
    libraries = (own / home / "lib", *sorted(own.glob("usr/lib/*-linux-gnu")), *sorted(own.glob("lib/*-linux-gnu")))
    about = {p.name: f"{p.version} ({p.suite})" for p in packages if p.name in _TOLD}
    header = rocm / "include/hip/hip_version.h"
    about["HIP"] = hip_version(header.read_text(encoding="utf-8")) if header.is_file() else "unknown"
    about["packages"] = debian.packages_digest(packages)
    options = (f"--rocm-path={rocm}", f"--rocm-device-lib-path={bitcode.parent}", "-isystem", str(rocm / "include"))
    return Toolchain(clang, options, libraries, about)


_TOLD = {*COMPILER, *DEVICE_LIBRARIES[1], *HEADERS[1]}


def hip_version(header: str) -> str:
    """HIP_VERSION_MAJOR.MINOR.PATCH of hip_version.h's text; empty when it has none."""
    parts = [re.search(rf"#define\s+HIP_VERSION_{name}\s+(\d+)", header) for name in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(p[1] for p in parts if p) if parts[0] and parts[1] else ""
