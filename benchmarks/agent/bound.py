"""The fewest tokens that any plan could have prefilled under a byte budget: a proven lower bound.

The whole trace is known.  A plan decides, at every moment, which boundaries to keep a state of.  The
model is generous to the plan, so that no server can beat the bound:

* a state may be kept at any boundary a request passes, however little the capture would cost;
* rows are shared between all histories that agree in tokens (a real cache shares only by inheritance),
  without chunks, tails or logits: keeping a set of boundaries costs one private state each, plus the rows
  of their union;
* after each request, n_slots live states (ends of sequences) are kept for nothing, one of which is
  the request's own;
* bytes are checked between requests, not while one runs.

Choosing is a linear program over the tree of common prefixes (its nodes are the only boundaries worth
keeping), in which states may be kept in fractions: dropping that freedom can only raise the cost, and so
can restricting boundaries that lie between two nodes, which are mixtures of both.

    y[b,t]   state at boundary b kept after request t        0..1
    z[e,t]   rows of tree edge e kept after request t        >= y of everything below
    l[i,t]   live state of request i kept after request t    sum <= n_slots
    x[u,b]   request u starts from b                         <= y[b,u-1] (+ live), sum <= 1

maximise the reused tokens  sum x[u,b] * depth(b)  subject to  private * sum y + row * sum len(e) z <= budget.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.agent.oracle import Played, common_prefix, lcp
from gufo_gguf.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class State:
    """Sizes of a model's state in bytes."""

    row_bytes: int
    private_bytes: int

    def whole(self, n_tokens: int) -> int:
        return self.private_bytes + n_tokens * self.row_bytes


@dataclass(frozen=True, slots=True)
class Node:
    """A boundary: the first ``depth`` tokens of sequence ``owner``, the earliest that has them."""

    owner: int
    depth: int


class Tree:
    """Common prefixes of a trace.  ``common[i, j]``: of sequence i and sequence j."""

    def __init__(self, trace: Sequence[Played]) -> None:
        self.sequences = [p.sequence for p in trace]
        self.n_prompt = [len(p.prompt) for p in trace]
        n = len(trace)
        self.common = np.zeros((n, n), dtype=np.int64)
        for i in range(n):
            for j in range(i, n):
                self.common[i, j] = self.common[j, i] = lcp(self.sequences[i], self.sequences[j])
        pairs = [(i, j) for j in range(n) for i in range(j)]
        # where prompts part from histories, and where histories part from each other while they generate
        nodes = {self.node(j, min(int(self.common[i, j]), self.n_prompt[j])) for i, j in pairs}
        nodes |= {self.node(j, int(self.common[i, j])) for i, j in pairs}
        self.nodes = sorted((b for b in nodes if b.depth > 0), key=lambda b: (b.depth, b.owner))
        self.parents = {b: self._parent(b) for b in self.nodes}

    def node(self, sequence: int, depth: int) -> Node:
        owner = next(i for i in range(len(self.sequences)) if self.common[i, sequence] >= depth)
        return Node(owner, depth)

    def passes(self, b: Node, sequence: int, *, prompt_only: bool = False) -> bool:
        """Does the sequence (or just its prompt) begin with the boundary's tokens?"""
        end = self.n_prompt[sequence] if prompt_only else len(self.sequences[sequence])
        return b.depth <= end and self.common[b.owner, sequence] >= b.depth

    def edge(self, b: Node) -> int:
        """Tokens between the boundary and the deepest one above it."""
        up = self.parents[b]
        return b.depth - (up.depth if up is not None else 0)

    def _parent(self, b: Node) -> Node | None:
        above = [a for a in self.nodes if a.depth < b.depth and self.passes(a, b.owner)]
        return above[-1] if above else None


def need_solver() -> None:
    """Raises ConfigError when scipy is missing: to be asked before minutes are spent."""
    if importlib.util.find_spec("scipy") is None:
        raise ConfigError("the bound needs scipy: .venv/bin/pip install -e '.[bench]'")


def least_prefilled(
    trace: Sequence[Played], state: State, budget_bytes: int, n_slots: int, *, rows_only: bool = False
) -> float:
    """A lower bound on the prefilled tokens of the whole trace, over every plan within the budget.

    ``rows_only``: states without private part can be cut at any token.  Needs scipy.
    """
    tree = Tree(trace)
    least = sum(common_prefix(trace))
    union = sum(tree.edge(b) for b in tree.nodes)
    if len(tree.nodes) * state.private_bytes + union * state.row_bytes <= budget_bytes:
        return float(least)  # every useful boundary fits: nothing has to be chosen
    return sum(tree.n_prompt) - _Program(tree, state, budget_bytes, n_slots, rows_only).most_reused()


