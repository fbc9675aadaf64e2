"""``gufo bench`` finds the benchmarks of a checkout, and says what to do without one."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from gufo_gguf.cli.bench import _MODULES, BENCHMARKS, checkout
from gufo_gguf.cli.main import app
from gufo_gguf.core.errors import ConfigError


def test_without_a_name_it_lists_them() -> None:
    done = CliRunner().invoke(app, ["bench"])
    assert done.exit_code == 0 and all(name in done.stdout for name in BENCHMARKS)


def test_each_name_is_a_module_of_the_checkout() -> None:
    assert set(BENCHMARKS) == set(_MODULES)
    root = checkout()
    for module in _MODULES.values():
        path = root.joinpath(*module.split("."))
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module


def test_an_installed_package_says_where_the_benchmarks_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="clone the repository"):
        checkout(tmp_path / "site-packages" / "gufo_gguf")


def test_a_wrong_name_is_an_error_that_names_the_right_ones() -> None:
    done = CliRunner().invoke(app, ["bench", "speed"])
    assert isinstance(done.exception, ConfigError) and "agent" in str(done.exception)
