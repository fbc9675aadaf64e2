"""Chunks and files: against two plain facts, under random calls."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gufo_gguf.store.bindings import Bindings

CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("bind"), st.integers(0, 4), st.sampled_from("abc")),
        st.tuples(st.just("unbind"), st.integers(0, 4)),
        st.tuples(st.just("forget"), st.sampled_from("abc")),
    )
)


@given(CALLS)
def test_as_a_plain_table(calls: list[tuple[object, ...]]) -> None:
    bindings, table = Bindings(), {}
    for call, *arguments in calls:
        getattr(bindings, str(call))(*arguments)
        if call == "bind":
            table[arguments[0]] = arguments[1]
        elif call == "unbind":
            table.pop(arguments[0], None)
        else:
            table = {chunk: key for chunk, key in table.items() if key != arguments[0]}
        assert [bindings.key_of(chunk) for chunk in range(5)] == [table.get(chunk) for chunk in range(5)]
        assert sorted(bindings.files()) == sorted(set(table.values()))
        assert len(bindings) == len(table)


def test_one_chunk_in_two_files_of_which_both_go() -> None:
    bindings = Bindings()
    bindings.bind(1, "a")
    bindings.bind(1, "b")
    for key in bindings.files():
        bindings.forget(key)
    assert len(bindings) == 0 and not list(bindings.files())
