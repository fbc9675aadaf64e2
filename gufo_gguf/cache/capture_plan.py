"""Where one request leaves checkpoints: pure functions from a prompt to a short list of boundaries.

A checkpoint of a hybrid model can only be taken where a prefill pass ends, and each costs its
private state, so the plan is a handful of places where work is likely to resume:

    0 ......... start .... system .. learned ... grid .... grid ....... stable .. end
    [ reused   )[            to compute                                            )
               ^ end of reused history                                      ^       ^ retry copy
               required                  optional                           required

* Required: the end of the reused history, the stable boundaries, the prompt end where there is no
  stable boundary.  They are exact and never move.
* Grid: multiples of ``grid_step`` spread evenly over the part to compute.  A grid point yields to
  an exact stop within ``grid_end_margin`` (the pass ends there anyway), else moves to a pass end
  that close.
* System: where tools and system prompt end, on a conversation's first turn, by the rule of learned points:
  the second conversation with them, which would have to learn it, restores it.  Required where it restores
  more bytes of rows than its private state takes (the rows are the prompt's own), unless RAM is short.
* Learned: where the prompt stops matching known history, if that is ``learned_min`` tokens past
  the start.  It may only merge into a capture at or before the divergence: a state beyond it
  contains tokens that the next request will not send.

Passes end on absolute multiples of ``n_ubatch``, whatever the start: after a restore the engine
cuts its first pass to get back on them.

Rejected: fixed spacing (memory goes to points nobody uses), and a pass-end callback of the backend
(the plan must be known, logged and replayed without a model).
"""

from __future__ import annotations

from dataclasses import dataclass

from gufo_gguf.cache.types import BY_WORTH, CacheLimits, CapturePoint, Origin, PromptView, StateShape


