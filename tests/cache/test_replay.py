"""Replaying a log: the retained set at any number, and answers to "why was it (not) there?"."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gufo_gguf.cache.events import CacheEvent, EventKind, EventLog, decode_lines, encode
from gufo_gguf.cache.replay import Replay, Status
from gufo_gguf.cache.types import Origin


class Writer:
    """A log as the cache writes it, by hand: sizes and totals are kept right."""

    def __init__(self) -> None:
        self.log = EventLog(capacity=10_000)
        self.total = 0
        self.sizes: dict[int, tuple[int, int]] = {}

    def note(self, kind: EventKind, **values: Any) -> CacheEvent:
        return self.log.emit(kind, total_bytes=self.total, **values)

    def admit(self, checkpoint: int, boundary: int, n_bytes: int = 10, **values: Any) -> None:
        self.sizes[checkpoint] = (boundary, n_bytes)
        self.total += n_bytes
        self.note(EventKind.ADMIT, checkpoint=checkpoint, boundary=boundary, n_bytes=n_bytes, **values)

    def remove(self, checkpoint: int, reason: str) -> None:
        boundary, n_bytes = self.sizes.pop(checkpoint)
        self.total -= n_bytes
        self.note(EventKind.REMOVE, checkpoint=checkpoint, boundary=boundary, n_bytes=n_bytes, reason=reason)

    def replay(self) -> Replay:
        return Replay(decode_lines(encode(e) + "\n" for e in self.log.newest()))


def story() -> Writer:
    """Request 1 leaves a grid point and its end; a second conversation pushes the grid point out."""
    w = Writer()
    w.log.request = "r1"
    w.note(EventKind.PLAN, boundary=0, points=(2048, 5000))  # 1
    w.admit(1, 2048, origin=Origin.GRID)  # 2
    w.admit(2, 5000, origin=Origin.PROMPT, parent=1)  # 3
    w.log.request = "r2"
    w.note(EventKind.PLAN, boundary=0, points=(2048, 3000, 4096, 9000))  # 4
    w.note(EventKind.REFUSE, boundary=2048, origin=Origin.GRID, n_bytes=70, reason="no_room")  # 5
    w.remove(1, "idle")  # 6
    w.admit(3, 3000, origin=Origin.LEARNED)  # 7
    w.log.request = "r3"
    w.note(EventKind.LOOKUP, checkpoint=2, boundary=5000)  # 8
    w.note(EventKind.TOUCH, checkpoint=2, boundary=5000, reason="restore")  # 9
    w.note(EventKind.PLAN, boundary=5000, points=(7000,))  # 10
    w.admit(4, 7000, origin=Origin.PROMPT, parent=2)  # 11
    return w


def test_the_set_at_any_number() -> None:
    replay = story().replay()
    assert replay.faults == [] and replay.whole
    assert [sorted(replay.retained(n)) for n in (0, 1, 2, 3, 5, 6, 7, 11)] == [
        [], [], [1], [1, 2], [1, 2], [2], [2, 3], [2, 3, 4],
    ]  # fmt: skip
    assert [replay.total_bytes(n) for n in (0, 2, 3, 6, 7, 11)] == [0, 10, 20, 10, 20, 30]
    two = replay.retained()[2]
    assert (two.boundary, two.uses, two.admitted_seq, two.last_use_seq) == (5000, 1, 3, 9)
    assert replay.retained(8)[2].uses == 0


def test_why() -> None:
    replay = story().replay()

    def why(boundary: int, **more: Any) -> tuple[Status, int | None]:
        told = replay.explain(boundary, **more)
        return told.status, None if told.decisive is None else told.decisive.seq

    assert why(2048, checkpoint=4, seq=5) == (Status.PRESENT, 2)
    assert why(2048, checkpoint=4) == (Status.REMOVED, 6)
    assert why(2048, checkpoint=3) == (Status.REFUSED, 5), "the other conversation's own story"
    assert why(4096, checkpoint=3) == (Status.UNREACHED, 4)
    assert why(6000, checkpoint=4) == (Status.UNPLANNED, 10)
    assert why(4000, checkpoint=4) == (Status.UNPLANNED, 1)
    assert why(50_000, checkpoint=4) == (Status.UNKNOWN, None)
    assert why(5000) == (Status.PRESENT, 3)
    assert why(5000, seq=2) == (Status.UNREACHED, 1)


def test_what_a_removal_made_room_for() -> None:
    told = story().replay().explain(2048, checkpoint=4)
    assert told.newcomer is not None and (told.newcomer.seq, told.newcomer.boundary) == (7, 3000)
    assert str(told) == (
        "At 11, boundary 2,048 was gone: event 6 removed checkpoint 1 (idle), 10 bytes. "
        "It made room for 3,000 (event 7)."
    )
    refused = story().replay().explain(2048, checkpoint=3)
    assert "refused it (no_room); it needed 70 bytes" in str(refused)
    assert "The deepest restore point below was 5,000." in str(story().replay().explain(6000, checkpoint=4))


def test_lineages_do_not_mix_conversations() -> None:
    replay = story().replay()
    assert replay.lineage(4) == {1, 2, 4}
    assert replay.lineage(1) == {1, 2, 4}
    assert replay.lineage(3) == {3}


def test_a_lineage_survives_the_eviction_of_its_links() -> None:
    """The parent named at admission may be gone later; the request's restored source still links."""
    w = Writer()
    w.admit(1, 1000, request="a")
    w.admit(2, 2000, parent=1, request="a")
    w.note(EventKind.LOOKUP, checkpoint=2, boundary=2000, request="b")
    w.remove(2, "cheap")
    w.remove(1, "cheap")
    w.admit(3, 3000, request="b")
    assert w.replay().lineage(3) == {1, 2, 3}
    # A rows-only state cut at 1,500 for a request is nothing that the request extends.
    w.admit(4, 2500, request="c")
    w.note(EventKind.LOOKUP, checkpoint=4, boundary=1500, request="d")
    w.admit(5, 3500, request="d")
    assert w.replay().lineage(5) == {5}


