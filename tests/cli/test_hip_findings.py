"""What doctor says of HIP builds: the driver's file, the variable, and the two reports that concern everyone."""

from __future__ import annotations

from pathlib import Path

import pytest

from gufo_gguf.cli import hip_findings
from gufo_gguf.cli.findings import COLD_TEST, BuildFacts, Level, build_findings
from gufo_gguf.cli.hip_findings import HipFacts

FINE = HipFacts()


def said(facts: HipFacts) -> list[str]:
    return [f"{what} | {remedy}" for what, remedy in hip_findings.warnings(facts, "COLD", "EXACT")]


def test_every_hip_build_is_told_of_the_two_reports_and_how_to_test_them() -> None:
    gated, top_k = said(FINE)
    assert "Gated-DeltaNet" in gated and "COLD" in gated
    assert "top-k" in top_k and "1,024" in top_k and "EXACT" in top_k


def test_doctor_warns_of_them_for_hip_builds_alone() -> None:
    def build(kind: str, hip: HipFacts = FINE) -> BuildFacts:
        return BuildFacts({"kind": kind}, False, None, True, 2, 2, hip)

    found = build_findings(build("hip"))
    assert len(found) == 2 and all(f.level is Level.WARNING for f in found) and COLD_TEST in found[0].remedy
    assert len(build_findings(build("hip", HipFacts("no driver", "1")))) == 4
    assert build_findings(build("vulkan", HipFacts("no driver", "1"))) == []


@pytest.mark.parametrize("value", ["1", "0"])
def test_the_variable_counts_as_set_whatever_its_value(value: str) -> None:
    first = said(HipFacts("", value))[0]
    assert f"GGML_CUDA_ENABLE_UNIFIED_MEMORY={value}:" in first and "unset" in first
    assert len(said(HipFacts("", value))) == 3


def test_sums_in_varying_order_are_told_when_the_user_chose_them() -> None:
    assert said(HipFacts(rocblas_atomics="0")) == said(FINE)
    first = said(HipFacts(rocblas_atomics="1"))[0]
    assert "ROCBLAS_DEFAULT_ATOMICS_MODE=1" in first and "unset" in first


def test_the_drivers_file_is_named_with_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = hip_findings.kfd_problem(str(tmp_path / "kfd"))
    assert "driver is not loaded" in missing
    device = tmp_path / "there"
    device.touch()
    assert hip_findings.kfd_problem(str(device)) == ""
    monkeypatch.setattr(hip_findings.os, "access", lambda path, mode: False)
    denied = hip_findings.kfd_problem(str(device))
    assert "group render" in denied
    assert said(HipFacts(denied, None))[0].startswith(denied)
