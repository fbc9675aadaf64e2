"""A scripted engine: what the HTTP layer talks to when no model is there.

The vocabulary is bytes plus a few special tokens, the template is ChatML, and an answer is whatever
the script says.  It keeps the prompts it has seen, so that reuse figures are real for it: cached
tokens are the longest stable boundary of an earlier prompt that begins this one.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gufo_gguf.backend.base import BackendInfo
from gufo_gguf.backend.chat import ChatInput, Rendered, TemplateInfo
from gufo_gguf.backend.message_parser import ChatMessage, MessageDelta, ToolCall
from gufo_gguf.cache.types import MissReason, RequestReport, ReuseSource, Tokens
from gufo_gguf.core.errors import ContextLengthExceeded, Overloaded, RequestError
from gufo_gguf.engine.prefetch import Prefetched
from gufo_gguf.engine.types import (
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    PrefillProgress,
    TextDelta,
    Timings,
    TokenLogprob,
    as_tokens,
)

BOS, EOS, START, END = 256, 257, 258, 259
SPECIAL = {"<s>": BOS, "</s>": EOS, "<|im_start|>": START, "<|im_end|>": END}
N_VOCAB = 260
_SPLIT = re.compile("|".join(re.escape(text) for text in SPECIAL))


class StandinVocab:
    n_vocab = N_VOCAB
    bos, eos, eot, add_bos = BOS, EOS, END, True

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        out = [BOS] if add_special else []
        at = 0
        for match in _SPLIT.finditer(text) if parse_special else ():
            out += text[at : match.start()].encode()
            out.append(SPECIAL[match.group()])
            at = match.end()
        return out + list(text[at:].encode())

    def piece(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else next(t for t, i in SPECIAL.items() if i == token).encode()

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self.piece(int(t)) for t in tokens)

    def is_eog(self, token: int) -> bool:
        return token in (EOS, END)


# -- chat ----------------------------------------------------------------------------------------
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


def _held(text: str, tag: str) -> int:
    """Length of the end of the text that may be the beginning of the tag."""
    return next((n for n in range(min(len(tag), len(text)), 0, -1) if text.endswith(tag[:n])), 0)


class StandinParser:
    """``<think>…</think>``, ``<tool_call>{"name", "arguments"}</tool_call>``, and content."""

    def __init__(self) -> None:
        self.text = ""
        self.sent = ChatMessage("", "", (), False)
        self.message = self.sent
        self.closed = False

    def feed(self, text: str, *, final: bool = False) -> list[MessageDelta]:
        assert not self.closed
        self.text += text
        self.message = self._parse(final)
        out: list[MessageDelta] = []
        reasoning = self.message.reasoning_content[len(self.sent.reasoning_content) :]
        content = self.message.content[len(self.sent.content) :]
        if reasoning:
            out.append(MessageDelta(reasoning_content=reasoning))
        if content:
            out.append(MessageDelta(content=content))
        for i, call in enumerate(self.message.tool_calls):
            before = self.sent.tool_calls[i].arguments if i < len(self.sent.tool_calls) else None
            if before is None:
                out.append(MessageDelta(tool_index=i, tool_id=call.id, tool_name=call.name, arguments=call.arguments))
            elif call.arguments != before:
                out.append(MessageDelta(tool_index=i, arguments=call.arguments[len(before) :]))
        self.sent = self.message
        return out

    def _parse(self, final: bool) -> ChatMessage:
        text, reasoning = self.text, ""
        if text.startswith("<think>"):
            body = text.removeprefix("<think>")
            reasoning, end, text = body.partition("</think>")
            if not end and not final:
                reasoning = reasoning[: len(reasoning) - _held(reasoning, "</think>")]
        elif not final and "<think>".startswith(text):
            return self.sent
        content, tag, rest = text.partition("<tool_call>")
        if not tag and not final:
            content = content[: len(content) - _held(content, "<tool_call>")]
        calls = []
        for i, match in enumerate(_CALL.finditer(tag + rest)):
            head = re.match(r'\s*\{"name": "(\w+)", "arguments": (.*)', match.group(1), re.DOTALL)
            if head:
                whole = match.group(0).endswith("</tool_call>")
                arguments = head.group(2).rstrip()[:-1] if whole else ""
                calls.append(ToolCall(f"call_{i}", head.group(1), arguments))
        return ChatMessage(content, reasoning, tuple(calls), False)

    def close(self) -> None:
        self.closed = True


class StandinChat:
    """ChatML.  Records what it was asked to render."""

    def __init__(self) -> None:
        caps = {"supports_parallel_tool_calls": True, "supports_tools": True, "supports_object_arguments": False}
        self.info = TemplateInfo("{# chatml #}", "", True, caps, True, "<s>", "</s>")
        self.inputs: list[ChatInput] = []
        self.parsers: list[StandinParser] = []
        self.refuse_late_system = False

    def render(self, chat: ChatInput, *, add_generation_prompt: bool = True) -> Rendered:
        self.inputs.append(chat)
        if self.refuse_late_system and any(m["role"] == "system" for m in chat.messages[1:]):
            raise RequestError("messages: System message must be at the beginning.", param="messages")
        prompt = f"<|im_start|>tools\n{json.dumps(list(chat.tools))}<|im_end|>\n" if chat.tools else ""
        for message in chat.messages:
            content = message.get("content") or ""
            if not isinstance(content, str):
                content = "\n".join(part["text"] for part in content)
            if message.get("reasoning_content"):
                content = f"<think>{message['reasoning_content']}</think>{content}"
            for call in message.get("tool_calls") or ():
                content += f"<tool_call>{json.dumps(call['function'])}</tool_call>"
            prompt += f"<|im_start|>{message['role']}\n{content}<|im_end|>\n"
        opening = ""
        if chat.continue_final:
            prompt = prompt.removesuffix("<|im_end|>\n")
        elif add_generation_prompt:
            opening = "<|im_start|>assistant\n" + ("" if chat.enable_thinking else "<think></think>")
        return Rendered(
            prompt=prompt + opening,
            generation_prompt=opening,
            format=0,
            format_name="standin",
            parser="standin",
            grammar="root ::= json" if chat.json_schema is not None else chat.grammar,
            grammar_lazy=False,
            grammar_triggers=[],
            preserved_tokens=[],
            additional_stops=["<|im_end|>"],
            supports_thinking=True,
            thinking_start_tag="<think>",
            thinking_end_tags=["</think>"],
            message_delimiters=[],
            is_continuation=bool(chat.continue_final),
        )

    def stable_boundaries(
        self, chat: ChatInput, rendered: Rendered, prompt_tokens: Tokens, tokenize: Callable[[str], Tokens]
    ) -> tuple[int, ...]:
        return (len(tokenize(self.render(chat, add_generation_prompt=False).prompt)),)

    def system_end(
        self, chat: ChatInput, rendered: Rendered, prompt_tokens: Tokens, tokenize: Callable[[str], Tokens]
    ) -> int:
        return 0

    def schema_grammar(self, schema: dict[str, Any]) -> str:
        if schema.get("type") == "hiccup":
            raise RequestError("json_schema: unknown type hiccup", param="json_schema")
        return "root ::= json"

    def parser(self, rendered: Rendered) -> StandinParser:
        self.parsers.append(StandinParser())
        return self.parsers[-1]


# -- engine --------------------------------------------------------------------------------------
Gate = threading.Event
Step = str | Gate | Exception
"""A piece of text, something to wait for, or a failure."""
Script = Callable[[GenerateRequest], Sequence[Step]]


class StandinStream:
    def __init__(self, request_id: str, run: Callable[[StandinStream], AsyncIterator[Event]]) -> None:
        self.request_id = request_id
        self.cancelled = threading.Event()
        self.events: list[Event] = []
        self._run = run

    async def __aiter__(self) -> AsyncIterator[Event]:
        async for event in self._run(self):
            self.events.append(event)
            yield event

    def __iter__(self) -> Iterator[Event]:
        raise NotImplementedError

    def cancel(self) -> None:
        self.cancelled.set()


@dataclass
class StandinEngine:
    script: Script = lambda request: ["Hello", " world", "!"]
    n_ctx: int = 4096
    model_id: str = "standin"
    full: bool = False
    progress: Sequence[tuple[int, int]] = ((0, 1), (1, 2), (1, 1))
    """Fractions of the prompt reported as processed: cached part first, in (numerator, denominator)."""
    requests: list[GenerateRequest] = field(default_factory=list)
    streams: list[StandinStream] = field(default_factory=list)
    problems: Sequence[str] = ()
    closed: bool = False

    def __post_init__(self) -> None:
        self.vocab = StandinVocab()
        self.chat = StandinChat()
        self.kept: list[tuple[int, ...]] = []
        self.prefetched: list[GenerateRequest] = []
        self.info = BackendInfo(
            identity="0123456789abcdef",
            model_name="standin",
            arch="standin",
            device="none",
            n_ctx=self.n_ctx,
            n_ctx_train=8192,
            n_slots=2,
            n_batch=512,
            n_ubatch=128,
            n_vocab=N_VOCAB,
            memory="kv",
            inventory=None,
            uncacheable=None,
            n_params=1000,
            model_bytes=2000,
        )

    def submit(self, request: GenerateRequest) -> StandinStream:
        if self.full:
            raise Overloaded("64 requests are waiting already", retry_after_s=3)
        if len(request.tokens) == 0:
            raise RequestError("the prompt is empty", param="prompt")
        if len(request.tokens) >= self.n_ctx:
            raise ContextLengthExceeded(len(request.tokens), self.n_ctx)
        self.requests.append(request)
        stream = StandinStream(f"standin-{len(self.requests)}", lambda s: self._run(request, s))
        self.streams.append(stream)
        return stream

    def _cached(self, request: GenerateRequest) -> int:
        tokens = tuple(request.tokens.tolist())
        if not request.cache_prompt:
            return 0
        best = max((len(k) for k in self.kept if k == tokens[: len(k)] and len(k) < len(tokens)), default=0)
        self.kept += [tokens[:b] for b in request.stable or (len(tokens),)]
        return best

    async def _run(self, request: GenerateRequest, stream: StandinStream) -> AsyncIterator[Event]:
        n_prompt, cached = len(request.tokens), self._cached(request)
        report = RequestReport(
            ReuseSource.RAM if cached else ReuseSource.NONE,
            cached,
            n_prompt - cached,
            cached,
            None if cached else MissReason.NO_CHECKPOINT,
            captured=[(b, "prompt") for b in request.stable],
        )
        generated = 0

        def finished(reason: FinishReason, stop: str | None = None, error: Exception | None = None) -> Finished:
            timings = Timings(cached, n_prompt - cached, 10.0, generated, 5.0)
            return Finished(reason, stop, n_prompt, generated, timings, report, error)

        if request.progress:
            for a, b in self.progress:
                yield PrefillProgress(n_prompt, cached, cached + (n_prompt - cached) * a // b, 1.0)
        text = ""
        for step in self.script(request):
            while isinstance(step, Gate) and not step.is_set() and not stream.cancelled.is_set():
                await asyncio.sleep(0.001)
            await asyncio.sleep(0)
            if stream.cancelled.is_set():
                yield finished(FinishReason.CANCELLED)
                return
            if isinstance(step, Exception):
                yield finished(FinishReason.ERROR, error=step)
                return
            if isinstance(step, Gate):
                continue
            if request.max_tokens is not None and generated >= request.max_tokens:
                yield finished(FinishReason.LENGTH)
                return
            generated += 1
            for stop in request.stop:
                if stop in text + step:
                    yield TextDelta((text + step).partition(stop)[0][len(text) :], (0,))
                    yield finished(FinishReason.STOP, stop)
                    return
            text += step
            yield TextDelta(step, (step.encode()[0],), self._logprobs(request, step))
        yield finished(FinishReason.STOP)

    def _logprobs(self, request: GenerateRequest, piece: str) -> tuple[TokenLogprob, ...]:
        if not request.n_logprobs:
            return ()
        top = tuple((i, -0.5 * (i + 1), bytes([65 + i])) for i in range(request.n_logprobs))
        return (TokenLogprob(piece.encode()[0], -0.25, piece.encode(), top),)

    def prefetch(self, request: GenerateRequest) -> Prefetched:
        if self.full:
            raise Overloaded("every slot is busy", retry_after_s=3)
        self.prefetched.append(request)
        n = len(request.tokens) - 1
        return Prefetched(n, ReuseSource.DISK, n, 10 * n, True, None, 1.5)

    def cache_status(self) -> dict[str, Any]:
        return {"enabled": True, "checkpoints": []}

    def cache_events(self, since: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        return [{"seq": i, "kind": "admitted"} for i in range(since + 1, min(since + limit, 5) + 1)]

    def check(self) -> list[str]:
        return list(self.problems)

    def slots(self) -> list[dict[str, Any]]:
        return [{"id": i, "n_ctx": self.n_ctx, "is_processing": False, "n_tokens": 0} for i in range(2)]

    def counters(self) -> dict[str, float]:
        return {
            "requests_total": float(len(self.requests)),
            "prompt_tokens_total": 10.0,
            "cached_tokens_total": 4.0,
            "prefill_tokens_total": 6.0,
            "generated_tokens_total": 3.0,
            "prefill_seconds_total": 0.5,
            "decode_seconds_total": 0.25,
            "passes_total": 4.0,
        }

    def close(self, drain_s: float = 5.0) -> None:
        self.closed = True


def tokens_of(text: str) -> Tokens:
    return as_tokens(StandinVocab().tokenize(text, add_special=True, parse_special=True))
