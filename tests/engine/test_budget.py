"""The automatic RAM budget: half of what is free, at most 32 GiB, cgroups respected."""

from pathlib import Path

from gufo_gguf.cache.types import CacheLimits, StateShape
from gufo_gguf.core.memory import cgroup_available
from gufo_gguf.engine.budget import AUTOMATIC_MAX, automatic_ram_bytes, fit_table

GIB = 1 << 30


def test_half_of_the_free_ram(tmp_path: Path) -> None:
    assert automatic_ram_bytes(available=10 * GIB, root=tmp_path) == 5 * GIB
    assert automatic_ram_bytes(available=1000 * GIB, root=tmp_path) == AUTOMATIC_MAX
    assert automatic_ram_bytes(4 * GIB, available=10 * GIB, root=tmp_path) == 3 * GIB
    assert automatic_ram_bytes(40 * GIB, available=10 * GIB, root=tmp_path) == 0


def test_a_cgroup_limits_what_counts_as_free(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(str(6 * GIB) + "\n")
    (tmp_path / "memory.current").write_text(str(2 * GIB) + "\n")
    assert cgroup_available(tmp_path) == 4 * GIB
    assert automatic_ram_bytes(available=10 * GIB, root=tmp_path) == 2 * GIB


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5\n")
    assert cgroup_available(tmp_path) is None


def test_version_one_of_the_interface(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(str(3 * GIB))
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text(str(GIB))
    assert cgroup_available(tmp_path) == 2 * GIB


def test_budgets_in_conversations() -> None:
    shape, limits = StateShape(1000, 50_000, 0, chunk_rows=256), CacheLimits(100_000_000)
    table = fit_table(shape, limits, 1_000_000_000, 40_000)
    assert [row["tokens"] for row in table] == [2048, 8192, 32_768]
    assert [row["bytes"] for row in table] == [2_098_000, 8_242_000, 32_818_000]
    assert [row["ram"] for row in table] == [47, 12, 3]
    for row in table:  # blocks and manifests cost something, and less than a tenth
        assert 0.9 * (1_000_000_000 // row["bytes"]) <= row["disk"] < 1_000_000_000 / row["bytes"]
    assert fit_table(shape, limits, 0, 1024)[0] == {"tokens": 1024, "bytes": 1_074_000, "ram": 93, "disk": 0}
    assert [r["ram"] for r in fit_table(StateShape(1, 0, 0), limits, 0, 100, (10, 20))] == [128, 128]
