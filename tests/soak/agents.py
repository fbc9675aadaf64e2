"""Agents of a soak: what each sends, how it fails, and what must be true of an answer.

Each conversation carries a fact of its own.  The default model gives facts back, so that an answer
shows whether the state behind it was the right one:

    right      the fact
    unsure     something else, and so does a cold control (``cache_prompt: false``) of the same request
    near tie   something else, the control gives the fact, and where the two part it thought the other token
               nearly as likely: other passes and neighbours round otherwise, and here that shows
    wrong      something else, while the control is sure of the fact; or a fact of another conversation

A client dies at random: before its answer, in the middle of its stream, or by asking for a time limit.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx

Message = dict[str, Any]
Body = dict[str, Any]
_CONSONANTS, _VOWELS = "bdfgklmnprstv", "aeiou"
_TURNS = 6
_DEATHS = 0.15
_NEAR = 0.3
"""Log-probabilities of the default model move by up to 0.13 between a warm and a cold answer."""
_COLD_RUNS = 6
"""So often a cold run is asked about an answer that it does not give, to say whether it always differs."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read a file.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
]


@dataclass
class Tally:
    """What happened, by word; ``wrong`` holds what must not have happened."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    facts: set[str] = field(default_factory=set)
    """Every fact that was ever told to the server."""
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def fail(self, what: str) -> None:
        self.counts["failures"] += 1
        if len(self.wrong) < 50:
            self.wrong.append(what)


@dataclass(frozen=True)
class Control:
    """A cold answer, and the likeliest tokens (text, log-probability) at each of its places, best first."""

    text: str
    likeliest: list[list[tuple[str, float]]]

    def margin(self, other: str) -> float:
        """By how much it preferred its own token where ``other`` parts from it; infinite if that one was far."""
        for (own, best), *rest in self.likeliest:
            if not other.startswith(own):
                return min((best - p for text, p in rest if text and other.startswith(text)), default=math.inf)
            other = other[len(own) :]
        return math.inf


class Died(Exception):
    """The client of this request was killed, as planned."""


class Full(Exception):
    """The server had no room for a stream, and said so."""


def word(draw: random.Random) -> str:
    """A pseudo-word of the kind that the model was trained to give back."""
    return "".join(draw.choice(_CONSONANTS) + draw.choice(_VOWELS) for _ in range(3)) + draw.choice("nstk")


class Agent:
    """Talks for ever; cancelled from outside.  ``draw`` decides everything that is random."""

    name = "agent"

    def __init__(self, http: httpx.AsyncClient, draw: random.Random, tally: Tally) -> None:
        self.http, self.draw, self.tally = http, draw, tally

    async def run(self) -> None:
        while True:
            try:
                await self.session()
                self.tally.counts[f"{self.name} sessions"] += 1
            except Died:
                self.tally.counts["clients killed"] += 1
            except Full:
                await asyncio.sleep(0.3)
            except httpx.HTTPError as error:
                self.tally.fail(f"{self.name}: {type(error).__name__}: {error}")
                await asyncio.sleep(0.2)

    async def session(self) -> None:
        raise NotImplementedError

    # -- requests --------------------------------------------------------------------------------
    def death(self) -> float | None:
        """After how many seconds this request's client dies; None = it lives."""
        return self.draw.expovariate(2.0) if self.draw.random() < _DEATHS else None

    async def whole(self, path: str, body: Body, *, mortal: bool = True) -> Any:
        """The answer's JSON; tried again while the server is full."""
        while True:
            self.tally.counts["requests"] += 1
            call = self.http.post(path, json=body)
            after = self.death() if mortal else None
            if after is None:
                answer = await call
            else:
                try:
                    answer = await asyncio.wait_for(call, after)
                except TimeoutError:
                    raise Died from None
            if answer.status_code == 503:
                self.tally.counts["503"] += 1
                await asyncio.sleep(0.3)
                continue
            if answer.status_code != 200:
                self.tally.fail(f"{path}: status {answer.status_code}: {answer.text[:200]}")
                raise Died
            return answer.json()

    async def events(self, path: str, body: Body) -> AsyncIterator[Any]:
        """Objects of a stream, to its end or to the client's."""
        self.tally.counts["streams"] += 1
        after = self.death()
        loop = asyncio.get_running_loop()
        deadline = None if after is None else loop.time() + after
        async with self.http.stream("POST", path, json={**body, "stream": True}) as stream:
            if stream.status_code == 503:
                self.tally.counts["503"] += 1
                raise Full
            if stream.status_code != 200:
                self.tally.fail(f"{path}: status {stream.status_code}: {(await stream.aread())[:200]!r}")
                raise Died
            ended = False
            async for line in stream.aiter_lines():
                if deadline is not None and loop.time() > deadline:
                    raise Died
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if event.get("error") or event.get("type") == "error":
                        self.tally.fail(f"{path}: error in the stream: {line[:200]}")
                    ended = ended or event.get("type") in ("message_stop", "response.completed", "response.incomplete")
                    yield event
                ended = ended or line == "data: [DONE]"
            if not ended:
                self.tally.fail(f"{path}: the stream broke off")

    # -- what must be true -----------------------------------------------------------------------
    def count(self, usage: Body, timings: Body | None) -> None:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        self.tally.prompt_tokens += usage["prompt_tokens"]
        self.tally.cached_tokens += cached
        if timings is not None and timings["cache_n"] + timings["prompt_n"] != usage["prompt_tokens"]:
            self.tally.fail(f"{self.name}: {timings} do not add up to {usage['prompt_tokens']} prompt tokens")

    async def judge(
        self, answer: str, fact: str, again: Callable[[], Awaitable[str]], cold: Callable[[], Awaitable[Control]]
    ) -> None:
        """Is the answer the fact?  ``again`` asks the same once more, ``cold`` without the cache.

        Where the first cold run knows better, it is a failure; what more runs say of it is for whoever reads that.
        """
        strange = next((f for f in self.tally.facts if f != fact and f in answer), None)
        if strange is not None:
            self.tally.fail(f"{self.name}: {answer!r} holds a fact of another conversation")
            return
        if fact in answer:
            self.tally.counts["facts right"] += 1
            return
        controls = [await cold()]
        if fact not in controls[0].text:
            self.tally.counts["facts unsure"] += 1
            return
        if controls[0].margin(answer) < _NEAR:
            self.tally.counts["facts near a tie"] += 1
            return
        try:
            once_more = await again()
        except Died:
            once_more = "(the client was killed)"
        controls += [await cold() for _ in range(_COLD_RUNS - 1)]
        right = [round(control.margin(answer), 2) for control in controls if fact in control.text]
        self.tally.fail(
            f"{self.name}: {answer!r}, asked again {once_more!r}, instead of {fact!r}, which {len(right)} of"
            f" {_COLD_RUNS} cold runs give by {right}"
        )

    def new_fact(self) -> tuple[str, str]:
        """(the sentence that tells it, the fact)."""
        key, fact = word(self.draw).capitalize(), word(self.draw)
        self.tally.facts.add(fact)
        return f"The code word of project {key} is {fact}.", fact

    def question(self, told: str) -> str:
        return f"What is {told.partition(' is ')[0].replace('The', 'the')}?"


