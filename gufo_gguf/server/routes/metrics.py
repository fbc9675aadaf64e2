"""GET /metrics for Prometheus: llama-server's names where they exist, gufo's own beside them."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry
from starlette.responses import PlainTextResponse, Response

from gufo_gguf.server.errors import refuse
from gufo_gguf.server.port import EnginePort
from gufo_gguf.server.state import StateDep

router = APIRouter()

LLAMA_COUNTERS = {
    "prompt_tokens": ("prefill_tokens_total", "Prompt tokens evaluated."),
    "prompt_tokens_cached": ("cached_tokens_total", "Prompt tokens that needed no evaluation."),
    "prompt_seconds": ("prefill_seconds_total", "Time spent on prompts."),
    "tokens_predicted": ("generated_tokens_total", "Tokens generated."),
    "tokens_predicted_seconds": ("decode_seconds_total", "Time spent on generation."),
    "n_decode": ("passes_total", "Passes of the model."),
}
"""llama-server's name, the engine's counter, and what it is."""


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


class EngineCollector(Collector):
    """Reads the engine when asked; holds nothing."""

    def __init__(self, engine: EnginePort, running: int) -> None:
        self._engine = engine
        self._running = running

    def collect(self) -> Iterator[Metric]:
        counters = self._engine.counters()
        for name, (source, text) in LLAMA_COUNTERS.items():
            yield CounterMetricFamily(f"llamacpp:{name}", text, value=counters.get(source, 0.0))
        busy = sum(1 for slot in self._engine.slots() if slot["is_processing"])
        gauges = {
            "prompt_tokens_seconds": (
                _rate(counters.get("prefill_tokens_total", 0), counters.get("prefill_seconds_total", 0)),
                "Average prompt throughput in tokens/s.",
            ),
            "predicted_tokens_seconds": (
                _rate(counters.get("generated_tokens_total", 0), counters.get("decode_seconds_total", 0)),
                "Average generation throughput in tokens/s.",
            ),
            "requests_processing": (busy, "Requests in a slot."),
            "requests_deferred": (max(0, self._running - busy), "Requests waiting for a slot."),
        }
        for name, (value, text) in gauges.items():
            yield GaugeMetricFamily(f"llamacpp:{name}", text, value=value)
        for name, value in counters.items():
            yield CounterMetricFamily(f"gufo_{name.removesuffix('_total')}", f"Engine counter {name}.", value=value)


@router.get("/metrics", response_model=None, response_class=PlainTextResponse)
async def metrics(state: StateDep) -> Response:
    """Counters and gauges in Prometheus' text format."""
    if not state.settings.metrics_endpoint:
        raise refuse("this server has no metrics", status=501, code="not_supported")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(state.engine, len(state.active)))
    text = await state.ask(lambda: generate_latest(registry))
    headers = {"Process-Start-Time-Unix": str(int(state.started_s))}
    return Response(text, media_type=CONTENT_TYPE_LATEST, headers=headers)