def grid_allowance(shape: StateShape, limits: CacheLimits, n_tokens: int) -> int:
    """How many grid points a request of ``n_tokens`` may leave: ``grid_max``, fewer when RAM is short.

    One request may fill half of the budget: its rows and the private states of its required points
    come first (end of reused history, stable boundary, prompt end), grid points share what is left.
    The count limit is shared in the same spirit: an eighth of it.  Rows-only memories need none, as
    every row of a deeper checkpoint is a restore point.
    """
    if shape.rows_only or limits.ram_bytes <= 0:
        return 0
    n_required = 3
    spare_bytes = limits.ram_bytes // 2 - n_tokens * shape.row_bytes - n_required * shape.private_bytes
    by_bytes = max(0, spare_bytes) // max(1, shape.private_bytes)
    return min(limits.grid_max, limits.max_checkpoints // 8, by_bytes)


def grid_points(start: int, end: int, limits: CacheLimits, *, max_points: int) -> tuple[int, ...]:
    """Evenly spread multiples of ``grid_step`` in (start, end - grid_end_margin], ascending.

    With n such multiples and k = min(max_points, n) these are the floor(i * n / k)-th for i = 1..k:
    95,439 cold tokens give 22,528, 47,104, 69,632 and 94,208.  Where RAM allows fewer than there would
    be (``max_points`` below both n and ``grid_max``) the last of k + 1 such points is left out: the end
    of the prompt is captured anyway, so the last stretch is the one that can do without.
    """
    step = limits.grid_step
    first = start // step
    n = max(0, (end - limits.grid_end_margin) // step - first)
    k = min(max_points, n)
    parts = k + 1 if k < min(n, limits.grid_max) else k
    return tuple((first + i * n // parts) * step for i in range(1, k + 1))


@dataclass(slots=True)
class _Plan:
    """Points by boundary while they are collected; meeting origins merge."""

    points: dict[int, CapturePoint]

    def add(self, boundary: int, origin: Origin, *, required: bool, want_logits: bool = False) -> None:
        old = self.points.get(boundary)
        if old is not None:
            origin = max(origin, old.origin, key=BY_WORTH.index)
            required = required or old.required
            want_logits = want_logits or old.want_logits
        self.points[boundary] = CapturePoint(boundary, origin, required, want_logits)

    def nearest(self, boundary: int, *, within: int, only_before: bool = False) -> int | None:
        """The planned boundary closest to this one, the earlier of two; None if none is that close."""
        close = [b for b in self.points if abs(b - boundary) <= within and not (only_before and b > boundary)]
        return min(close, key=lambda b: (abs(b - boundary), b), default=None)


def plan_captures(
    *,
    prompt: PromptView,
    start: int,
    start_has_checkpoint: bool,
    common_prefix: int,
    n_ubatch: int,
    limits: CacheLimits,
    grid_budget: int,
    private_rows: int,
    rows_only: bool = False,
) -> tuple[CapturePoint, ...]:
    """The boundaries in [start, len(prompt)] at which to leave checkpoints, ascending.

    ``start``: tokens in place before prefill (continued or restored).  ``start_has_checkpoint``: a
    retained checkpoint lies exactly there.  ``common_prefix``: ``Lookup.common_prefix``.
    ``grid_budget``: what ``grid_allowance`` says.  ``private_rows``: ``StateShape.private_rows``.
    ``rows_only``: plan just the prompt's own boundaries, since deeper rows can be cut anywhere.

    Retry copies, grid and learned points are not ``required``, nor is the end of a short system prompt:
    admitting them must not cost another conversation its last copy.
    """
    end = len(prompt.tokens)
    if not prompt.write or end == 0 or not 0 <= start <= end:
        return ()
    plan = _Plan({})
    _add_exact(plan, prompt, start, start_has_checkpoint, rows_only)
    if not rows_only:
        _add_grid(plan, start, end, n_ubatch, limits, grid_budget)
        if prompt.system_end <= end:
            pays = grid_budget > 0 and prompt.system_end >= private_rows
            _add_shared(plan, start, prompt.system_end, Origin.SYSTEM, limits, required=pays)
        _add_shared(plan, start, min(common_prefix, end), Origin.LEARNED, limits)
    if start_has_checkpoint or start == 0:
        plan.points.pop(start, None)
    return tuple(plan.points[b] for b in sorted(plan.points))


def _add_exact(plan: _Plan, prompt: PromptView, start: int, start_has_checkpoint: bool, rows_only: bool) -> None:
    end = len(prompt.tokens)
    if 0 < start < end and not rows_only and not start_has_checkpoint:
        plan.add(start, Origin.REUSED_END, required=True)
    stable = [b for b in prompt.stable if start <= b <= end and b > 0]
    for boundary in stable:
        plan.add(boundary, Origin.PROMPT, required=True, want_logits=boundary == end)
    if any(b < end for b in prompt.stable):
        plan.add(end, Origin.RETRY, required=False, want_logits=True)
    else:
        plan.add(end, Origin.PROMPT, required=True, want_logits=True)


def _add_grid(plan: _Plan, start: int, end: int, n_ubatch: int, limits: CacheLimits, grid_budget: int) -> None:
    margin = limits.grid_end_margin
    for point in grid_points(start, end, limits, max_points=grid_budget):
        below = point // n_ubatch * n_ubatch
        ends = [e for e in (below, below + n_ubatch) if start < e <= end - margin and abs(e - point) <= margin]
        target = min(ends, key=lambda e: (abs(e - point), e), default=point)
        # Close to an exact capture, or to the start, where a checkpoint lies or is planned: nothing to add.
        at_start = start > 0 and min(point, target) - start <= margin
        if not at_start and all(plan.nearest(p, within=margin) is None for p in (point, target)):
            plan.add(target, Origin.GRID, required=False)


def _add_shared(
    plan: _Plan, start: int, divergence: int, origin: Origin, limits: CacheLimits, *, required: bool = False
) -> None:
    """A point where other prompts part from this one, if it lies far enough beyond the start."""
    if divergence - start < limits.learned_min:
        return
    merged = plan.nearest(divergence, within=limits.learned_merge, only_before=True)
    if merged is not None and merged > start:
        plan.add(merged, origin, required=required)
        return
    # This stop ends a pass: a grid point this close would only be a second copy of it.
    for boundary in [b for b, p in plan.points.items() if p.origin is Origin.GRID]:
        if abs(boundary - divergence) <= limits.grid_end_margin:
            del plan.points[boundary]
    plan.add(divergence, origin, required=required)