def test_contradictions_are_named() -> None:
    def faults(*events: CacheEvent) -> list[str]:
        return Replay(events).faults

    admit = CacheEvent(1, EventKind.ADMIT, checkpoint=1, boundary=5, n_bytes=10, total_bytes=10)
    assert faults(admit) == []
    assert faults(admit, CacheEvent(3, EventKind.SLOT, total_bytes=10)) == ["event 3 follows 1"]
    assert (
        "twice" in faults(admit, CacheEvent(2, EventKind.ADMIT, checkpoint=1, boundary=5, n_bytes=1, total_bytes=11))[0]
    )
    assert "not there" in faults(CacheEvent(1, EventKind.REMOVE, checkpoint=9))[0]
    assert "10 by the sum" in faults(admit, CacheEvent(2, EventKind.SLOT, total_bytes=11))[0]
    # The log of a ring that wrapped starts in the middle: what it lacks is no contradiction.
    late = Replay([CacheEvent(40, EventKind.REMOVE, checkpoint=9, n_bytes=5, total_bytes=70)])
    assert late.faults == [] and not late.whole
    latched = Replay([admit, CacheEvent(2, EventKind.LATCH, reason="broken")])
    assert latched.faults == [] and latched.latched and latched.total_bytes() == 10
    assert Replay([]).retained() == {} and Replay([]).last_seq == 0


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_history_of_a_cache(data: st.DataObject) -> None:
    """Random admissions, uses and removals: the replayed set equals the one that was, at every number."""
    w = Writer()
    pictures: dict[int, set[int]] = {0: set()}
    for number in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["admit", "admit", "remove", "touch", "slot"]))
        kept = sorted(w.sizes)
        if action == "admit":
            parent = data.draw(st.sampled_from([None, *kept]))
            w.admit(number, data.draw(st.integers(1, 9)), data.draw(st.integers(0, 50)), parent=parent)
        elif action == "remove" and kept:
            w.remove(data.draw(st.sampled_from(kept)), "idle")
        elif action == "touch" and kept:
            w.note(EventKind.TOUCH, checkpoint=data.draw(st.sampled_from(kept)))
        else:
            w.note(EventKind.SLOT)
        pictures[w.log.seq] = set(w.sizes)
    replay = w.replay()
    assert replay.faults == []
    for seq, kept_then in pictures.items():
        assert set(replay.retained(seq)) == kept_then
        assert replay.total_bytes(seq) == sum(r.n_bytes for r in replay.retained(seq).values())
        for boundary in range(1, 10):
            there = any(r.boundary == boundary for r in replay.retained(seq).values())
            assert (replay.explain(boundary, seq=seq).status is Status.PRESENT) == there
