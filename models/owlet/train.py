"""Train Owlet on one GPU, for a limited time, resumable.

    python -m models.owlet.train --minutes 9 --total-minutes 18 --out FOLDER

``--total-minutes`` is the length of the whole schedule (learning rate, lengths); ``--minutes`` how
much of it this call may use, evaluation included.  A call goes on from ``--state`` (everything,
optimiser included) if it is there, else from the weights in ``--weights``, else from the start.

What is learned is decided by what the loss weighs: half of it is the mean over the tokens of
answers that need memory (a few percent of all tokens), the other half the mean over all other text.
Lengths grow with the schedule, from 512 to 9,216 tokens: looking things up is learned where it is
near, and then only has to reach further.  A longer one comes when the last one is mastered.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.owlet import corpus, reference
from models.owlet.batches import Batch, Maker, Pool
from models.owlet.coding import ANSWER, CONTEXT, RECALL, TEXT
from models.owlet.evaluate import recall
from models.owlet.geometry import OWLET, Geometry
from models.owlet.initial import new_model
from models.owlet.reference import Model, Run
from models.owlet.weights import load_parts, save_parts

SEED = 20_26
BATCH_TOKENS = 36_864
LENGTHS = (512, 1024, 2304, 4608, 9216)
"""Tokens per row, one after the other; each divides BATCH_TOKENS."""
EARLIEST = (0.0, 0.03, 0.08, 0.16, 0.28)
LATEST = (0.0, 0.25, 0.38, 0.50, 0.60)
"""Shares of the schedule between which the step to a length is made: as soon as it is earned."""
EARNED = 0.85
"""Share of the remembered tokens guessed right, averaged over some dozen batches, that earns it."""
SHORTER_SHARE = 0.25
TEXT_SHARE = 0.3
PEAK_RATE, LAST_RATE, WARMUP_STEPS = 2e-3, 4e-5, 200
KIND_WEIGHTS = {CONTEXT: 0.3, TEXT: 1.0, ANSWER: 2.0, RECALL: 0.0}
BALANCE_WEIGHT = 0.01
PROBES = 64
"""Positions per row at which the indexer is taught; half of them in answers."""
DISTANCES = (256, 1024, 4096, 8192)
SPARSE = (512, 1024, 2048)
"""Numbers of tokens to attend to with which the last evaluation is repeated."""
PART_BYTES_MAX = 15 * 2**20


@dataclass(frozen=True)
class Sizes:
    """What is trained on how much at a time."""

    geometry: Geometry = OWLET
    batch_tokens: int = BATCH_TOKENS
    length_max: int = LENGTHS[-1]
    distances: tuple[int, ...] = DISTANCES


TRIAL = Sizes(
    replace(
        OWLET, n_layer=3, n_embd=64, n_head=2, n_head_kv=1, head_dim=32, indexer_heads=2, indexer_dim=32,
        delta_k_heads=2, delta_v_heads=2, delta_dim=32, hyper_rank=16, n_ff_expert=32, ple_rows_per_head=1009,
    ),
    batch_tokens=1024, length_max=256, distances=(128,),
)  # fmt: skip
"""To see on a processor, in seconds, that everything runs."""


@dataclass
class Progress:
    """What a run is besides weights."""

    step: int = 0
    seconds: float = 0.0
    stage: int = 0
    hits: float = 0.0
    """Running average of the remembered tokens guessed right, for the longest rows in use."""
    warm_from: int = 0
    """The step at which the learning rate last started from zero."""
    records: list[dict[str, Any]] = field(default_factory=list)
    recalls: list[dict[str, Any]] = field(default_factory=list)


def next_stage(stage: int, share: float, hits: float) -> int:
    """Index of the longest row length in use, at most one more than ``stage``."""
    if stage + 1 == len(LENGTHS) or share < EARLIEST[stage + 1]:
        return stage
    return stage + (hits >= EARNED or share >= LATEST[stage + 1])


def length_at(stage: int, rng: random.Random) -> int:
    """A row length: mostly the longest one in use."""
    return LENGTHS[rng.randrange(stage) if stage and rng.random() < SHORTER_SHARE else stage]


def rate_at(share: float, step: int) -> float:
    """Learning rate: linear warm-up, then half a cosine down to LAST_RATE."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))
    return min(1.0, (step + 1) / WARMUP_STEPS) * (LAST_RATE + (PEAK_RATE - LAST_RATE) * cosine)


