"""`check_hip.py --load`: what a finished folder says when loaded, and that it refuses what is not whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gufo_gguf.backend.libpath import library_dir

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "native"))

from gufobuild import loaded  # noqa: E402
from gufobuild.errors import BuildError  # noqa: E402

HEADER = (ROOT / "native/include/gufo.h").read_text(encoding="utf-8")


def test_functions_are_read_from_declarations_alone() -> None:
    text = """#define GUFO_API __attribute__((visibility("default")))
// gufo_comment(x) is no declaration
GUFO_API int gufo_one(int a, int b);
GUFO_API const char * gufo_two(void);  // next to gufo_one(1, 2)
GUFO_API int gufo_three(gufo_state * state,
                        uint32_t n);
"""
    assert loaded.declared(text) == ["gufo_one", "gufo_two", "gufo_three"]


def test_a_folder_without_libraries_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="does not load"):
        loaded.report(tmp_path, HEADER)


@pytest.mark.native
def test_a_whole_folder_names_functions_answers_and_devices() -> None:
    # In a process of its own, as it is used; no other library of the same name is loaded there.
    done = subprocess.run(
        [sys.executable, str(ROOT / "native/check_hip.py"), "--load", str(library_dir())],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    n = len(loaded.declared(HEADER))
    assert n == len([line for line in HEADER.splitlines() if line.startswith("GUFO_API ")]), "one line for each"
    assert lines[0] == f"libgufo loads, ABI 1: {n} of {n} functions of gufo.h"
    assert lines[1].startswith("an impossible schema: status 1, 'json_schema: ")
    assert lines[2] == "a schema as grammar: status 0, 2 rules"
    assert any(line.startswith("backend CPU, devices: 1") for line in lines)
    assert any(line.startswith("device CPU (CPU): ") for line in lines)


@pytest.mark.native
def test_a_library_that_lacks_a_declared_function_is_refused() -> None:
    with pytest.raises(BuildError, match=r"libgufo lacks gufo_not_there$"):
        loaded.report(library_dir(), HEADER + "GUFO_API void gufo_not_there(void);\n")
    with pytest.raises(BuildError, match="declares nothing"):
        loaded.report(library_dir(), "")
