"""``gufo chat``: talk to a model in the terminal, and see under each answer what the cache did.

    gufo chat model.gguf            loads the model into this process
    gufo chat --url http://…        talks to a running server

Without a terminal (a pipe), each line of the input is a message and only answers are printed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from gufo_gguf.cli.client import Client
from gufo_gguf.cli.flags import (
    Chosen,
    ClientKey,
    MinP,
    NPredict,
    Reasoning,
    Seed,
    Temp,
    TopK,
    TopP,
    on_or_off,
    option,
    read_keys,
    sampling,
    with_model,
)
from gufo_gguf.cli.sizes import show_bytes
from gufo_gguf.cli.talk import LocalTalker, RemoteTalker, Talker, cache_line
from gufo_gguf.core.errors import ConfigError, GufoError
from gufo_gguf.engine.types import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

_SERVER = "Server"
_DEFAULT = SamplingParams()
HELP = """\
/undo          take the last question and its answer back
/retry         ask the last question again
/edit TEXT     ask TEXT instead of the last question
/keep          keep the conversation's state as it is now
/back          return to what /keep kept, or to the start
/cache         what the cache holds
/quit          (or Ctrl-D) leave; Ctrl-C stops an answer
A line that ends in \\ goes on in the next."""


@with_model()
def chat(
    chosen: Chosen,
    url: Annotated[str | None, option("--url", help="A running server instead.", panel=_SERVER)] = None,
    api_key: ClientKey = None,
    system: Annotated[str, option("--system", help="System message.")] = "",
    seed: Seed = -1,
    temp: Temp = _DEFAULT.temperature,
    top_k: TopK = _DEFAULT.top_k,
    top_p: TopP = _DEFAULT.top_p,
    min_p: MinP = _DEFAULT.min_p,
    n_predict: NPredict = -1,
    reasoning: Reasoning = "auto",
) -> None:
    """Talk to a model, here or on a server."""
    if chosen.named and url is not None:
        raise ConfigError("name a model or --url, not both")
    sampled = sampling(temp, top_k, top_p, min_p, seed)
    thinking = on_or_off("--reasoning", reasoning) is not False
    with ExitStack() as stack:
        if url is not None:
            key = next(iter(read_keys(api_key or [], None)), "")
            talker: Talker = _remote(Client(url, key), system, sampled, n_predict, thinking)
        else:
            from gufo_gguf.api import Engine
            from gufo_gguf.cli.console import loading_bar

            path = chosen.path()
            bar, on_progress = loading_bar(path.name)
            with bar:
                engine = Engine(path, progress=on_progress, **chosen.flags)
            stack.callback(engine.close)
            start: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
            conversation = engine.conversation(
                start,
                sampling=sampled,
                max_tokens=None if n_predict < 0 else n_predict,
                thinking=thinking,
            )
            talker = LocalTalker(conversation, engine.model_id)
        _Session(talker).run()


def _remote(client: Client, system: str, sampled: SamplingParams, n_predict: int, thinking: bool) -> RemoteTalker:
    models = client.get("/v1/models").get("data") or [{"id": "default"}]
    options: dict[str, Any] = {name: getattr(sampled, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    if sampled.seed is not None:
        options["seed"] = sampled.seed
    if n_predict >= 0:
        options["max_tokens"] = n_predict
    if not thinking:
        options["chat_template_kwargs"] = {"enable_thinking": False}
    start = [{"role": "system", "content": system}] if system else []
    return RemoteTalker(client, str(models[0]["id"]), start, options)


class _Session:
    """One terminal conversation: reads lines, shows answers, remembers where turns began."""

    def __init__(self, talker: Talker) -> None:
        from rich.console import Console

        self._talker = talker
        self._console: Console = Console(highlight=False)
        self._interactive = sys.stdin.isatty()
        self._turns: list[object] = []
        """Where the conversation stood before each turn."""
        self._kept: object = talker.place()
        self._commands: dict[str, Callable[[str], None]] = {
            "/undo": lambda _: self._undo(),
            "/retry": lambda _: self._again(None),
            "/edit": self._again,
            "/keep": lambda _: self._keep(),
            "/back": lambda _: self._back(),
            "/cache": lambda _: self._show_cache(),
            "/help": lambda _: self._say(HELP),
        }

    def run(self) -> None:
        if self._interactive:
            import readline  # noqa: F401 - line editing and history for input()

            self._say(f"{self._talker.name}: /help shows the commands, Ctrl-D leaves")
        for line in self._lines():
            word, _, rest = line.partition(" ")
            if word in ("/quit", "/exit"):
                return
            try:
                if word in self._commands:
                    self._commands[word](rest.strip())
                elif word.startswith("/"):
                    self._say(f"there is no {word}; /help shows the commands")
                else:
                    self._ask(line)
            except GufoError as error:
                if not self._interactive:
                    raise
                self._console.print(f"[red]{_plain(str(error))}[/]")

    def _lines(self) -> Iterator[str]:
        """Messages and commands; a line that ends in a backslash goes on in the next."""
        held: list[str] = []
        while True:
            try:
                line = input(("  " if held else "> ") if self._interactive else "")
            except EOFError:
                return
            except KeyboardInterrupt:
                if not held:
                    return
                held = []
                continue
            if line.endswith("\\"):
                held.append(line[:-1])
                continue
            whole = "\n".join([*held, line]).strip()
            held = []
            if whole:
                yield whole

    def _ask(self, text: str) -> None:
        before = self._talker.place()
        reasoning = False
        try:
            with _waiting(self._console, self._interactive) as first:
                for piece in self._talker.ask(text):
                    first()
                    if piece.reasoning and not self._interactive:
                        continue
                    if reasoning and not piece.reasoning:
                        self._console.print()
                    reasoning = piece.reasoning
                    self._console.print(_plain(piece.text), end="", style="dim" if reasoning else None, soft_wrap=True)
        except KeyboardInterrupt:
            self._console.print("\n[dim]stopped; this turn is forgotten[/]")
            return
        self._console.print()
        self._turns.append(before)
        figures = self._talker.figures
        if figures is not None and self._interactive:
            self._say(cache_line(figures))

    # -- commands --------------------------------------------------------------------------------
    def _undo(self) -> None:
        if not self._turns:
            self._say("nothing to take back")
            return
        self._talker.go_back(self._turns.pop())
        self._say("taken back")

    def _again(self, text: str | None) -> None:
        question = text or self._talker.last_question()
        if not self._turns or question is None:
            self._say("nothing to ask again")
            return
        self._talker.go_back(self._turns.pop())
        self._ask(question)

    def _keep(self) -> None:
        self._kept, words = self._talker.keep()
        self._say(words)

    def _back(self) -> None:
        self._talker.go_back(self._kept)
        self._turns = []
        self._say("back")

    def _show_cache(self) -> None:
        status = self._talker.cache()
        if not status.get("enabled", True):
            self._say(f"no cache: {status.get('uncacheable') or 'switched off'}")
            return
        ram, disk = status.get("ram"), status.get("disk")
        for row in status.get("checkpoints", ()):
            self._say(f"{row['n_tokens']:>9,} tokens  {row['origin']:<10}  {show_bytes(row['own_bytes'])} of its own")
        if ram:
            self._say(f"RAM {show_bytes(ram['unique_bytes'])} of {show_bytes(ram['budget_bytes'])}")
        if disk:
            self._say(f"disk {show_bytes(disk['used_bytes'])} of {show_bytes(disk['budget_bytes'])}")

    def _say(self, text: str) -> None:
        self._console.print(_plain(text), style="dim", soft_wrap=True)


def _plain(text: str) -> str:
    """A model's text for a terminal: neither markup nor control characters but line ends and tabs."""
    from rich.markup import escape

    return escape("".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text))


@contextmanager
def _waiting(console: Console, shown: bool) -> Iterator[Callable[[], None]]:
    """A sign of life until the first piece of the answer."""
    if not shown:
        yield lambda: None
        return
    status = console.status("reading")
    status.start()
    try:
        yield status.stop
    finally:
        status.stop()
