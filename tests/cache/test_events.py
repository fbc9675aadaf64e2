"""Cache events: numbered, bounded, one line of JSON each, and no prompt text anywhere."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gufo_gguf.cache.events import CacheEvent, EventKind, EventLog, decode, decode_lines, encode
from gufo_gguf.cache.types import Origin, Tier

numbers = st.integers(0, 1 << 50)
events = st.builds(
    CacheEvent,
    seq=numbers,
    kind=st.sampled_from(EventKind),
    reason=st.text(max_size=20),
    boundary=numbers,
    n_bytes=numbers,
    total_bytes=numbers,
    checkpoint=st.none() | numbers,
    parent=st.none() | numbers,
    origin=st.none() | st.sampled_from(Origin),
    tier=st.none() | st.sampled_from(Tier),
    slot=st.none() | st.integers(0, 64),
    common_prefix=numbers,
    points=st.lists(numbers, max_size=4).map(tuple),
    request=st.text(max_size=20),
)


@settings(max_examples=150, deadline=None)
@given(event=events)
def test_one_line_and_back(event: CacheEvent) -> None:
    line = encode(event)
    assert "\n" not in line and json.loads(line)["v"] == 1
    assert decode(line) == event
    assert decode(line.encode()) == event


def test_the_line_of_an_admission() -> None:
    log = EventLog()
    log.request = "req-1"
    event = log.emit(
        EventKind.ADMIT, checkpoint=7, boundary=6000, origin=Origin.LEARNED, parent=3, n_bytes=10, total_bytes=90
    )
    assert encode(event) == (
        '{"v":1,"seq":1,"kind":"admit","boundary":6000,"n_bytes":10,"total_bytes":90,'
        '"checkpoint":7,"parent":3,"origin":"learned","request":"req-1"}'
    )


def test_the_ring_keeps_the_newest_and_numbers_go_on() -> None:
    log = EventLog(capacity=3)
    for n in range(5):
        log.emit(EventKind.TOUCH, checkpoint=n)
    assert log.seq == 5
    assert [e.seq for e in log.newest()] == [3, 4, 5]
    assert [e.seq for e in log.newest(2)] == [4, 5]
    assert log.newest(0) == ()
    assert [e.seq for e in log.since(3)] == [4, 5]
    assert log.since(5) == ()


def test_sinks_see_everything_and_a_broken_one_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []
    calls: list[int] = []

    def broken(event: CacheEvent) -> None:
        calls.append(event.seq)
        raise OSError("no space left on device")

    log = EventLog(capacity=1, sinks=[broken, lambda e: seen.append(e.seq)])
    for _ in range(3):
        log.emit(EventKind.SLOT)
    assert seen == [1, 2, 3]
    assert calls == [1]
    assert "dropped" in caplog.text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "JSON"),
        ("{", "JSON"),
        ("[1]", "object"),
        ('{"seq":1,"kind":"admit"}', "format"),
        ('{"v":2,"seq":1,"kind":"admit"}', "format 2"),
        ('{"v":1,"kind":"admit"}', "missing fields: seq"),
        ('{"v":1,"seq":1}', "missing fields: kind"),
        ('{"v":1,"seq":1,"kind":"admit","tokens":[1]}', "unknown fields: tokens"),
        ('{"v":1,"seq":1,"kind":"bake"}', "bake"),
        ('{"v":1,"seq":"1","kind":"admit"}', "seq is not an integer"),
        ('{"v":1,"seq":true,"kind":"admit"}', "seq is not an integer"),
        ('{"v":1,"seq":1,"kind":"admit","reason":5}', "reason is not a string"),
        ('{"v":1,"seq":1,"kind":"plan","points":[1,"2"]}', "points"),
        ('{"v":1,"seq":1,"kind":"admit","tier":"moon"}', "moon"),
    ],
)
def test_bad_lines_are_named(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(line)


def test_a_file_cut_off_by_a_crash() -> None:
    good = [encode(CacheEvent(n, EventKind.TOUCH)) + "\n" for n in (1, 2)]
    assert [e.seq for e in decode_lines([*good, '{"v":1,"se'])] == [1, 2]
    assert [e.seq for e in decode_lines([good[0], "\n", good[1]])] == [1, 2]
    for bad in ([good[0], "garbage\n"], [good[0], "garbage", good[1]]):
        with pytest.raises(ValueError, match="line 2"):
            list(decode_lines(bad))


def test_no_field_can_carry_prompt_text() -> None:
    """Strings are reasons and request ids; lists are boundaries.  A new field has to be thought about."""
    hints: dict[str, Any] = get_type_hints(CacheEvent)
    assert sorted(n for n, t in hints.items() if t is str) == ["reason", "request"]
    assert set(hints) == {
        "seq", "kind", "reason", "boundary", "n_bytes", "total_bytes", "checkpoint", "parent", "origin", "tier",
        "slot", "common_prefix", "points", "request",
    }  # fmt: skip
