"""Sizes and ages, read and shown."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from gufo_gguf.cli.main import app
from gufo_gguf.cli.sizes import parse_bytes, show_age, show_bytes


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("0", 0),
        ("1234567890123", 1234567890123),
        ("9007199254740993", 9007199254740993),  # more digits than a float has
        ("512b", 512),
        ("8G", 8 << 30),
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        ("8GB", 8_000_000_000),
        ("1.5K", 1536),
        ("2t", 2 << 40),
    ],
)
def test_sizes_as_people_write_them(text: str, n_bytes: int) -> None:
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize("text", ["", "G", "-1", "8X", "1e9", "8G8", "1.5", "0x10", "nan", "9" * 30, "9999999T"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_bytes(text)


def test_shown_with_three_figures() -> None:
    small = [show_bytes(n) for n in (0, 999, 1024, 1536, 12345)]
    assert small == ["0 B", "999 B", "1.00 KiB", "1.50 KiB", "12.1 KiB"]
    large = [show_bytes(n) for n in (1 << 20, 999 << 20, 1010 << 20, 8 << 30)]
    assert large == ["1.00 MiB", "999 MiB", "0.99 GiB", "8.00 GiB"]


def test_ages() -> None:
    assert [show_age(s) for s in (-5, 0, 59.9, 60, 3599, 3600, 86_399, 200_000)] == [
        "0 s", "0 s", "59 s", "1 min", "59 min", "1 h", "23 h", "2 d"
    ]  # fmt: skip


def test_serve_takes_sizes_and_names_the_wrong_one() -> None:
    for flag in ("--cache-ram-bytes", "--cache-disk-bytes", "--cache-disk-staging-bytes"):
        result = CliRunner().invoke(app, ["serve", "m.gguf", flag, "8 apples"])
        assert result.exit_code == 2 and "not a size" in " ".join(result.output.split())
    result = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"})
    assert "--cache-disk" in result.output and "8G" in result.output


def test_a_variable_gives_the_default() -> None:
    result = CliRunner().invoke(app, ["serve", "m.gguf"], env={"GUFO_CACHE_DISK_BYTES": "many"})
    assert result.exit_code == 2 and "not a size" in " ".join(result.output.split())