class ChatAgent(Agent):
    """A conversation that grows, is edited, retried and taken up again; streaming."""

    name = "chat"
    path = "/v1/chat/completions"

    async def session(self) -> None:
        told, fact = self.new_fact()
        filler = " ".join(
            f"Rule {i}: {word(self.draw)} before {word(self.draw)}." for i in range(self.draw.randrange(40))
        )
        messages: list[Message] = [
            {"role": "system", "content": f"You answer briefly. {filler}"},
            {"role": "user", "content": f"{told} Remember it."},
        ]
        messages.append({"role": "assistant", "content": await self.answer(messages)})
        for _ in range(self.draw.randrange(1, _TURNS)):
            move = self.draw.random()
            if move < 0.15 and len(messages) > 5:
                del messages[-2:]  # the last turn is taken back
            ask = [*messages, {"role": "user", "content": self.question(told)}]
            try:
                answer = await self.answer(ask)
            except Died:  # the client comes back and sends the same again
                self.tally.counts["clients killed"] += 1
                continue
            await self.judge(answer, fact, lambda ask=ask: self.answer(ask), lambda ask=ask: self.cold(ask))  # type: ignore[misc]
            messages = [*ask, {"role": "assistant", "content": answer}]
            if self.draw.random() < 0.2:
                await asyncio.sleep(self.draw.random())

    def body(self, messages: list[Message]) -> Body:
        return {"messages": messages, "temperature": 0, "max_tokens": 16}

    async def answer(self, messages: list[Message]) -> str:
        text, usage, timings = "", None, None
        body = {**self.body(messages), "stream_options": {"include_usage": True}}
        async with aclosing(self.events(self.path, body)) as events:
            async for event in events:
                for choice in event.get("choices", ()):
                    text += choice["delta"].get("content") or ""
                usage, timings = event.get("usage") or usage, event.get("timings") or timings
        if usage is None:
            self.tally.fail("chat: a stream without usage")
        else:
            self.count(usage, timings)
        return text

    async def cold(self, messages: list[Message]) -> Control:
        self.tally.counts["cold controls"] += 1
        body = {**self.body(messages), "cache_prompt": False, "logprobs": True, "top_logprobs": 20}
        choice = (await self.whole(self.path, body, mortal=False))["choices"][0]
        return Control(
            str(choice["message"]["content"] or ""),
            [[(t["token"], t["logprob"]) for t in p["top_logprobs"]] for p in choice["logprobs"]["content"]],
        )


