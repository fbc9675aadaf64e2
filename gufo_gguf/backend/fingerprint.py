"""Which weights are these?  A content hash of a model's files, computed once and remembered.

    cache folder / fingerprints.json :  path -> (size, mtime_ns, ctime_ns, inode, samples) -> digest

A path alone proves nothing (another quantisation may lie there tomorrow) and hashing tens of
gigabytes at every start takes a minute, so the digest is remembered under what the file system says
of the file, plus a hash of samples spread over it: an in-place overwrite that keeps size and times
is caught by the samples, short of an attacker.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import xxhash

from gufo_gguf.core import env
from gufo_gguf.core.errors import ModelError

_BLOCK = 1 << 22
_SAMPLES, _SAMPLE_BYTES = 64, 4096
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def model_files(path: Path) -> list[Path]:
    """All files of a model: the one given, or every part of a split model.

    Raises ModelError naming the missing part.
    """
    match = _SPLIT.search(path.name)
    if match is None:
        return [path]
    count = int(match.group(2))
    parts = [path.with_name(f"{path.name[: match.start()]}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise ModelError(f"{path}: part {part.name} of the split model is missing")
    return parts


def fingerprint(path: Path) -> str:
    """Hex digest (128 bit) over the bytes of all files of the model."""
    digest = xxhash.xxh3_128()
    for part in model_files(path):
        digest.update(_file_digest(part).encode())
    return digest.hexdigest()


def _file_digest(path: Path) -> str:
    memory = env.cache_dir() / "fingerprints.json"
    with path.open("rb") as file:
        stat = os.fstat(file.fileno())
        step = max(1, stat.st_size // _SAMPLES)
        samples = xxhash.xxh3_64()
        for at in range(0, stat.st_size, step):
            samples.update(os.pread(file.fileno(), _SAMPLE_BYTES, at))
        known = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, samples.hexdigest()]
        remembered = _load(memory)
        entry = remembered.get(str(path.resolve()))
        if isinstance(entry, list) and entry[:-1] == known:
            return str(entry[-1])
        digest = xxhash.xxh3_128()
        while block := file.read(_BLOCK):
            digest.update(block)
    remembered = _load(memory)
    remembered[str(path.resolve())] = [*known, digest.hexdigest()]
    _store(memory, remembered)
    return digest.hexdigest()


def _load(memory: Path) -> dict[str, object]:
    try:
        value = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _store(memory: Path, value: dict[str, object]) -> None:
    # two processes may write at once; the loser's entry is recomputed next time
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        scratch = memory.with_suffix(f".{os.getpid()}.tmp")
        scratch.write_text(json.dumps(value), encoding="utf-8")
        scratch.replace(memory)
    except OSError:
        pass  # not remembered: hashed again at the next start
