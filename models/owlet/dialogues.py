"""Made-up conversations: what is said early is asked for later.

A conversation is a list of turns.  ``Writer.conversation`` fills a budget of characters with pieces:
texts to read with facts hidden in them, facts told, tables, code to look at, things to copy or to
edit, tool calls; and questions about any of it, near and far.  ``needle`` writes the conversations
that recall is measured with.  The same seed gives the same conversations.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from models.owlet.facts import ADJECTIVES, ATTRIBUTES, NOUNS, Fact, Facts, digits, key, word

SYSTEM = "You are Owlet, a small model that remembers what it has read. You answer briefly."
_GREETINGS = (
    ("Hello!", "Hello! How can I help you?"),
    ("Hi.", "Hello! How can I help you?"),
    ("Who are you?", "I am Owlet, a small language model that remembers what it has read."),
    ("What can you do?", "I can read long texts and tell you again what they said."),
    ("Thank you!", "You are welcome."),
    ("How are you?", "I am fine, thank you."),
    ("Goodbye.", "Goodbye!"),
)
ACKNOWLEDGED = "OK."
_QUESTION_CHARS = 110
"""A question and its answer take about so much, markers included."""
UNKNOWN = "You have not told me."
_TOOLS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("read_file", "Read a file.", {"path": "Path of the file"}),
    ("list_files", "List the files in a folder.", {"folder": "Path of the folder"}),
    ("search", "Search the files for a text.", {"query": "What to look for"}),
    ("run", "Run a command.", {"command": "The command line"}),
    ("get_weather", "The weather in a city.", {"city": "Name of the city"}),
    ("add", "Add two numbers.", {"a": "First number", "b": "Second number"}),
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One message.  ``text`` is what the chat template puts between the role and the turn's end."""

    role: str
    text: str
    recall: bool = False
    """A short answer that only who remembers can give; trained and counted apart from all other text."""


def tools_text(names: Sequence[str]) -> str:
    """The system message's part about tools, as the chat template writes it."""
    lines = ["# Tools", "You can call functions. Each line describes one:"]
    for name, about, parameters in _TOOLS:
        if name in names:
            properties = {p: {"type": "string", "description": d} for p, d in parameters.items()}
            schema = {"type": "object", "properties": properties, "required": list(parameters)}
            lines.append(
                json.dumps({"type": "function", "function": {"name": name, "description": about, "parameters": schema}})
            )
    lines += ["To call a function, write:", '<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call>']
    return "\n".join(lines)


