"""Debian packages unpacked into a folder: nothing is installed, no root is needed.

    private lists of a suite ► apt-get download (signature of the index, sha256 of each file) ► dpkg-deb -x

apt does the fetching, so its proxies, credentials and mirrors hold.  What a suite offers is whatever
its signed index says today; the versions and hashes that were taken are written down next to the files.
Pinned versions were rejected: a mirror of a moving suite drops them within weeks.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .console import run_logged
from .errors import BuildError
from .needs import Probe

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_TARGETS = ("apt-get", "indextargets", "--format", "$(REPO_URI)|$(RELEASE)", "Created-By: Packages")


@dataclass(frozen=True)
class Package:
    """One unpacked package; ``sha256`` is of the .deb file, which apt has compared with the signed index."""

    name: str
    version: str
    suite: str
    sha256: str


def packages_digest(packages: Sequence[Package]) -> str:
    text = json.dumps([asdict(p) for p in sorted(packages, key=lambda p: p.name)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def os_release(text: str) -> dict[str, str]:
    """ID and VERSION_CODENAME and the like of /etc/os-release."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    return {name.strip(): value.strip().strip("\"'") for name, value in pairs}


def find_mirror(release: Mapping[str, str], targets: str) -> str | None:
    """The Debian mirror this system uses, out of apt's own sources; None when it is not a Debian.

    ``targets`` is the output of ``apt-get indextargets``, a line ``uri|suite`` for each index.
    """
    if release.get("ID") != "debian":
        return None
    codename = release.get("VERSION_CODENAME", "")
    pairs = [line.split("|", 1) for line in targets.splitlines() if "|" in line]
    # Security and updates lie elsewhere on some mirrors; the suite of the system itself is the mirror.
    return next((uri for uri, suite in pairs if suite == codename and codename), None)


def mirror(probe: Probe, chosen: str, os_release_text: str) -> str:
    """The mirror to use; BuildError that names the remedy when there is none."""
    if not (probe.which("apt-get") and probe.which("dpkg-deb")):
        raise BuildError(
            "There is no hipcc here and no apt-get to fetch a compiler and HIP's headers with.\n"
            "Install ROCm 6.1 or newer, or run this on Debian 12 or 13."
        )
    if chosen:
        return chosen
    status, text = probe.run(_TARGETS)
    found = find_mirror(os_release(os_release_text), text) if status == 0 else None
    if found is None:
        raise BuildError(
            "apt's sources name no Debian mirror of this system's own release.\n"
            "Name one with --mirror URL (make check-hip ARGS='--mirror URL'), or install ROCm 6.1 or newer."
        )
    return found


@dataclass(frozen=True)
class Apt:
    """apt-get with lists, cache and archives of its own below ``root``."""

    root: Path
    log: Path
    environ: Mapping[str, str]

    def _options(self, *more: str) -> list[str]:
        options = [
            f"Dir::State::lists={self.root / 'lists'}",
            f"Dir::Cache={self.root / 'cache'}",
            f"Dir::Cache::archives={self.root / 'archives'}",
            "Acquire::Languages=none",
            # These folders are ours alone, and the system's lock would need root.
            "Debug::NoLocking=true",
            "APT::Sandbox::User=root",
            *more,
        ]
        return [part for option in options for part in ("-o", option)]

    def _run(self, label: str, command: Sequence[str], cwd: Path | None = None) -> None:
        for name in ("lists/partial", "cache", "archives/partial"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        env = {**self.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
        run_logged(command, self.log, label, cwd=cwd, env=env, summarize=_apt_status)

    def suite(self, uri: str, suite: str, packages: Sequence[str]) -> list[Path]:
        """The .deb files of these packages alone, of a suite that need not be the system's."""
        if not KEYRING.is_file():
            raise BuildError(f"{KEYRING} is missing; apt install debian-archive-keyring")
        status, sources = self.root / "status", self.root / "sources.list"
        self.root.mkdir(parents=True, exist_ok=True)
        # As if nothing were installed: otherwise an installed version could be the candidate.
        status.touch()
        sources.write_text(f"deb [signed-by={KEYRING}] {uri} {suite} main\n", encoding="utf-8")
        options = self._options(
            f"Dir::State::status={status}", f"Dir::Etc::sourcelist={sources}", "Dir::Etc::sourceparts=-"
        )
        self._run(f"reading the index of {suite}", ["apt-get", *options, "update"])
        folder = self.root / "archives"
        self._run(f"downloading from {suite}", ["apt-get", *options, "download", *packages], cwd=folder)
        return sorted(folder.glob("*.deb"))

    def system(self, packages: Sequence[str]) -> list[Path]:
        """The .deb files that ``apt install`` would fetch for these packages on this system now."""
        options = self._options()
        self._run("reading the system's index", ["apt-get", *options, "update"])
        install = ["install", "--download-only", "--no-install-recommends", "--yes", *packages]
        self._run("downloading the compiler", ["apt-get", *options, *install])
        return sorted((self.root / "archives").glob("*.deb"))

    def unpack(self, archives: Sequence[Path], target: Path, suite: str) -> list[Package]:
        """Unpack into ``target``, one tree for all; returns what was unpacked."""
        target.mkdir(parents=True, exist_ok=True)
        unpacked = []
        for path in archives:
            self._run(f"unpacking {path.name}", ["dpkg-deb", "-x", str(path), str(target)])
            unpacked.append(package_of(path, suite))
        return unpacked


def package_of(path: Path, suite: str) -> Package:
    """Name and version out of the file's name, which apt makes of them: name_version_arch.deb."""
    parts = path.name.removesuffix(".deb").split("_")
    if len(parts) != 3:
        raise BuildError(f"{path.name} is not named like a package")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Package(parts[0], parts[1].replace("%3a", ":"), suite, digest)


def _apt_status(line: str) -> str | None:
    found = re.match(r"(Get|Hit|Fetched):?\S* (.*)", line)
    return found[2].strip()[:80] if found else None


def read_os_release(path: Path = Path("/etc/os-release")) -> str:
    return path.read_text(encoding="utf-8") if os.path.isfile(path) else ""
