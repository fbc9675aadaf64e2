"""One exception for everything a person at the terminal can do something about."""

from __future__ import annotations


class BuildError(Exception):
    """Shown as it is, without a traceback: it says what went wrong and what to do."""
