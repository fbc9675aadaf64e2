"""What ``gufo doctor`` says: its rules on made-up machines, and the command on this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gufo_gguf.backend.devices import has_cub_top_k
from gufo_gguf.backend.libpath import library_name
from gufo_gguf.cli.findings import (
    COLD_TEST,
    BuildFacts,
    DiskFacts,
    Finding,
    Level,
    ModelFacts,
    build_findings,
    disk_findings,
    missing_build,
    model_findings,
)
from gufo_gguf.engine.budget import conversations_that_fit
from tests.conftest import TinyModel

CPU = BuildFacts({"kind": "cpu", "flags": [], "toolkit": ""}, False, None, False, 2, 2)
CUDA_13_0 = {"kind": "cuda", "flags": ["-DGGML_CUDA=ON"], "toolkit": "Cuda compilation tools, release 13.0, V13.0.88"}
GPU = replace(CPU, info=CUDA_13_0, has_gpu=True)
MODEL = ModelFacts("qwen4exp", "hybrid_idx", None, 1000, 50_000, 1 << 30, 8 << 30, 16 << 30, 8192, 32_768, True)


def texts(found: list[Finding]) -> str:
    return "\n".join(f"{f.level} {f.text} {f.remedy}" for f in found)


def test_a_good_machine_has_nothing_to_warn_about() -> None:
    assert build_findings(CPU) == [] and build_findings(GPU) == [] and model_findings(MODEL) == []
    assert disk_findings(DiskFacts("/c", "", "", 8, 8, 0)) == []


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (replace(GPU, cub_top_k=True), ("CUB", "make qualify", "qwen4exp")),
        (replace(GPU, info={**CUDA_13_0, "flags": ["-DGGML_CUDA_CUB_3DOT2=ON"]}), ("CUB",)),
        (replace(GPU, info={**CUDA_13_0, "toolkit": "release 13.2, V13.2.1"}), ("CUB",)),
        (replace(GPU, graph_opt="1"), ("GGML_CUDA_GRAPH_OPT=1", "unset", "qwen35")),
        (replace(GPU, has_gpu=False), ("no GPU is visible",)),
        (replace(CPU, chosen_threads=16), ("16 threads on 2 cores", "--threads 2")),
        (replace(CPU, info={}), ("does not say how it was built",)),
    ],
)
def test_what_was_measured_or_reported_is_said(facts: BuildFacts, words: tuple[str, ...]) -> None:
    found = build_findings(facts)
    assert len(found) == 1
    for word in words:
        assert word in texts(found)


def test_what_does_not_concern_this_build_is_not_said() -> None:
    assert build_findings(replace(CPU, graph_opt="1")) == []
    assert build_findings(replace(GPU, graph_opt="0")) == []
    assert build_findings(replace(GPU, info={**CUDA_13_0, "toolkit": "release 12.8"})) == []


def test_the_tests_that_are_named_exist() -> None:
    file = COLD_TEST.removeprefix("pytest ")
    text = Path(file).read_text(encoding="utf-8")
    assert "def test_conversations_in_turn_on_one_slot_run_as_in_a_fresh_context" in text
    from tests.qualification.cases import BY_NAME

    assert {"qwen4exp", "qwen35"} <= BY_NAME.keys()


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (replace(MODEL, uncacheable="the memory kind dsa rewrites rows"), ("without a cache", "dsa rewrites rows")),
        (replace(MODEL, ram_budget=1 << 20), ("one conversation that fills the context", "--cache-ram-bytes")),
        (replace(MODEL, ram_budget=0), ("no RAM tier",)),
        (replace(MODEL, ram_budget=17 << 30), ("more than the 16.0 GiB",)),
        (replace(MODEL, memory="iswa"), ("--swa-full",)),
        (replace(MODEL, n_ctx=65_536), ("65,536", "32,768")),
        (replace(MODEL, has_template=False), ("ChatML",)),
    ],
)
def test_what_a_model_makes_worth_saying(facts: ModelFacts, words: tuple[str, ...]) -> None:
    found = model_findings(facts)
    assert len(found) == 1
    for word in words:
        assert word in texts(found)


def test_disks() -> None:
    full = disk_findings(DiskFacts("/c", "", "", budget_bytes=100 << 20, free_bytes=10 << 20, used_bytes=20 << 20))
    assert "room for 30.0 MiB" in texts(full) and full[0].level is Level.WARNING
    broken = disk_findings(DiskFacts("/c", "/c is not a folder", "", 1, 0, 0))
    assert [f.level for f in broken] == [Level.PROBLEM]
    assert "process 7" in texts(disk_findings(DiskFacts("/c", "", "/c is in use by process 7", 1, 9, 0)))


def test_conversations_that_fit() -> None:
    assert conversations_that_fit(10_000, 90, 10, 100) == 10
    assert conversations_that_fit(9_999, 90, 10, 100) == 9
    assert conversations_that_fit(10_000, 90, 10, 100, max_checkpoints=4) == 4
    assert conversations_that_fit(10_000, 90, 10, 100, own_bytes=1000) == 5
    assert conversations_that_fit(10_000, 90, 0, 0) == 0


def test_cub_is_found_by_its_symbols(tmp_path: Path) -> None:
    assert not has_cub_top_k(tmp_path)
    library = tmp_path / library_name("ggml-cuda")
    library.write_bytes(b"\x7fELF" + bytes(5000))
    assert not has_cub_top_k(tmp_path)
    library.write_bytes(b"\x7fELF" + bytes(5000) + b"_ZN3cub6detail17DeviceTopKKernelIfEE" + bytes(100))
    assert has_cub_top_k(tmp_path)


@pytest.mark.native
def test_doctor_looks_at_a_model_and_writes_nothing(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    done = doctor(tiny_model("qwen4exp"), "--cache-ram-bytes", "64M", "--cache-disk", folder, "--tokens", 1000)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    state = found["sections"]["state"]
    assert state["memory kind"] == "hybrid_idx" and state["cached"] == "yes, at checkpoints"
    [fit] = found["fit"]
    assert (
        fit["tokens"] == 1000 and fit["ram"] == (64 << 20) // fit["bytes"] and fit["disk"] < (8 << 30) // fit["bytes"]
    )
    assert "CPU" in found["sections"]["devices"] and found["sections"]["build"]["gufo"]
    assert not folder.exists()


@pytest.mark.native
def test_doctor_fails_where_a_server_could_not_work(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    done = doctor("--cache-disk", file)
    assert done.returncode == 1 and "is not a folder" in done.stdout
    done = doctor(tmp_path / "none.gguf")
    assert done.returncode == 1 and done.stderr.startswith("gufo: ") and "none.gguf" in done.stderr


def test_doctor_reports_when_nothing_is_built(tmp_path: Path) -> None:
    empty = tmp_path / "libs"
    empty.mkdir()
    done = doctor("owlet", "--cache-disk", tmp_path / "cache", env={"GUFO_NATIVE_DIR": str(empty)})
    assert done.returncode == 1 and "Traceback" not in done.stderr
    found = json.loads(done.stdout)
    assert {"build", "memory", "disk"} <= found["sections"].keys() and found["fit"] == []
    problem = next(f for f in found["findings"] if f["level"] == "problem")
    assert "lacks" in problem["text"] and "make native" in problem["remedy"]
    assert any("model was not looked at" in f["text"] for f in found["findings"])


def test_a_missing_package_names_the_command() -> None:
    found = missing_build(ModuleNotFoundError("No module named 'llama_cpp'"))
    assert found.level is Level.PROBLEM and "llama_cpp" in found.text and "make native" in found.remedy


@pytest.mark.native
def test_doctor_for_people(tiny_model: TinyModel) -> None:
    command = [sys.executable, "-m", "gufo_gguf.cli.main", "doctor", "-t", "1", "--config", os.devnull]
    plain = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert plain.returncode == 0, plain.stderr
    assert "available" in plain.stdout and "automatic RAM budget" in plain.stdout and "doctor MODEL" in plain.stdout
    model = [*command, str(tiny_model("qwen4exp")), "-c", "8192", "--cache-ram-bytes", "1G"]
    looked = subprocess.run(model, capture_output=True, text=True, timeout=120)
    assert "how many conversations of N tokens" in looked.stdout and "yes, at checkpoints" in looked.stdout


def doctor(*args: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gufo_gguf.cli.main", "doctor", "--json", "-t", "1", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **(env or {})})
