"""A server on a real model whose every answer is checked against an uninterrupted run.

The engine is the real one; its backend is wrapped so that each slot carries its *lineage* (the passes
that led to its state, through captures and restores; see ``lineage.py``).  After an answer, the
lineage is replayed in an untouched context: state bytes must agree, and so must the log-probability
of every generated token and its alternatives, as the client got them.  That is a cold control under
the same conditions; a plain cold run has other pass ends, and so other rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from gufo_gguf.backend import native
from gufo_gguf.backend.base import Span
from gufo_gguf.backend.llama import LlamaBackend, LlamaOptions
from gufo_gguf.backend.sampling import top_logprobs
from gufo_gguf.cache.types import Tokens
from gufo_gguf.engine import engine as engine_module
from gufo_gguf.engine.engine import Engine, EngineOptions
from gufo_gguf.server.settings import ServerSettings
from tests.engine.lineage import Recorder, TracingExecutor
from tests.engine.served import Reply, ask
from tests.server.conftest import running_server

SMALL = {"n_ctx": 4096, "n_batch": 256, "n_ubatch": 64, "n_threads": 1}


@dataclass
class Witness:
    http: httpx.Client
    engine: Engine
    recorder: Recorder
    executor: TracingExecutor
    control: LlamaBackend
    requests: list[Any] = field(default_factory=list)
    """What the server asked the engine for, in order."""
    n_checked: int = 0

    def ask(self, messages: list[dict[str, Any]], **fields: Any) -> Reply:
        """An answer, compared with its replay."""
        reply = ask(self.http, messages, **fields)
        slot = self.executor.last_slot
        mine = self.engine._owner.ask(lambda: self._state(self.recorder._backend, slot)).result()
        steps = list(self.recorder.lineage[slot])
        logits = self._replay(steps)
        for name, ours, theirs in zip(("rows", "private"), mine, self._state(self.control, 0), strict=True):
            assert np.array_equal(ours, theirs), f"{name}: {int((ours != theirs).sum())} of {ours.size} bytes differ"
        lib = native.library()
        assert 0 <= reply.usage["completion_tokens"] - len(reply.tokens) <= 1
        # the token that ended an answer is counted, not shown
        sampled_from = logits[len(logits) - reply.usage["completion_tokens"] :]
        for (token, shown), at in zip(reply.tokens, sampled_from, strict=False):
            own, top = top_logprobs(lib, at, token, len(shown) - 1)
            assert shown == (own, *top), "the client got other log-probabilities than the uninterrupted run"
        self.n_checked += 1
        return reply

    def stable(self) -> int:
        """The last request's shortest stable boundary: what the next turn sends again, whatever happens."""
        return int(min(self.requests[-1].stable))

    def prompt(self) -> Tokens:
        """The last request's tokens."""
        tokens: Tokens = self.requests[-1].tokens
        return tokens

    def removed(self, since: int = 0) -> list[dict[str, Any]]:
        """Checkpoints that went, oldest first."""
        return [e for e in self.engine.cache_events(since, 10_000) if e["kind"] == "remove"]

    def _replay(self, steps: list[Any]) -> list[np.ndarray]:
        """Logits after each pass of a lineage in the untouched context."""
        self.control.truncate(0, 0)
        out = []
        for step in steps:
            if isinstance(step, int):
                self.control.truncate(0, step)
            else:
                self.control.decode([Span(0, step, True)])
                out.append(self.control.logits(0))
        return out

    def _state(self, backend: LlamaBackend, slot: int) -> tuple[np.ndarray, np.ndarray]:
        inventory = backend.info.inventory
        assert inventory is not None
        n = backend.position(slot)
        rows = np.zeros(n * inventory.row_bytes, np.uint8)
        private = np.zeros(inventory.private_bytes, np.uint8)
        if rows.size:
            backend.rows_out(slot, 0, n, rows)
        if private.size:
            backend.private_out(slot, private)
        return rows, private


class _LastSlot(TracingExecutor):
    """Remembers which slot the newest request got."""

    last_slot = -1

    def admit(self, admission: Any, tokens: Any, report: Any) -> int:
        self.last_slot = admission.lease.slot
        return super().admit(admission, tokens, report)


@contextmanager
def witnessed(
    model: Path, monkeypatch: pytest.MonkeyPatch, *, n_slots: int = 1, ram_bytes: int = 64 << 20, **options: Any
) -> Iterator[Witness]:
    """A server in this process; requests must come one after the other."""
    backend = LlamaBackend(model, LlamaOptions(**SMALL, n_slots=n_slots))  # type: ignore[arg-type]
    control = LlamaBackend(model, LlamaOptions(**SMALL, n_slots=1))  # type: ignore[arg-type]
    recorder = Recorder(backend)
    monkeypatch.setattr(engine_module, "Executor", lambda _, manager, pool: _LastSlot(recorder, manager, pool))
    engine = Engine(recorder, EngineOptions(cache_ram_bytes=ram_bytes, chunk_rows=64, **options))  # type: ignore[arg-type]
    with running_server(engine, ServerSettings(port=0, drain_s=1.0)) as running:
        executor = engine._executor
        assert isinstance(executor, _LastSlot)
        witness = Witness(running.http, engine, recorder, executor, control)
        submit = engine.submit

        def recorded(request: Any) -> Any:
            witness.requests.append(request)
            return submit(request)

        monkeypatch.setattr(engine, "submit", recorded)
        yield witness
        assert engine.check() == []
        assert witness.n_checked > 0
    control.close()
