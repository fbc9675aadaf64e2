"""Text of tokens: complete UTF-8 only, stop strings found wherever the tokens cut them, nothing held too long."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gufo_gguf.backend.detok import Detokenizer


def run(pieces: list[bytes], stops: list[str]) -> tuple[list[str], str, str | None]:
    """Text sent per token, text of the flush, the stop string found."""
    detok = Detokenizer(lambda t: pieces[t], stops)
    sent = [detok.feed(i) for i in range(len(pieces))]
    return sent, detok.flush(), detok.stop_text


def decoded(raw: bytes) -> str:
    """Everything that is certain of raw: a cut sequence at the end is missing, a broken one is U+FFFD."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(raw)


def test_a_character_over_three_tokens_comes_once_and_whole() -> None:
    face = "😀".encode()
    assert run([b"a", face[:1], face[1:3], face[3:], b"b"], [])[0] == ["a", "", "", "😀", "b"]


def test_a_cut_character_at_the_end_is_dropped() -> None:
    assert run([b"ok", "é".encode()[:1]], [])[:2] == (["ok", ""], "")


@pytest.mark.parametrize("broken", [b"\xff", b"\xc3\x28", b"\xe2\x28\xa1", b"\x80"])
def test_broken_bytes_become_replacement_characters(broken: bytes) -> None:
    sent, rest, _ = run([b"<", broken, b">"], [])
    assert "".join(sent) + rest == "<" + broken.decode("utf-8", "replace") + ">"


def test_stop_string_across_tokens() -> None:
    assert run([b"Hello ", b"EN", b"D", b" more"], ["END"]) == (["Hello ", "", "", ""], "", "END")


def test_stop_string_within_one_token_keeps_what_is_before_it() -> None:
    assert run([b"one STOP two"], ["STOP"]) == (["one "], "", "STOP")


def test_false_alarm_is_sent_at_once() -> None:
    assert run([b"E", b"N", b"X"], ["END"])[0] == ["", "", "ENX"]


def test_false_alarm_may_hide_a_new_beginning() -> None:
    assert run([b"EN", b"EN", b"D"], ["END"]) == (["", "EN", ""], "", "END")


def test_what_is_held_is_sent_when_the_generation_ends() -> None:
    assert run([b"the EN"], ["END"])[:2] == (["the "], "EN")


def test_the_earliest_stop_wins_and_the_longer_of_two_at_one_place() -> None:
    assert run([b"a X b Y"], ["Y", "X"]) == (["a "], "", "X")
    assert run([b"a ENDE"], ["END", "ENDE"]) == (["a "], "", "ENDE")


def test_stop_string_of_characters_that_are_cut() -> None:
    raw = "天地".encode()
    assert run([b"x" + raw[:2], raw[2:4], raw[4:], b"y"], ["天地"]) == (["x", "", "", ""], "", "天地")


def test_empty_stop_strings_are_ignored_and_silent_tokens_show_nothing() -> None:
    assert run([b"", b"a", b""], [""]) == (["", "a", ""], "", None)


PIECES = st.lists(
    st.one_of(
        st.sampled_from(["a", "b", "ab", "ba", "aab", "é", "天", "😀", ""]).map(str.encode),
        st.binary(max_size=3),
    ),
    max_size=20,
)
STOPS = st.lists(st.text("abé天", min_size=1, max_size=4), max_size=3)


@given(pieces=PIECES)
def test_without_stops_every_certain_character_is_sent_at_once(pieces: list[bytes]) -> None:
    sent, rest, _ = run(pieces, [])
    for n in range(1, len(pieces) + 1):
        assert "".join(sent[:n]) == decoded(b"".join(pieces[:n]))
    assert rest == ""


@given(pieces=PIECES, stops=STOPS)
def test_against_the_slow_definition(pieces: list[bytes], stops: list[str]) -> None:
    """After each token: all text up to the first stop, or all but the longest end that begins one."""
    sent, rest, stop_text = run(pieces, stops)
    expected, stopped = "", None
    for n in range(1, len(pieces) + 1):
        if stopped is None:
            text = decoded(b"".join(pieces[:n]))
            places = [(text.index(s), -len(s), s) for s in stops if s in text]
            if places:
                at, _, stopped = min(places)
                expected = text[:at]
            else:
                held = max(
                    (k for s in stops for k in range(1, len(s)) if text.endswith(s[:k])),
                    default=0,
                )
                expected = text[: len(text) - held]
        assert "".join(sent[:n]) == expected
    assert stop_text == stopped
    everything = decoded(b"".join(pieces))
    assert "".join(sent) + rest == (expected if stopped is not None else everything)
    assert not any(s in "".join(sent) + rest for s in stops)


@given(pieces=PIECES, stops=STOPS)
def test_cuts_do_not_matter(pieces: list[bytes], stops: list[str]) -> None:
    """Byte by byte gives the text of whole tokens, unless a token held two stops."""
    raw = b"".join(pieces)
    whole, rest, stop_text = run(pieces, stops)
    single, single_rest, single_stop = run([bytes([b]) for b in raw], stops)
    if stop_text is None:
        assert single_stop is None
        assert "".join(single) + single_rest == "".join(whole) + rest
    else:
        assert single_stop is not None
        text = decoded(raw)
        assert text.startswith("".join(single))
        assert text.startswith("".join(whole))
