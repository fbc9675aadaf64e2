"""Sizes as people write and read them: ``8G`` on the command line, ``8.00 GiB`` in a table.

Plain numbers are bytes; ``8G`` and ``8GiB`` are powers of 1024 and ``8GB`` of 1000, as coreutils take
them; fractions of a unit (``1.5G``) are understood.
"""

from __future__ import annotations

import re

import typer

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?B)?|B)?", re.IGNORECASE)
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
MAX_BYTES = 1 << 60
"""Beyond any machine; keeps a slip of the finger from becoming an overflow elsewhere."""


def parse_bytes(text: str | int) -> int:
    """Bytes of a size.  Raises typer.BadParameter naming the accepted forms."""
    if isinstance(text, int):  # a default
        return text
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size; write bytes, or a number with K, M, G or T such as 8G")
    number, unit, suffix = match.groups()
    base = 1000 if suffix and suffix.upper() == "B" else 1024
    n_bytes = float(number) * base ** (_POWERS[unit.upper()] if unit else 0)
    if n_bytes > MAX_BYTES:
        raise typer.BadParameter(f"{text!r} is more than any machine has")
    if n_bytes != int(n_bytes) and not unit:
        raise typer.BadParameter(f"{text!r} is not a whole number of bytes")
    return int(number) if not unit and number.isdigit() else int(n_bytes)


def show_bytes(n_bytes: int) -> str:
    """Three significant figures and a binary unit."""
    value, power = float(n_bytes), 0
    while value >= 1000 and power < len(_UNITS) - 1:
        value, power = value / 1024, power + 1
    if power == 0:
        return f"{n_bytes} B"
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {_UNITS[power]}"


def count(n: int, noun: str) -> str:
    """A number and what it counts: ``1 file``, ``2 files``."""
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def show_age(seconds: float) -> str:
    """A time span in its largest unit, rounded down: ``3 h``."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(0, int(seconds))} s"
