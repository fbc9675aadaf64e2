"""The workloads, each a readable script over sizes of the full form (``trace.Sizes`` scales them).

Where the shapes come from.  Public traces of coding agents (the Codex runs on SWE-bench Pro published
as Inferact/codex_swebenchpro_traces: 30 calls a task, 12,278 tokens at the start and 80,488 at the end
at the median, about 2,350 appended and 520 generated per call, 93 % of the input cached; the Claude
Code traces of semianalysisai/cc-traces-weka-042026: system prompts of 498 to 7,460 tokens, tools of 890
to 17,300; TraceLab, arXiv 2606.30560: long autonomous loops, long contexts with short outputs, a heavy
tail of tool results, human-paced gaps).  We keep the proportions (a third of the final context at the
start, five appended tokens for each generated one, log-normal appends, seconds between tool calls and
minutes between users) at 32,000 tokens instead of 80,000, which a CPU can play overnight.
"""

from __future__ import annotations

from benchmarks.agent.chat import stripped_thinking
from benchmarks.agent.trace import Ask, Restart, Script, Sizes, Text, Tokens, Workload, join

_TOOL_S, _USER_S = 3.0, 90.0
"""Pauses: a tool runs for seconds, a person thinks for a minute and a half."""


class Conversation:
    """A growing history; ``ask`` is the next request, ``took`` appends what was answered."""

    def __init__(self, name: str, tokens: Tokens) -> None:
        self.name = name
        self.tokens = tokens

    def add(self, tokens: Tokens) -> None:
        self.tokens = join([self.tokens, tokens])

    def ask(self, kind: str, n_answer: int, idle_s: float = _TOOL_S) -> Ask:
        return Ask(self.name, kind, tokens=self.tokens, n_answer=n_answer, idle_s=idle_s)

    def turn(self, new: Tokens, n_answer: int, kind: str = "turn", idle_s: float = _TOOL_S) -> Script:
        """Append, ask, keep the answer."""
        self.add(new)
        (answer,) = yield (self.ask(kind, n_answer, idle_s),)
        self.add(answer)


def coding_agent(sizes: Sizes, restart: Restart | None = None, turns: int = 40) -> Script:
    """(a) One agent: system prompt and tools, file reads, tool results, short user turns."""
    text = Text(sizes.seed)
    talk = Conversation("agent", text.draw("system+tools", sizes.tokens(10_000)))
    n_turns = sizes.turns(turns)
    appended = text.lengths("appends", n_turns, sizes.tokens(380), sizes.tokens(3_000))
    for i in range(n_turns):
        user = i % 5 == 0
        if restart is not None and i == n_turns // 2:
            yield restart
        new = text.draw(f"append {i}", sizes.tokens(40) if user else appended[i])
        kind = "start" if i == 0 else "resumed" if restart is not None and i == n_turns // 2 else "turn"
        yield from talk.turn(new, sizes.answer(100), kind, _USER_S if user else _TOOL_S)


def subagents(sizes: Sizes) -> Script:
    """(b) A parent of 10,000 tokens starts eight subagents that share its first 6,000."""
    text = Text(sizes.seed)
    shared = text.draw("system+tools", sizes.tokens(6_000))
    parent = Conversation("parent", shared)
    for i in range(4):
        yield from parent.turn(text.draw(f"parent {i}", sizes.tokens(900)), sizes.answer(100))
    for k in range(8):
        child = Conversation(f"subagent {k}", shared)
        yield from child.turn(text.draw(f"task {k}", sizes.tokens(500)), sizes.answer(60), "subagent")
        yield from child.turn(text.draw(f"result {k}", sizes.tokens(600)), sizes.answer(60))
        if k % 4 == 3:
            yield from parent.turn(text.draw(f"reports {k}", sizes.tokens(400)), sizes.answer(60))


def rotating(sizes: Sizes) -> Script:
    """(c) Six conversations over two slots, in turn, under a small budget; they share 3,000 tokens."""
    text = Text(sizes.seed)
    shared = text.draw("system", sizes.tokens(3_000))
    talks = [Conversation(f"conversation {k}", shared) for k in range(6)]
    for i in range(6):
        for k, talk in enumerate(talks):
            new = text.draw(f"turn {k} {i}", sizes.tokens(2_000 if i == 0 else 500))
            yield from talk.turn(new, sizes.answer(60), "start" if i == 0 else "turn", _USER_S)


