"""Per-request nonces that clients put where they break every prefix.

Claude Code begins its system prompt with

    x-anthropic-billing-header: cc_version=2.1.101.e51; cc_entrypoint=cli; cch=a5145;You are …

where ``cch`` changes with each request: the first tokens of every prompt differ, and nothing behind
them can be reused.  The value means nothing to a model, so it is replaced by zeros of the same
length (the rest of the header stays: it changes only with the client's version).  Each kind of
noise is one entry of the table; text of a user is never touched.
"""

from __future__ import annotations

import logging
import re

log = logging.getLogger("gufo.server")

_HEAD_CHARS = 512
"""Noise is looked for at the head of a system text only."""

NOISE: dict[str, re.Pattern[str]] = {
    "x-anthropic-billing-header cch": re.compile(r"\Ax-anthropic-billing-header:[^\n]*?\bcch=([0-9A-Za-z]+)"),
}
"""What it is called in the log, and a pattern whose first group is the volatile part."""


def normalise_system(text: str) -> str:
    """The text with volatile parts replaced by zeros of the same length."""
    for name, pattern in NOISE.items():
        match = pattern.match(text[:_HEAD_CHARS])
        if match:
            log.debug("normalised: %s", name)
            text = text[: match.start(1)] + "0" * len(match.group(1)) + text[match.end(1) :]
    return text
