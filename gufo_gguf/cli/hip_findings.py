"""What ``gufo doctor`` says of a HIP build: reports and readings, because nobody here has an AMD GPU.

Each of these can make answers wrong, or two cold runs of one prompt different, without any cache; so
they come before a suspicion of the cache.  docs/strix-halo.md has the sources.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

KFD = "/dev/kfd"


@dataclass(frozen=True, slots=True)
class HipFacts:
    """The driver's device file, and the variable that changes how llama.cpp allocates."""

    kfd: str = ""
    """"" = can be opened; else what is wrong with it."""
    unified_memory: str | None = None
    """GGML_CUDA_ENABLE_UNIFIED_MEMORY."""
    rocblas_atomics: str | None = None
    """ROCBLAS_DEFAULT_ATOMICS_MODE."""


def kfd_problem(path: str = KFD) -> str:
    """Why the AMD driver's device file cannot be opened; "" = it can."""
    if not os.path.exists(path):
        return f"{path} does not exist: the amdgpu driver is not loaded, or not passed into this container"
    if not os.access(path, os.R_OK | os.W_OK):
        return f"{path} may not be opened by this user: add it to the group render (and video), then log in again"
    return ""


def warnings(facts: HipFacts, cold_test: str, exact_test: str) -> list[tuple[str, str]]:
    """(what, remedy) pairs, the most urgent first; ``cold_test`` and ``exact_test`` are commands to name."""
    found = []
    if facts.kfd:
        found.append((facts.kfd, "docs/strix-halo.md lists kernel, groups and memory"))
    if facts.unified_memory is not None:
        found.append(
            (
                f"GGML_CUDA_ENABLE_UNIFIED_MEMORY={facts.unified_memory}: any value turns managed memory on, and then "
                "models with an indexer (Flash-Next) are reported to answer garbage on gfx1151",
                "unset it: plain HIP allocations reach all of the GPU-visible memory",
            )
        )
    if facts.rocblas_atomics not in (None, "0"):
        found.append(
            (
                f"ROCBLAS_DEFAULT_ATOMICS_MODE={facts.rocblas_atomics}: rocBLAS may then sum in varying order, and two "
                "cold runs of one prompt differ",
                "unset it: it is 0 for this process unless you say otherwise",
            )
        )
    found.append(
        (
            "HIP's fused Gated-DeltaNet op is reported to leak state between requests on a reused slot (gfx1151); "
            "that would be wrong without any cache too",
            f"run {cold_test}",
        )
    )
    found.append(
        (
            "HIP's top-k over more than 1,024 columns takes ties in varying order: on models with an indexer two cold "
            "runs of one prompt can differ beyond that many tokens, and no cache can then be told from a cold run",
            f"compare cold runs with each other first, then {exact_test}",
        )
    )
    return found