def edits(sizes: Sizes) -> Script:
    """(d) A conversation of 12,000 tokens; edits near its end, in the middle and near its start, each undone."""
    text = Text(sizes.seed)
    trunk = Conversation("trunk", text.draw("system", sizes.tokens(2_000)))
    starts: list[int] = []
    for i in range(10):
        starts.append(len(trunk.tokens))
        yield from trunk.turn(text.draw(f"turn {i}", sizes.tokens(900)), sizes.answer(100))
    for name, at in (("near the end", 9), ("in the middle", 5), ("near the start", 1)):
        branch = Conversation(f"edit {name}", trunk.tokens[: starts[at]])
        yield from branch.turn(text.draw(f"edit {name}", sizes.tokens(900)), sizes.answer(100), "edit", _USER_S)
        yield from branch.turn(text.draw(f"after {name}", sizes.tokens(300)), sizes.answer(100))
        yield from trunk.turn(text.draw(f"undo {name}", sizes.tokens(200)), sizes.answer(100), "undo", _USER_S)


def side_requests(sizes: Sizes) -> Script:
    """(f) Between the turns of one conversation, its client asks for a title and for summaries of it."""
    text = Text(sizes.seed)
    talk = Conversation("main", text.draw("system", sizes.tokens(4_000)))
    for i in range(sizes.turns(10)):
        new = text.draw(f"turn {i}", sizes.tokens(600))
        yield from talk.turn(new, sizes.answer(80), "start" if i == 0 else "turn")
        if i % 3 == 0:
            title = Conversation("title", join([text.draw("title system", sizes.tokens(150)), new]))
            yield (title.ask("title", sizes.answer(12)),)
        if i % 3 == 1:
            summary = Conversation("summary", talk.tokens)
            summary.add(text.draw("summarise", sizes.tokens(60)))
            yield (summary.ask("summary", sizes.answer(80)),)


def compaction(sizes: Sizes) -> Script:
    """(g) A conversation fills its context, is summarised, and goes on from the summary; twice."""
    text = Text(sizes.seed)
    system = text.draw("system+tools", sizes.tokens(4_000))
    talk = Conversation("round 0", system)
    for k in range(3):
        for i in range(8):
            yield from talk.turn(text.draw(f"turn {k} {i}", sizes.tokens(800)), sizes.answer(80))
        talk.add(text.draw("summarise", sizes.tokens(60)))
        (summary,) = yield (talk.ask("summary", sizes.answer(400), _USER_S),)
        talk = Conversation(f"round {k + 1}", join([system, text.draw("so far", sizes.tokens(20)), summary]))


def concurrent_starts(sizes: Sizes) -> Script:
    """(i) Four conversations with one system prompt start at the same moment, then go on."""
    text = Text(sizes.seed)
    system = text.draw("system+tools", sizes.tokens(6_000))
    talks = [Conversation(f"start {k}", system) for k in range(4)]
    for i in range(3):
        for k, talk in enumerate(talks):
            talk.add(text.draw(f"own {k} {i}", sizes.tokens(300)))
        answers = yield tuple(talk.ask("start" if i == 0 else "turn", sizes.answer(40)) for talk in talks)
        for talk, answer in zip(talks, answers, strict=True):
            talk.add(answer)


def restart_clean(sizes: Sizes) -> Script:
    """(h) A clean restart in the middle of (a)."""
    yield from coding_agent(sizes, Restart(kill=False), turns=20)


def restart_killed(sizes: Sizes) -> Script:
    """(h) The server is killed in the middle of (a)."""
    yield from coding_agent(sizes, Restart(kill=True), turns=20)


WORKLOADS: tuple[Workload, ...] = (
    Workload("agent", "a", "one coding agent", coding_agent, 1, 3),
    Workload("subagents", "b", "parent with 8 subagents", subagents, 2, 4),
    Workload("rotating", "c", "6 conversations, 2 slots", rotating, 2, 4),
    Workload("edits", "d", "edits and undo", edits, 1, 4),
    Workload("thinking", "e", "thinking stripped", stripped_thinking, 1, 4),
    Workload("side", "f", "titles and summaries", side_requests, 1, 4),
    Workload("compaction", "g", "compaction, twice", compaction, 1, 4),
    Workload("restart", "h", "restart", restart_clean, 1, 3, disk=True),
    Workload("kill", "h9", "kill -9", restart_killed, 1, 3, disk=True),
    Workload("starts", "i", "4 starts at once", concurrent_starts, 4, 4),
)


def by_name(names: str | None) -> tuple[Workload, ...]:
    """Workloads of a comma-separated list of names or letters; all when None.  ValueError names a wrong one."""
    if names is None:
        return WORKLOADS
    found = []
    for name in names.split(","):
        matches = [w for w in WORKLOADS if name.strip() in (w.name, w.letter)]
        if not matches:
            raise ValueError(f"no workload {name!r}; there are {', '.join(w.name for w in WORKLOADS)}")
        found += matches
    return tuple(found)