class _Program:
    """Columns and rows of the linear program; see the module docstring for the names."""

    def __init__(self, tree: Tree, state: State, budget_bytes: int, n_slots: int, rows_only: bool) -> None:
        self._tree, self._state, self._budget, self._n_slots = tree, state, budget_bytes, n_slots
        self._rows_only = rows_only
        self._n = len(tree.sequences)
        self._gain: list[float] = []
        self._entries: list[tuple[int, int, float]] = []
        self._limits: list[float] = []
        self._column: dict[tuple[str, object, int], int] = {}

    def _new(self, name: str, what: object, t: int, gain: float = 0.0) -> int:
        self._column[name, what, t] = len(self._gain)
        self._gain.append(gain)
        return len(self._gain) - 1

    def _at_most(self, terms: list[tuple[int, float]], limit: float) -> None:
        row = len(self._limits)
        self._entries += [(row, column, value) for column, value in terms if value]
        self._limits.append(limit)

    def most_reused(self) -> float:
        self._kept()
        self._live()
        self._starts()
        return self._solve()

    def _last_use(self, b: Node) -> int:
        return max((u for u in range(self._n) if self._tree.passes(b, u, prompt_only=True)), default=b.owner)

    def _kept(self) -> None:
        tree = self._tree
        last = {b: self._last_use(b) for b in tree.nodes}
        for b in reversed(tree.nodes):  # an edge is needed as long as anything below it
            up = tree.parents[b]
            if up is not None:
                last[up] = max(last[up], last[b])
        for b in tree.nodes:
            for t in range(b.owner, last[b]):
                y = self._new("y", b, t)
                z = self._new("z", b, t)
                self._at_most([(y, 1), (z, -1)], 0)
                if not tree.passes(b, t):  # only a request that passes it can leave a state there
                    before = self._column.get(("y", b, t - 1))
                    self._at_most([(y, 1), *([(before, -1.0)] if before is not None else [])], 0)
        for b in tree.nodes:
            up = tree.parents[b]
            if up is not None:
                for t in range(b.owner, last[b]):
                    self._at_most([(self._column["z", b, t], 1), (self._column["z", up, t], -1)], 0)
        for t in range(self._n):
            terms: list[tuple[int, float]] = []
            for b in tree.nodes:
                if ("y", b, t) in self._column:
                    terms.append((self._column["y", b, t], float(self._state.private_bytes)))
                    terms.append((self._column["z", b, t], float(tree.edge(b) * self._state.row_bytes)))
            scale = max(1.0, float(self._budget))
            self._at_most([(c, v / scale) for c, v in terms], self._budget / scale)

    def _live(self) -> None:
        for t in range(self._n):
            for i in range(t + 1):
                live = self._new("l", i, t)
                self._at_most([(live, 1)], 1)
                if i < t:
                    self._at_most([(live, 1), (self._column["l", i, t - 1], -1)], 0)
            others = [(self._column["l", i, t], 1.0) for i in range(t)]
            self._at_most(others, self._n_slots - 1)  # one slot holds what just ran

    def _usable_live(self, b: Node, u: int) -> list[int]:
        """Sequences whose live state could start request u at b."""
        tree = self._tree
        return [
            i
            for i in range(u)
            if tree.passes(b, i) and (self._rows_only or len(tree.sequences[i]) == b.depth)
        ]  # fmt: skip

    def _starts(self) -> None:
        for u in range(1, self._n):
            mine = []
            for b in self._tree.nodes:
                if b.owner >= u or not self._tree.passes(b, u, prompt_only=True):
                    continue
                x = self._new("x", b, u, float(b.depth))
                mine.append((x, 1.0))
                sources = [self._column[key] for key in [("y", b, u - 1)] if key in self._column]
                sources += [self._column["l", i, u - 1] for i in self._usable_live(b, u)]
                self._at_most([(x, 1.0), *((c, -1.0) for c in sources)], 0)
            self._at_most(mine, 1)

    def _solve(self) -> float:
        need_solver()
        from scipy.optimize import linprog
        from scipy.sparse import coo_matrix

        rows, columns, values = (list(x) for x in zip(*self._entries, strict=True))
        shape = (len(self._limits), len(self._gain))
        matrix = coo_matrix((values, (rows, columns)), shape=shape).tocsr()
        found = linprog(-np.array(self._gain), A_ub=matrix, b_ub=np.array(self._limits), bounds=(0, 1), method="highs")
        if found.status != 0:
            raise RuntimeError(f"the linear program was not solved: {found.message}")
        return float(-found.fun)
