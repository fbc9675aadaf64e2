"""Parts of the cache that can be left out, one at a time, to measure what each earns.

Nothing here is a setting for users: every part is on, and a server with one off is only slower or
keeps less.  ``gufo bench ablations`` prints the table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from gufo_gguf.cache.types import CacheLimits
from gufo_gguf.core.errors import ConfigError

_NEVER = 1 << 40


class Part(StrEnum):
    GRID = "grid"
    """Checkpoints on multiples of 2,048 for edits in the middle."""
    LEARNED = "learned"
    """Checkpoints where prompts were seen to part."""
    SYSTEM = "system"
    """The end of tools and system prompt, captured before a second conversation shows that it is shared."""
    PARTING = "parting"
    """A conversation's live end, captured when its slot is taken."""
    STABLE = "stable"
    """The boundary that the next turn sends again, instead of the prompt's end."""
    BORROW = "borrow"
    """Rows stay in the slot until something overwrites them, instead of being copied at each capture."""
    RANKS = "ranks"
    """Eviction by what a checkpoint is worth, instead of by last use alone."""
    LEADER = "leader"
    """One request computes a shared prefix, the others wait for it."""


@dataclass(frozen=True, slots=True)
class Ablation:
    """What is left out; nothing by default."""

    without: frozenset[Part] = frozenset()

    @classmethod
    def named(cls, names: Iterable[str]) -> Ablation:
        """Raises ConfigError naming the parts there are."""
        try:
            return cls(frozenset(Part(name) for name in names))
        except ValueError as error:
            raise ConfigError(f"{error}; there are {', '.join(Part)}") from error

    def limits(self, limits: CacheLimits) -> CacheLimits:
        """The cache's numbers with these parts off."""
        if Part.GRID in self.without:
            limits = replace(limits, grid_max=0)
        if Part.LEARNED in self.without:
            limits = replace(limits, learned_min=_NEVER)
        limits = replace(limits, parting=Part.PARTING not in self.without)
        return replace(limits, plain_lru=True) if Part.RANKS in self.without else limits

    def stable(self, boundaries: tuple[int, ...]) -> tuple[int, ...]:
        return () if Part.STABLE in self.without else boundaries

    def system_end(self, boundary: int) -> int:
        return 0 if Part.SYSTEM in self.without else boundary

    @property
    def eager_copies(self) -> bool:
        return Part.BORROW in self.without

    def shared_prefix_min(self, n_tokens: int) -> int:
        """Tokens that requests must share for one to wait for another."""
        return _NEVER if Part.LEADER in self.without else n_tokens