class ToolAgent(ChatAgent):
    """Calls a tool that it is told to call; the arguments must be JSON of the tool's schema."""

    name = "tools"

    async def session(self) -> None:
        path = f"src/{word(self.draw)}.py"
        messages: list[Message] = [
            {"role": "system", "content": "You are Owlet, a small model that remembers what it has read."},
            {"role": "user", "content": f"Read the file {path}."},
        ]
        body = {**self.body(messages), "tools": TOOLS, "tool_choice": "required", "max_tokens": 48}
        found = await self.whole(self.path, body)
        self.count(found["usage"], found["timings"])
        choice = found["choices"][0]
        calls = choice["message"].get("tool_calls")
        if not calls:
            if choice["finish_reason"] != "length":
                self.tally.fail(f"tools: no call although one is required: {choice}")
            return
        arguments = json.loads(calls[0]["function"]["arguments"])
        if calls[0]["function"]["name"] != "read_file" or not isinstance(arguments.get("path"), str):
            self.tally.fail(f"tools: a call that its schema does not allow: {calls}")
        told, fact = self.new_fact()
        text = "\n".join([f"def {word(self.draw)}(): ..." for _ in range(20)] + [told])
        messages += [
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": calls[0]["id"], "content": text},
            {"role": "user", "content": self.question(told)},
        ]
        answer = await self.answer(messages)
        await self.judge(answer, fact, lambda: self.answer(messages), lambda: self.cold(messages))


class AnthropicAgent(ChatAgent):
    name = "anthropic"

    async def answer(self, messages: list[Message]) -> str:
        body = {"system": messages[0]["content"], "messages": messages[1:], "max_tokens": 16, "temperature": 0}
        text = ""
        async with aclosing(self.events("/v1/messages", body)) as events:
            async for event in events:
                if event["type"] == "content_block_delta":
                    text += event["delta"].get("text", "")
        return text


class ResponsesAgent(ChatAgent):
    name = "responses"

    async def answer(self, messages: list[Message]) -> str:
        body = {
            "instructions": messages[0]["content"],
            "input": messages[1:],
            "max_output_tokens": 16,
            "temperature": 0,
        }
        text = ""
        async with aclosing(self.events("/v1/responses", body)) as events:
            async for event in events:
                if event["type"] == "response.output_text.delta":
                    text += event["delta"]
        return text


class CompletionAgent(Agent):
    """Raw prompts: text and token ids, several choices, limits of time, all sampled."""

    name = "completions"

    async def session(self) -> None:
        text = " ".join(word(self.draw) for _ in range(self.draw.randrange(1, 300)))
        if self.draw.random() < 0.3:
            ids = (await self.whole("/tokenize", {"content": text}))["tokens"]
            await self.whole("/v1/completions", {"prompt": ids, "max_tokens": 8, "n": 2})
        elif self.draw.random() < 0.3:
            self.tally.counts["time limits"] += 1
            answer = await self.http.post("/completion", json={"prompt": text, "n_predict": 400, "timeout": 0.3})
            if answer.status_code not in (200, 503, 504):
                self.tally.fail(f"/completion with a time limit: status {answer.status_code}")
        else:
            async with aclosing(self.events("/v1/completions", {"prompt": text, "max_tokens": 40})) as events:
                async for _ in events:
                    pass


class Watcher(Agent):
    """What a dashboard and a client that knows its next request do."""

    name = "watcher"

    async def session(self) -> None:
        for path in ("/v1/cache", "/slots", "/metrics", "/health", "/v1/cache/events?limit=50"):
            answer = await self.http.get(path)
            if answer.status_code != 200:
                self.tally.fail(f"{path}: status {answer.status_code}")
        found = (await self.http.get("/v1/cache/check")).json()
        if not found["ok"]:
            self.tally.fail(f"check: {found['problems']}")
        body = {"messages": [{"role": "user", "content": word(self.draw)}]}
        answer = await self.http.post("/v1/cache/prefetch", json=body)
        if answer.status_code not in (200, 503):
            self.tally.fail(f"prefetch: status {answer.status_code}")
        await asyncio.sleep(1)


AGENTS = (ChatAgent, ChatAgent, ToolAgent, AnthropicAgent, ResponsesAgent, CompletionAgent, Watcher)
