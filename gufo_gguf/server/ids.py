"""Identifiers as each API shapes them; random, so that logs of two servers can be merged."""

from __future__ import annotations

import secrets


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)
