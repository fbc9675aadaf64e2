"""The session that ``gufo demo`` plays: what a coding agent sends, request by request.

    system prompt with tools ─► file ─► file ─► question ─► edit of an earlier message
          └─► subagent ─► subagent (same prompt, other tasks)       ─► question ─► restart ─► question

The agent is real, if small: the model decides to call the tool, and its answers go into the history.
Only where it does not call the tool does the script do so, or the session would be another one each
time.  The files are this package's own, with a note in each that is asked for later.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Message = dict[str, Any]
_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Request:
    title: str
    messages: list[Message]
    expected: str | None = None
    """The fact that the answer should be."""


@dataclass(frozen=True, slots=True)
class Restart:
    title: str


Session = Generator[Request | Restart, Message, None]
"""Gives the next thing to do; takes the assistant's message (after a Restart: anything)."""


@dataclass(frozen=True, slots=True)
class Note:
    """A file and the fact that is written into the middle of it."""

    path: str
    key: str
    attribute: str
    value: str

    @property
    def question(self) -> str:
        return f"What is the {self.attribute} of {self.key}?"

    def text(self, n_lines: int) -> str:
        lines = (_PACKAGE / self.path).read_text(encoding="utf-8").split("\n")[:n_lines]
        lines.insert(len(lines) // 2, f"The {self.attribute} of {self.key} is {self.value}.")
        return "\n".join(lines)


NOTES = (
    Note("core/errors.py", "project Kea", "code word", "drounast"),
    Note("backend/base.py", "node-382", "port", "40721"),
    Note("cache/types.py", "the amber heron", "city", "Plinvoss"),
    Note("engine/types.py", "team-57", "password", "glaisk-9042"),
)


def _tool(name: str, about: str, **parameters: str) -> dict[str, Any]:
    properties = {p: {"type": "string", "description": d} for p, d in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


TOOLS = (
    _tool("read_file", "Read a file.", path="Path of the file"),
    _tool("list_files", "List the files in a folder.", folder="Path of the folder"),
    _tool("search", "Search the files for a text.", query="What to look for"),
    _tool("run", "Run a command.", command="The command line"),
)
_RULES = (
    "Read a file before you speak about it.",
    "Change as little as the task needs, and say what you changed.",
    "Run the tests after every change; a change without a test is not done.",
    "Name files by their path from the top of the project.",
    "Keep answers short. Do not repeat what the user can see.",
    "Ask when two readings of a task are possible, and propose one of them.",
    "Never write outside the project's folder, and never delete what you did not make.",
    "Prefer the standard library; a new dependency needs a reason.",
)


def system_prompt(n_repeats: int) -> Message:
    """As long as those of real agents in proportion to what they read: some thousand characters."""
    rules = "\n".join(f"{i + 1}. {_RULES[i % len(_RULES)]}" for i in range(len(_RULES) * n_repeats))
    text = f"You are Owlet, a small model that remembers what it has read. You answer briefly.\n\nRules:\n{rules}"
    return {"role": "system", "content": text}


def session(n_files: int = 3, n_lines: int = 80, n_rules: int = 4) -> Session:
    """n_files >= 2 files of n_lines each; n_rules rounds of rules in the system prompt."""
    system, notes = system_prompt(n_rules), NOTES[:n_files]
    history = [system]
    before_last: list[Message] = []
    for i, note in enumerate(notes):
        before_last = list(history)
        history = [*history, {"role": "user", "content": f"Read the file {note.path}."}]
        title = "first request: system prompt, tools, task" if i == 0 else "next task"
        called = _called((yield Request(title, history)), note.path)
        history = [*history, called, _result(called, note.text(n_lines))]
        history = [*history, (yield Request(f"result of read_file {note.path}", history))]
    first, last = notes[0], notes[-1]
    asked = [*history, {"role": "user", "content": first.question}]
    history = [*asked, (yield Request("question about the first file", asked, first.value))]

    edited = [*before_last, {"role": "user", "content": f"Look into {last.path}."}]
    called = _called((yield Request("edit: the last task in other words", edited)), last.path)
    edited = [*edited, called, _result(called, last.text(n_lines))]
    history = [*edited, (yield Request("the file again, after the edit", edited))]

    for i, query in enumerate(("lease", "manifest")):
        task = [system, {"role": "user", "content": f"Where is {query} used?"}]
        yield Request(f"subagent {i + 1}: same system prompt and tools", task)

    asked = [*history, {"role": "user", "content": notes[1].question}]
    history = [*asked, (yield Request("the agent again: question", asked, notes[1].value))]
    yield Restart("the server is stopped and started again")
    asked = [*history, {"role": "user", "content": last.question}]
    yield Request("question after the restart", asked, last.value)


def _called(answer: Message, path: str) -> Message:
    """The model's own call of read_file, or the script's."""
    if answer.get("tool_calls"):
        return answer
    call = {"name": "read_file", "arguments": json.dumps({"path": path})}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
    }


def _result(called: Message, text: str) -> Message:
    return {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": text}