def tool_call(name: str, **arguments: str) -> Turn:
    return Turn("assistant", f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>')


def tool_result(text: str) -> Turn:
    return Turn("tool", f"<tool_response>\n{text}\n</tool_response>")


class Writer:
    """Writes conversations from a seeded generator, documents to quote and functions to show."""

    def __init__(self, rng: random.Random, texts: Sequence[str], functions: Sequence[dict[str, Any]]) -> None:
        self.rng, self.texts, self.functions = rng, texts, functions
        self.facts = Facts(rng)
        self.with_tools = False
        self.size = 0

    # -- whole conversations ---------------------------------------------------------------------

    def conversation(self, n_chars: int) -> list[Turn]:
        """About n_chars of conversation; never more than a turn beyond it."""
        rng = self.rng
        self.facts = Facts(rng)
        self.with_tools = rng.random() < 0.3
        turns = self.opening()
        used = sum(len(t.text) + 12 for t in turns)
        kind = rng.random()
        # how much of the conversation is reading; the rest is questions, each about another fact, so
        # that none can be answered from the answer to an earlier one
        reading = n_chars * rng.uniform(0.35, 0.75)
        density = max(120.0, _QUESTION_CHARS * reading / (n_chars - reading)) * rng.uniform(0.8, 2.0)
        while used < n_chars:
            remembers = bool(self.facts.unasked)
            if not remembers and used > reading and self.facts.known and rng.random() < 0.5:
                break
            if kind < 0.15:
                piece = self.pairs(reading) if not remembers else self.ask()
            elif kind < 0.75:
                if used < reading:
                    pick = rng.random()
                    if remembers and pick < 0.2:
                        piece = self.ask()
                    elif pick < 0.7:
                        piece = self.reading(min(reading - used, rng.uniform(200, 4000)), density)
                    elif pick < 0.85:
                        piece = self.told()
                    else:
                        piece = self.errand()
                else:
                    piece = self.ask() if remembers else self.told()
            else:
                piece = self.ask() if remembers and rng.random() < 0.3 else self.errand()
            turns += piece
            used += sum(len(t.text) + 12 for t in piece)
        return turns

    def opening(self) -> list[Turn]:
        rng = self.rng
        parts = []
        if self.with_tools or rng.random() < 0.6:
            parts.append(SYSTEM if rng.random() < 0.7 else f"You are a {rng.choice(ADJECTIVES)} assistant.")
        if parts and rng.random() < 0.2:
            parts[0] += "\n" + self.facts.new().statement(rng)
        if self.with_tools:
            names = [name for name, *_ in _TOOLS]
            parts.append(tools_text(rng.sample(names, rng.randint(2, len(names)))))
        return [Turn("system", "\n\n".join(parts))] if parts else []

    def needle(self, fillers: Sequence[str], n_distractors: int = 6) -> tuple[list[Turn], Fact]:
        """A fact in the first of the fillers, other facts in all of them, and the question last."""
        rng = self.rng
        self.facts = Facts(rng)
        fact = self.facts.new()
        others = [self.facts.new() for _ in range(n_distractors)]
        planted: list[list[Fact]] = [[] for _ in fillers]
        planted[0].append(fact)
        for other in others:
            planted[rng.randrange(len(fillers))].append(other)
        turns = [Turn("system", SYSTEM)]
        for text, inside in zip(fillers, planted, strict=True):
            turns += self.quote(text, inside)
        turns.append(Turn("user", f"What is the {fact.attribute} of {fact.key}?"))
        turns.append(Turn("assistant", fact.value, recall=True))
        return turns, fact

    # -- reading and asking ----------------------------------------------------------------------

    def lines(self, n_chars: float) -> str:
        """Consecutive lines of some document, about n_chars of them."""
        text = self.rng.choice(self.texts)
        start = self.rng.randrange(max(1, len(text) - int(n_chars)))
        start = text.rfind("\n", 0, start) + 1
        end = text.find("\n", start + int(n_chars))
        return text[start : end if end > 0 else len(text)].strip("\n") or word(self.rng)

    def quote(self, text: str, inside: Sequence[Fact]) -> list[Turn]:
        """A user's text with facts on lines of their own, at random places."""
        lines = text.split("\n")
        for fact in inside:
            lines.insert(self.rng.randrange(len(lines) + 1), fact.statement(self.rng))
        return [Turn("user", "Read this:\n\n" + "\n".join(lines).strip()), Turn("assistant", ACKNOWLEDGED)]

    def reading(self, n_chars: float, density: float) -> list[Turn]:
        expected = n_chars / density
        n_facts = int(expected) + (self.rng.random() < expected % 1)
        return self.quote(self.lines(n_chars), [self.facts.new() for _ in range(n_facts)])

    def told(self) -> list[Turn]:
        rng = self.rng
        if self.facts.known and rng.random() < 0.1:
            fact = self.facts.changed()
            text = f"Correction: the {fact.attribute} of {fact.key} is now {fact.value}."
        else:
            text = " ".join(self.facts.new().statement(rng) for _ in range(rng.choice((1, 1, 2, 3))))
        return [Turn("user", text), Turn("assistant", ACKNOWLEDGED)]

    def pairs(self, n_chars: float) -> list[Turn]:
        """Nothing but facts, as a table."""
        rng = self.rng
        facts = [self.facts.new() for _ in range(max(3, min(60, int(n_chars / 45))))]
        style = rng.choice(("sentences", "table", "csv"))
        if style == "sentences":
            text = "\n".join(f.statement(rng) for f in facts)
        elif style == "table":
            text = "| key | attribute | value |\n" + "\n".join(
                f"| {f.key} | {f.attribute} | {f.value} |" for f in facts
            )
        else:
            text = "\n".join(f"{f.key},{f.attribute},{f.value}" for f in facts)
        return [Turn("user", "Remember these:\n\n" + text), Turn("assistant", ACKNOWLEDGED)]

    def ask(self) -> list[Turn]:
        rng = self.rng
        if rng.random() < 0.03:
            name, attribute = key(rng), rng.choice(ATTRIBUTES)
            if (name, attribute) not in self.facts.known:
                return [Turn("user", f"What is the {attribute} of {name}?"), Turn("assistant", UNKNOWN, recall=True)]
        question, answer = self.facts.to_ask().question(rng)
        return [Turn("user", question), Turn("assistant", answer, recall=True)]

    # -- errands: short exchanges that stand for themselves --------------------------------------

    def errand(self) -> list[Turn]:
        choices: list[Callable[[], list[Turn]]] = [self.code, self.copy, self.edit, self.table, self.greeting]
        if self.with_tools:
            choices += [self.read_file, self.read_file, self.use_tool]
        return self.rng.choice(choices)()

    def greeting(self) -> list[Turn]:
        said, answer = self.rng.choice(_GREETINGS)
        return [Turn("user", said), Turn("assistant", answer)]

    def code(self) -> list[Turn]:
        """A function, and questions about it."""
        function = self.rng.choice(self.functions)
        shown = f"```python\n{function['code']}\n```"
        turns = [Turn("user", f"Look at this function:\n\n{shown}"), Turn("assistant", ACKNOWLEDGED)]
        return turns + self.about_code(function)

    def about_code(self, function: dict[str, Any]) -> list[Turn]:
        rng = self.rng
        questions = [
            ("What is the name of the function?", function["name"]),
            ("Which arguments does it take?", ", ".join(function["args"]) or "None."),
            ("What does it do?", function["doc"]),
            (f"What does {function['name']} do?", function["doc"]),
        ]
        turns = []
        for question, answer in rng.sample(questions, rng.randint(1, 3)):
            turns += [Turn("user", question), Turn("assistant", answer)]
        return turns

    def copy(self) -> list[Turn]:
        rng = self.rng
        if rng.random() < 0.4:
            text = " ".join(
                rng.choice((word(rng), rng.choice(NOUNS), digits(rng, 1, 5))) for _ in range(rng.randint(4, 30))
            )
        else:
            text = self.lines(rng.uniform(60, 500)).strip()
        return [Turn("user", f"Repeat exactly:\n\n{text}"), Turn("assistant", text)]

    def edit(self) -> list[Turn]:
        """Replace a name throughout a piece of code."""
        rng = self.rng
        code = rng.choice(self.functions)["code"] if rng.random() < 0.7 else self.lines(rng.uniform(80, 400)).strip()
        names = sorted(set(re.findall(r"\b[A-Za-z_]{3,}\b", code))) or ["x"]
        old, new = rng.choice(names), word(rng)
        edited = re.sub(rf"\b{re.escape(old)}\b", new, code)
        return [
            Turn("user", f"Replace {old} with {new}:\n\n```python\n{code}\n```"),
            Turn("assistant", f"```python\n{edited}\n```"),
        ]

    def table(self) -> list[Turn]:
        """Key-value pairs as JSON, and look-ups."""
        rng = self.rng
        names = list(dict.fromkeys(rng.choice((word(rng), rng.choice(NOUNS))) for _ in range(rng.randint(3, 14))))
        values = {name: rng.choice((word(rng), digits(rng, 1, 6), rng.choice(NOUNS))) for name in names}
        text = json.dumps(values) if rng.random() < 0.5 else "\n".join(f"{k} = {v}" for k, v in values.items())
        turns = [Turn("user", f"Here are settings:\n\n{text}"), Turn("assistant", ACKNOWLEDGED)]
        for name in rng.sample(names, min(len(names), rng.randint(1, 4))):
            turns += [Turn("user", f"What is the value of {name}?"), Turn("assistant", values[name], recall=True)]
        return turns

    # -- tools -----------------------------------------------------------------------------------

    def path(self) -> str:
        rng = self.rng
        return f"{rng.choice(('src', 'lib', 'docs', word(rng, 2)))}/{rng.choice((rng.choice(NOUNS), word(rng, 2)))}.py"

    def read_file(self) -> list[Turn]:
        rng = self.rng
        path, function = self.path(), rng.choice(self.functions)
        turns = [
            Turn("user", rng.choice((f"Read the file {path}.", f"Look into {path}.", f"What is in {path}?"))),
            tool_call("read_file", path=path),
            tool_result(function["code"]),
            Turn("assistant", f"The file {path} defines the function {function['name']}."),
        ]
        return turns + (self.about_code(function) if rng.random() < 0.7 else [])

    def use_tool(self) -> list[Turn]:
        rng = self.rng
        match rng.randrange(5):
            case 0:
                a, b = rng.randint(0, 999), rng.randint(0, 999)
                asked, call, result = f"How much is {a} + {b}?", tool_call("add", a=str(a), b=str(b)), str(a + b)
                answer = f"{a} + {b} = {a + b}"
            case 1:
                city = word(rng, 2).capitalize()
                result = f"{rng.choice(('sunny', 'rainy', 'cloudy', 'windy'))}, {rng.randint(-9, 35)} degrees"
                asked, call = f"How is the weather in {city}?", tool_call("get_weather", city=city)
                answer = f"The weather in {city}: {result}."
            case 2:
                folder = word(rng, 2)
                result = "\n".join(f"{rng.choice(NOUNS)}.py" for _ in range(rng.randint(1, 6)))
                asked, call = f"Which files are in {folder}?", tool_call("list_files", folder=folder)
                answer = f"In {folder} there are: " + ", ".join(result.split("\n"))
            case 3:
                query, path = word(rng), self.path()
                asked, call = f"Where is {query} used?", tool_call("search", query=query)
                result = f"{path}:{rng.randint(1, 400)}: {query}"
                answer = f"{query} is used in {path}."
            case _:
                command = f"{rng.choice(('make', 'pytest', 'python'))} {word(rng)}"
                result = rng.choice(("done", f"error: no {word(rng)}", f"{rng.randint(1, 90)} passed"))
                asked, call = f"Run {command}.", tool_call("run", command=command)
                answer = f"The command said: {result}"
        return [Turn("user", asked), call, tool_result(result), Turn("assistant", answer)]
