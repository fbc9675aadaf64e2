"""llama.cpp's server tests against this server: all that apply pass (see ``upstream/applicable.py``)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from gufo_gguf.core import env
from tests.server.upstream.applicable import EXCLUDED, FILES, reason_not_to_run

ROOT = Path(__file__).parents[2]


def upstream_tests() -> Path | None:
    """Their folder in the unpacked source that the native library was built from."""
    found = sorted((env.cache_dir() / "native").glob("source-*/tools/server/tests"))
    return found[-1] if found else None


def test_every_exclusion_names_a_test_of_a_listed_file() -> None:
    folder = upstream_tests()
    if folder is None:
        pytest.skip("llama.cpp's source is not in the cache folder: run `make native`")
    text = "".join((folder / "unit" / name).read_text(encoding="utf-8") for name in FILES)
    for name in EXCLUDED:
        assert f"def {name.partition('[')[0]}(" in text, name


def test_exclusions_by_parameters_leave_the_others() -> None:
    assert reason_not_to_run("test_ctx_shift_disabled_short_prompt[-1-248-True]") is not None
    assert reason_not_to_run("test_ctx_shift_disabled_short_prompt[64-64-False]") is None
    assert reason_not_to_run("test_completion_with_grammar[False-x]") is None


@pytest.mark.native
@pytest.mark.slow
def test_applicable_tests_pass() -> None:
    pytest.importorskip("requests")
    pytest.importorskip("filelock")
    folder = upstream_tests()
    assert folder is not None, "the native library was built, so its source is there"
    command = [sys.executable, "-m", "pytest", "-p", "tests.server.upstream.plugin", "-p", "no:cacheprovider"]
    command += ["--import-mode=importlib", "-q", "--no-header", "-rA", "--timeout", "120"]
    done = subprocess.run(
        [*command, *(f"unit/{name}" for name in FILES)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    outcomes = re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED) ", done.stdout, flags=re.MULTILINE)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S.*)$", done.stdout, flags=re.MULTILINE)
    print(Counter(outcomes))
    assert not failed, "\n".join(failed)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert outcomes.count("PASSED") >= 120
