"""(e) A client that does not send reasoning back: messages, so that the template decides the tokens.

The model's answers are asked for at a fixed length and thrown away; the history holds scripted ones,
so every server gets the same prompts.  That is what a client does to a model that thinks: what was
generated is longer than what comes back.  Between user turns the agent works in a tool loop, during
which templates keep reasoning.
"""

from __future__ import annotations

import random

from benchmarks.agent.trace import Ask, Message, Script, Sizes

_TEXT = """
cache state token model prompt reads writes the slot of row chunk tail index path tree name file line test value when
then else for each while after before between keeps drops moves copies checks fails works returns asks says
"""
_WORDS = _TEXT.split()


def prose(seed: int, label: str, n_chars: int) -> str:
    """Seeded words, n_chars long; small vocabularies split them into about one token per two letters."""
    rng = random.Random(f"{seed} {label}")
    words: list[str] = []
    length = 0
    while length < n_chars:
        words.append(rng.choice(_WORDS))
        length += len(words[-1]) + 1
    return " ".join(words)[:n_chars].rstrip()


def stripped_thinking(sizes: Sizes) -> Script:
    """(e) Ten user turns with a tool call in each; reasoning is generated and never sent back."""

    def text(label: str, n: int) -> str:
        return prose(sizes.seed, label, 2 * sizes.tokens(n))

    history: list[Message] = [{"role": "system", "content": text("system", 1_500)}]
    for i in range(sizes.turns(10)):
        history.append({"role": "user", "content": text(f"user {i}", 120)})
        yield (_ask(history, "start" if i == 0 else "turn", sizes, 90.0),)
        call = {"name": "read_file", "arguments": f'{{"path": "file_{i}.py"}}'}
        history.append(
            {
                "role": "assistant",
                "content": text(f"plan {i}", 30),
                "tool_calls": [{"id": f"call_{i}", "type": "function", "function": call}],
            }
        )
        history.append({"role": "tool", "tool_call_id": f"call_{i}", "content": text(f"file {i}", 500)})
        yield (_ask(history, "turn", sizes, 3.0),)
        history.append({"role": "assistant", "content": text(f"answer {i}", 80)})


def _ask(history: list[Message], kind: str, sizes: Sizes, idle_s: float) -> Ask:
    return Ask("thinking", kind, messages=tuple(history), n_answer=sizes.answer(150), idle_s=idle_s)
