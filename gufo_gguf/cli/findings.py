"""What ``gufo doctor`` warns about: pure functions from facts to findings.

Each rule comes from something that was measured or reported, and names what to do or which test
shows whether this machine is concerned.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gufo_gguf.cli import hip_findings
from gufo_gguf.cli.hip_findings import HipFacts
from gufo_gguf.cli.sizes import show_bytes

COLD_TEST = "pytest tests/qualification/test_reused_slots.py"
EXACT_TEST = "make qualify ARGS='--variants {variant}'"


class Level(StrEnum):
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"
    """Something does not work; the command's status is 1."""


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class BuildFacts:
    """What is installed and how this process is set up."""

    info: Mapping[str, object]
    """``build.json``; empty for a folder made by other means."""
    cub_top_k: bool
    graph_opt: str | None
    """GGML_CUDA_GRAPH_OPT."""
    has_gpu: bool
    chosen_threads: int
    allowed_cores: int
    hip: HipFacts = field(default_factory=HipFacts)

    @property
    def kind(self) -> str:
        return str(self.info.get("kind", ""))


def build_findings(facts: BuildFacts) -> list[Finding]:
    found: list[Finding] = []
    if not facts.info:
        found.append(
            Finding(
                Level.NOTE, "the library's folder does not say how it was built", "`make native` builds one that does"
            )
        )
    if facts.kind in ("cuda", "hip", "vulkan", "metal") and not facts.has_gpu:
        found.append(
            Finding(
                Level.WARNING,
                f"built for {facts.kind}, but no GPU is visible: models run on the CPU",
                "check the driver",
            )
        )
    if facts.kind == "cuda" or facts.cub_top_k:
        if facts.cub_top_k or "-DGGML_CUDA_CUB_3DOT2=ON" in _flags(facts.info) or _cuda_release(facts.info) >= (13, 2):
            found.append(
                Finding(
                    Level.WARNING,
                    "CUB's top-k is compiled in (CCCL 3.2 or later): it picks among ties in varying order, so that on "
                    "models with an indexer two cold runs of one prompt differ and no cache can be exact",
                    "build with an older toolkit and without GGML_CUDA_CUB_3DOT2, then "
                    + EXACT_TEST.format(variant="qwen4exp"),
                )
            )
        if facts.graph_opt not in (None, "0"):
            found.append(
                Finding(
                    Level.WARNING,
                    f"GGML_CUDA_GRAPH_OPT={facts.graph_opt}: with it, two cold runs of one prompt were seen to differ",
                    f"unset it, then {EXACT_TEST.format(variant='qwen35')}",
                )
            )
    if facts.kind == "hip":
        said = hip_findings.warnings(facts.hip, COLD_TEST, EXACT_TEST.format(variant="qwen35"))
        found += [Finding(Level.WARNING, what, remedy) for what, remedy in said]
    if facts.chosen_threads > facts.allowed_cores:
        found.append(
            Finding(
                Level.WARNING,
                f"{facts.chosen_threads} threads on {facts.allowed_cores} cores wait for each other in every pass",
                f"use --threads {facts.allowed_cores}",
            )
        )
    return found


def missing_build(error: Exception) -> Finding:
    """Nothing that could run a model is here; the error's own words name what is missing."""
    if isinstance(error, ImportError):
        return Finding(
            Level.PROBLEM, f"a package is missing: {error}", "run `make native` in the checkout: it installs them too"
        )
    return Finding(
        Level.PROBLEM,
        str(error),
        "`make native` builds for the CPU; BACKEND=cuda, hip, vulkan or metal for a GPU (see docs/building.md)",
    )


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What loading the model showed."""

    arch: str
    memory: str
    uncacheable: str | None
    row_bytes: int
    private_bytes: int
    model_bytes: int
    ram_budget: int
    ram_available: int
    n_ctx: int
    n_ctx_train: int
    has_template: bool
    swa_full: bool = False
    components: tuple[str, ...] = field(default=())


def model_findings(facts: ModelFacts) -> list[Finding]:
    found: list[Finding] = []
    if facts.uncacheable is not None:
        found.append(Finding(Level.WARNING, f"this model is served without a cache: {facts.uncacheable}"))
        return found + _template(facts)
    one = facts.n_ctx * facts.row_bytes + facts.private_bytes
    if facts.ram_budget == 0:
        found.append(Finding(Level.NOTE, "no RAM tier: only live slots and the disk tier are reused"))
    elif one > facts.ram_budget:
        found.append(
            Finding(
                Level.WARNING,
                f"one conversation that fills the context takes {show_bytes(one)}, the RAM budget is "
                f"{show_bytes(facts.ram_budget)}: its checkpoints will be refused",
                "a larger --cache-ram-bytes, a smaller --ctx-size, or --cache-type-k/-v q8_0",
            )
        )
    if facts.ram_budget > facts.ram_available:
        found.append(
            Finding(
                Level.WARNING,
                f"the RAM budget of {show_bytes(facts.ram_budget)} is more than the {show_bytes(facts.ram_available)} "
                "that are available",
                "a smaller --cache-ram-bytes, or swapping will cost more than the cache saves",
            )
        )
    if facts.memory == "iswa" and not facts.swa_full:
        found.append(
            Finding(
                Level.NOTE,
                "sliding-window layers are saved as private state, whose size depends on --ubatch-size: checkpoints of "
                "another --ubatch-size are not used",
                "--swa-full keeps all rows instead: more memory, and histories can be cut anywhere",
            )
        )
    if facts.n_ctx > facts.n_ctx_train:
        found.append(
            Finding(
                Level.WARNING,
                f"--ctx-size {facts.n_ctx:,} is beyond the {facts.n_ctx_train:,} the model was trained with",
            )
        )
    return found + _template(facts)


def _template(facts: ModelFacts) -> list[Finding]:
    if facts.has_template:
        return []
    return [Finding(Level.NOTE, "the model has no chat template: ChatML is assumed", "--chat-template-file gives one")]


@dataclass(frozen=True, slots=True)
class DiskFacts:
    folder: str
    problem: str
    """Why the folder cannot be used; "" = it can."""
    holder: str
    """Who uses it now, in words; "" = nobody."""
    budget_bytes: int
    free_bytes: int
    used_bytes: int
    """What the tier holds already."""


def disk_findings(facts: DiskFacts) -> list[Finding]:
    if facts.problem:
        return [Finding(Level.PROBLEM, facts.problem, "a server would go on without its disk tier")]
    found = []
    if facts.holder:
        found.append(Finding(Level.NOTE, facts.holder))
    room = facts.free_bytes + facts.used_bytes
    if facts.budget_bytes > room:
        found.append(
            Finding(
                Level.WARNING,
                f"{facts.folder}: the budget is {show_bytes(facts.budget_bytes)}, "
                f"the disk has room for {show_bytes(room)}",
                "a smaller --cache-disk-bytes",
            )
        )
    return found


def _flags(info: Mapping[str, object]) -> tuple[str, ...]:
    flags = info.get("flags")
    return tuple(map(str, flags)) if isinstance(flags, list | tuple) else ()


def _cuda_release(info: Mapping[str, object]) -> tuple[int, int]:
    """(major, minor) of the toolkit in ``nvcc --version``'s words; (0, 0) when it does not say."""
    match = re.search(r"release (\d+)\.(\d+)", str(info.get("toolkit", "")))
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)
