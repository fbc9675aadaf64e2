"""The date that templates print, pinned per conversation.

A template that prints today's date would change the first tokens of every prompt at midnight, and
with them invalidate every cached prefix.  So a conversation keeps the time at which it was first
seen.  A conversation is known by its beginning (system messages and first user message), which all
its requests repeat.  Memory is bounded: the least recently used ones are forgotten first, and then
simply see the new date.  An explicit id from the client was rejected: hardly any sends one.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any


class ConversationClock:
    """Thread-safe.  ``now`` gives seconds since 1970."""

    def __init__(self, now: Callable[[], float], capacity: int = 4096) -> None:
        self._now = now
        self._capacity = capacity
        self._pinned: OrderedDict[bytes, int] = OrderedDict()
        self._lock = Lock()

    def for_messages(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Unix seconds for this conversation: those of its first request."""
        key = _beginning(messages)
        with self._lock:
            pinned = self._pinned.get(key)
            if pinned is None:
                pinned = self._pinned[key] = int(self._now())
                if len(self._pinned) > self._capacity:
                    self._pinned.popitem(last=False)
            else:
                self._pinned.move_to_end(key)
            return pinned


def _beginning(messages: Sequence[Mapping[str, Any]]) -> bytes:
    """Digest of everything up to and with the first user message."""
    digest = hashlib.blake2b(digest_size=16)
    for message in messages:
        digest.update(json.dumps([message.get("role"), message.get("content")], default=str).encode())
        if message.get("role") == "user":
            break
    return digest.digest()
