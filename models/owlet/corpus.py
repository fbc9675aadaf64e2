"""The text the model reads: Python's standard library and documentation of installed packages.

    python -m models.owlet.corpus        writes models/build/corpus.jsonl.xz

One JSON object per line: ``{"text": ...}`` for a document, ``{"name", "args", "doc", "code"}`` for a
function short enough to be shown in a dialogue.  What is taken, and under which licence, stands in
SOURCES below and in SOURCES.md; a package that is not installed is left out and said so.  Nothing
is downloaded.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import lzma
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BUILD = Path(__file__).parents[1] / "build"
CORPUS = BUILD / "corpus.jsonl.xz"

STDLIB_LICENCE = "PSF-2.0"
SOURCES: dict[str, tuple[str, tuple[str, ...]]] = {
    # distribution: (licence, folders in site-packages)
    "anyio": ("MIT", ("anyio",)),
    "click": ("BSD-3-Clause", ("click",)),
    "fastapi": ("MIT", ("fastapi",)),
    "fsspec": ("BSD-3-Clause", ("fsspec",)),
    "httpx": ("BSD-3-Clause", ("httpx",)),
    "jinja2": ("BSD-3-Clause", ("jinja2",)),
    "markdown-it-py": ("MIT", ("markdown_it",)),
    "networkx": ("BSD-3-Clause", ("networkx",)),
    "numpy": ("BSD-3-Clause", ("numpy",)),
    "packaging": ("Apache-2.0 OR BSD-2-Clause", ("packaging",)),
    "pydantic": ("MIT", ("pydantic",)),
    "pygments": ("BSD-2-Clause", ("pygments",)),
    "pytest": ("MIT", ("_pytest",)),
    "requests": ("Apache-2.0", ("requests",)),
    "rich": ("MIT", ("rich",)),
    "starlette": ("BSD-3-Clause", ("starlette",)),
    "sympy": ("BSD-3-Clause", ("sympy/core", "sympy/functions", "sympy/series", "sympy/sets", "sympy/logic")),
    "torch": ("BSD-3-Clause", ("torch/nn", "torch/optim", "torch/utils/data", "torch/distributions")),
    "typer": ("MIT", ("typer",)),
    "urllib3": ("MIT", ("urllib3",)),
    "uvicorn": ("BSD-3-Clause", ("uvicorn",)),
}
_DOCUMENT_BYTES = (400, 400_000)
_FUNCTION_BYTES = (80, 900)
_SKIPPED_PARTS = {
    "tests",
    "test",
    "idlelib",
    "lib2to3",
    "__pycache__",
    "_vendor",
    "site-packages",
    "encodings",
    "ensurepip",
}


def python_files(folder: Path) -> Iterator[Path]:
    """Sources below a folder, sorted, without tests, vendored code and generated tables."""
    for path in sorted(folder.rglob("*.py")):
        if not _SKIPPED_PARTS & set(path.relative_to(folder).parts[:-1]) and not path.name.startswith("test_"):
            yield path


def usable(text: str) -> bool:
    """Plain text of a sensible size: no chat markers, hardly anything beyond ASCII, no data tables."""
    low, high = _DOCUMENT_BYTES
    if not low <= len(text) <= high or "<|" in text:
        return False
    lines = text.split("\n")
    letters = sum(c.isalpha() or c == " " for c in text)
    return (
        max(map(len, lines)) < 2000 and sum(c > "\x7f" for c in text) < len(text) / 200 and letters > len(text) * 0.55
    )


def functions(source: str) -> Iterator[dict[str, Any]]:
    """Short functions with a docstring, as they stand in the source."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            return
    lines = source.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        code = "\n".join(line[node.col_offset :] for line in lines[node.lineno - 1 : node.end_lineno])
        doc = (ast.get_docstring(node) or "").strip().split("\n")[0].strip()
        low, high = _FUNCTION_BYTES
        if low <= len(code) <= high and 12 <= len(doc) <= 120 and not node.name.startswith("__"):
            args = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            yield {"name": node.name, "args": [a for a in args if a not in ("self", "cls")], "doc": doc, "code": code}


def documents() -> Iterator[tuple[str, str]]:
    """(source, text) of everything that is taken."""
    paths = sysconfig.get_paths()
    for path in python_files(Path(paths["stdlib"])):
        yield "python", path.read_text(encoding="utf-8", errors="replace")
    for name, (_, folders) in SOURCES.items():
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            print(f"{name} is not installed: left out", file=sys.stderr)
            continue
        yield name, str(distribution.metadata.get_payload() or distribution.metadata["Description"] or "")
        for folder in folders:
            for path in python_files(Path(str(distribution.locate_file(folder)))):
                yield name, path.read_text(encoding="utf-8", errors="replace")


def build(target: Path = CORPUS) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    seen: set[bytes] = set()
    sizes: dict[str, int] = {}
    n_functions = 0
    with lzma.open(target, "wt", encoding="utf-8", preset=6) as out:
        for source, text in documents():
            text = text.replace("\r\n", "\n").replace("\t", "    ").strip() + "\n"
            digest = hashlib.sha256(text.encode()).digest()
            if digest in seen or not usable(text):
                continue
            seen.add(digest)
            sizes[source] = sizes.get(source, 0) + len(text)
            out.write(json.dumps({"text": text}) + "\n")
            for function in functions(text):
                n_functions += 1
                out.write(json.dumps(function) + "\n")
    for source, n_bytes in sizes.items():
        licence = STDLIB_LICENCE if source == "python" else SOURCES[source][0]
        version = sys.version.split()[0] if source == "python" else importlib.metadata.version(source)
        print(f"| {source} | {version} | {licence} | {n_bytes / 1e6:.2f} MB |")
    packed = target.stat().st_size / 1e6
    print(f"{sum(sizes.values()) / 1e6:.1f} MB of text, {n_functions} functions; {packed:.1f} MB packed")


def load(path: Path = CORPUS) -> tuple[list[str], list[dict[str, Any]]]:
    """(documents, functions); FileNotFoundError says how to make the file."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: python -m models.owlet.corpus")
    texts, found = [], []
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            if "text" in record:
                texts.append(record["text"])
            else:
                found.append(record)
    return texts, found


if __name__ == "__main__":
    build()