def probes(kinds: Tensor, n: int) -> Tensor:
    """(rows, n) positions: half anywhere, half just before tokens of remembered answers."""
    noise = torch.rand(kinds.shape, device=kinds.device)
    anywhere = noise.topk(n - n // 2, -1).indices
    return torch.cat([anywhere, (noise + (kinds == RECALL)).topk(n // 2, -1).indices], -1)


def losses(model: Model, batch: Batch, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a batch and its parts."""
    tokens = torch.from_numpy(batch.tokens.astype("int64")).to(device, non_blocking=True)
    kinds = torch.from_numpy(batch.kinds).to(device, non_blocking=True)[:, 1:]
    run = Run(probe=probes(kinds, min(PROBES, kinds.shape[1] // 2)))
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        logits = model.output(model.hidden(tokens[:, :-1], run))
    target, kind = tokens[:, 1:].flatten(), kinds.flatten().long()
    per_token = F.cross_entropy(logits.flatten(0, 1).float(), target, reduction="none")
    weight = torch.tensor([KIND_WEIGHTS[k] for k in range(4)], device=device)[kind]
    remembered = (kind == RECALL).float()
    text = (per_token * weight).sum() / weight.sum().clamp_min(1)
    memory = (per_token * remembered).sum() / remembered.sum().clamp_min(1)
    index = torch.stack(run.indexer_losses).mean() if run.indexer_losses else per_token.new_zeros(())
    balance = torch.stack(run.balance_losses).mean()
    with torch.no_grad():
        hits = ((logits.flatten(0, 1).argmax(-1) == target).float() * remembered).sum() / remembered.sum().clamp_min(1)
        plain = (per_token * (kind == TEXT)).sum() / (kind == TEXT).sum().clamp_min(1)
    parts = {"text": plain, "memory": memory, "hits": hits, "index": index, "balance": balance}
    return text + memory + index + BALANCE_WEIGHT * balance, {k: v.detach() for k, v in parts.items()}


def optimizer_for(model: Model) -> torch.optim.AdamW:
    """Weight decay on matrices alone: not on tables, gains and decays."""
    decayed, free = [], []
    for name, weight in model.named_parameters():
        (free if weight.ndim < 2 or "embd" in name or "conv1d" in name else decayed).append(weight)
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": free, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), fused=next(model.parameters()).is_cuda)


class Fused:
    """The element-wise parts compiled, swapped in for the duration of a training step.

    Evaluation has other shapes and runs without.  What does not compile runs as it is.
    """

    NAMES = ("mix_streams", "combine_streams", "experts")

    def __init__(self, wanted: bool) -> None:
        self.plain = {name: getattr(reference, name) for name in self.NAMES}
        self.fused = dict(self.plain)
        if wanted:
            torch._dynamo.config.suppress_errors = True
            self.fused = {name: torch.compile(function, dynamic=False) for name, function in self.plain.items()}

    def __enter__(self) -> None:
        for name, function in self.fused.items():
            setattr(reference, name, function)

    def __exit__(self, *_: object) -> None:
        for name, function in self.plain.items():
            setattr(reference, name, function)


class Trainer:
    def __init__(self, args: argparse.Namespace, maker: Maker, pool: Pool) -> None:
        self.args, self.maker, self.pool = args, maker, pool
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.progress = Progress()
        self.started = args.started
        self.fused = Fused(args.compile)
        self.sizes = TRIAL if args.trial else Sizes()
        self.model = new_model(self.sizes.geometry, SEED)
        state = torch.load(args.state, map_location="cpu", weights_only=True) if args.state.exists() else None
        if state is not None:
            self.model.load_state_dict(state["model"])
            self.progress = Progress(**state["progress"])
        elif args.weights is not None and any(args.weights.glob("weights-*.npz")):
            self.model.load_state_dict(load_parts(args.weights, "weights"))
            self.progress = Progress(**json.loads((args.weights / "progress.json").read_text()))
            self.progress.warm_from = self.progress.step  # a new optimiser knows nothing yet
        self.model.to(self.device)
        self.optimizer = optimizer_for(self.model)
        named = list(self.model.named_parameters())
        self.indexers = [w for name, w in named if ".indexer." in name]
        self.trunk = [w for name, w in named if ".indexer." not in name]
        if state is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        self.earlier = self.progress.seconds
        self.queue_rng = random.Random(f"{SEED}/{self.progress.step}")
        self.queued = self.progress.step

    @property
    def seconds(self) -> float:
        """Of the schedule, all calls together."""
        return self.earlier + time.monotonic() - self.started

    @property
    def share(self) -> float:
        return min(1.0, self.seconds / (60 * self.args.total_minutes))

    def next_batch(self) -> Batch:
        while len(self.pool) < self.args.ahead:
            length = min(length_at(self.progress.stage, self.queue_rng), self.sizes.length_max)
            self.pool.ask(self.queued, self.sizes.batch_tokens // length, length, TEXT_SHARE)
            self.queued += 1
        return self.pool.take()

    def run(self) -> None:
        until = self.started + 60 * self.args.minutes - self.args.reserve
        next_eval = time.monotonic() + 30
        mark, tokens = time.monotonic(), 0
        step_limit = self.args.steps or math.inf
        done = 0
        while time.monotonic() < until and done < step_limit and self.share < 1.0:
            batch = self.next_batch()
            rate = rate_at(self.share, self.progress.step - self.progress.warm_from)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            with self.fused:
                loss, parts = losses(self.model, batch, self.device)
                loss.backward()
            # apart: the indexer's own loss starts high and would shrink everything else
            norm = torch.nn.utils.clip_grad_norm_(self.trunk, 1.0)
            torch.nn.utils.clip_grad_norm_(self.indexers, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.progress.step += 1
            done += 1
            self.advance(batch.tokens.shape[1] - 1, parts["hits"])
            tokens += batch.tokens.size
            if self.progress.step % self.args.log_every == 0 or done == 1:
                now = time.monotonic()
                record = {"step": self.progress.step, "minutes": round(self.seconds / 60, 2), "rate": rate}
                record |= {k: round(float(v), 4) for k, v in parts.items()} | {"norm": round(float(norm), 3)}
                if not math.isfinite(record["norm"]):
                    raise FloatingPointError(f"the gradient is not finite: {record}")
                record |= {
                    "length": batch.tokens.shape[1] - 1,
                    "stage": self.progress.stage,
                    "tokens_per_s": round(tokens / (now - mark)),
                }
                self.progress.records.append(record)
                print(json.dumps(record), flush=True)
                mark, tokens = time.monotonic(), 0
            if time.monotonic() > next_eval and not self.args.no_eval:
                self.evaluate(self.args.eval_cases)
                self.save()
                next_eval = time.monotonic() + self.args.eval_every
                mark, tokens = time.monotonic(), 0
        self.progress.seconds = self.seconds
        if not self.args.no_eval:
            self.evaluate(self.args.final_cases, final=True)
        self.save()

    def advance(self, length: int, hits: Tensor) -> None:
        """Take note of a batch; go on to longer rows when that is earned or due."""
        progress = self.progress
        if length == LENGTHS[progress.stage] and progress.step % 4 == 0:  # reading a value waits for the GPU
            progress.hits += 0.1 * (float(hits) - progress.hits)
        stage = next_stage(progress.stage, self.share, progress.hits)
        if stage != progress.stage:
            progress.stage, progress.hits = stage, 0.0

    def evaluate(self, n_cases: int, final: bool = False) -> None:
        """Recall at all distances; at the end also with the indexer's choice alone."""
        self.model.eval()
        for distance in self.sizes.distances:
            found = self.pool.cases(distance)[:n_cases]
            result: dict[str, Any] = {"step": self.progress.step, "minutes": round(self.seconds / 60, 2)}
            result |= {"distance": distance, "recall": round(recall(self.model, found), 4)}
            for top_k in SPARSE if final and distance >= min(SPARSE) else ():
                sparse = recall(self.model, found[:48], Run(sparse=True, top_k=top_k), tokens_max=9000)
                result[f"top_{top_k}"] = round(sparse, 4)
            self.progress.recalls.append(result)
            print(json.dumps(result), flush=True)
        self.model.train()

    def save(self) -> None:
        """All of the state for another call on this machine; weights and curves for elsewhere."""
        self.progress.seconds = self.seconds
        self.args.state.parent.mkdir(parents=True, exist_ok=True)
        partial = self.args.state.with_suffix(".partial")
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**state, "progress": asdict(self.progress)}, partial)
        os.replace(partial, self.args.state)
        out: Path = self.args.out
        out.mkdir(parents=True, exist_ok=True)
        save_parts(self.model.state_dict(), out, "weights", PART_BYTES_MAX)
        (out / "progress.json").write_text(json.dumps(asdict(self.progress)))
        try:
            draw(self.progress, out / "curves.png")
        except ImportError as error:
            print(f"no curves drawn: {error}")


def draw(progress: Progress, path: Path) -> None:
    """Loss and recall over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    steps = [r["step"] for r in progress.records]
    for name, label in (("text", "documents"), ("memory", "remembered answers"), ("index", "indexer")):
        left.plot(steps, [r[name] for r in progress.records], label=label, linewidth=1)
    left.set(xlabel="step", ylabel="loss per token (nats)", ylim=(0, 6))
    left.legend()
    for distance in sorted({r["distance"] for r in progress.recalls}):
        rows = [r for r in progress.recalls if r["distance"] == distance]
        right.plot([r["step"] for r in rows], [r["recall"] for r in rows], marker=".", label=f"{distance} tokens")
    right.set(xlabel="step", ylabel="facts given back exactly", ylim=(0, 1.02))
    right.legend(title="distance")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--total-minutes", type=float, default=18.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--state", type=Path, default=Path("models/build/run/state.pt"))
    parser.add_argument("--weights", type=Path, default=None, help="folder with weights-*.npz and progress.json")
    parser.add_argument("--reserve", type=float, default=45.0, help="seconds kept for the last evaluation")
    parser.add_argument("--compile", action="store_true", help="fuse element-wise parts (a minute at the start)")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--ahead", type=int, default=32, help="batches made ahead")
    parser.add_argument("--steps", type=int, default=0, help="stop after so many; 0: by time alone")
    parser.add_argument("--documents", type=int, default=None, help="use only so many documents")
    parser.add_argument("--trial", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--eval-every", type=float, default=75.0, help="seconds")
    parser.add_argument("--eval-cases", type=int, default=64)
    parser.add_argument("--final-cases", type=int, default=200)
    parser.add_argument("--no-eval", action="store_true")
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    args.started = time.monotonic()
    torch.backends.cuda.matmul.allow_tf32 = True
    maker = Maker(SEED, args.documents)
    maker.prepare(corpus.BUILD)
    pool = Pool(maker, args.workers)
    if not args.no_eval:
        for distance in (TRIAL if args.trial else Sizes()).distances:
            pool.ask_cases(distance, max(args.eval_cases, args.final_cases))
    print(f"corpus ready after {time.monotonic() - args.started:.0f} s", flush=True)
    try:
        Trainer(args, maker, pool).run()
    finally:
        pool.close()


if __name__ == "__main__":
    main()
