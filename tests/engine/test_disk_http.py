"""The disk tier as a user meets it: over HTTP, across restarts, with folders that are not as they should be."""

from __future__ import annotations

import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import httpx
import numpy as np
import pytest

from gufo_gguf.engine.ablation import Ablation
from gufo_gguf.server.settings import ServerSettings
from gufo_gguf.store.browse import browse
from gufo_gguf.store.check import check_store
from gufo_gguf.store.disk import DiskStore
from gufo_gguf.store.fs import PosixFileSystem
from gufo_gguf.store.layout import Layout, random_key
from gufo_gguf.store.manifest import Manifest, encode
from gufo_gguf.store.scan import read_manifest
from gufo_gguf.store.types import CheckpointMeta
from tests.conftest import TinyModel
from tests.engine.served import SYSTEM, Reply, Talk, ask, distance, on_disk, rounding, served, wait_until_written
from tests.server.conftest import running_server

pytestmark = [pytest.mark.native, pytest.mark.slow]


@pytest.fixture
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("qwen4exp")


@contextmanager
def in_process(model: Path, folder: Path | None, **options: Any) -> Iterator[httpx.Client]:
    """A server in this process: quicker to start, same engine, same HTTP."""
    from gufo_gguf.backend.llama import LlamaOptions
    from gufo_gguf.engine.engine import Engine, EngineOptions

    llama = {"n_ctx": 4096, "n_slots": 1, "n_batch": 256, "n_ubatch": 64, "n_threads": 1}
    llama |= {name: options.pop(name) for name in list(options) if name in LlamaOptions.__dataclass_fields__}
    engine = Engine.load(
        model,
        EngineOptions(llama=LlamaOptions(**llama), cache_ram_bytes=64 << 20, cache_disk=folder, **options),  # type: ignore[arg-type]
    )
    with running_server(engine, ServerSettings(port=0, drain_s=5.0)) as running:
        yield running.http
        assert engine.check() == []


def two_turns(http: httpx.Client) -> Talk:
    talk = Talk()
    talk.turn(http, "First?")
    talk.turn(http, "Second?")
    return talk


def restored_from_ram(model: Path) -> Reply:
    """The control: the same three turns in one process, another conversation in between, no disk.

    What the slot held is left out: it never goes to disk.
    """
    with in_process(model, None, ablation=Ablation.named(["parting"])) as http:
        talk = two_turns(http)
        ask(http, [{"role": "user", "content": "Something else takes the slot."}])
        return talk.turn(http, "Third?")


# -- restarts ------------------------------------------------------------------------------------
def test_a_stopped_server_goes_on_where_it_was(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with served(model, "-c", 4096, "--cache-disk", folder, "--without", "parting") as first:
        talk = two_turns(first.http)
        last_stable = max(c["n_tokens"] for c in first.cache()["checkpoints"] if c["origin"] == "prompt")
        log = first.stop()
        assert "Traceback" not in log and SYSTEM[:20] not in log
    stored = on_disk(folder)
    assert stored and stored[-1] == last_stable, "SIGTERM writes the newest boundary whatever its spacing"
    with served(model, "-c", 2048, "-j", 2, "--cache-disk", folder) as second:
        status = second.cache()
        assert status["disk"]["checkpoints"] == len(stored)
        assert all(row["ram"] > 0 and row["disk"] > row["ram"] for row in status["fits"])
        third = talk.turn(second.http, "Third?")
        assert third.source == "disk" and third.cached >= stored[-1] > 300
        cold = ask(second.http, talk.messages[:-1], cache_prompt=False)
        assert second.http.get("/v1/cache/check").json()["problems"] == []
    control = restored_from_ram(model)
    assert control.source == "ram" and control.cached == third.cached
    assert third.exact == control.exact, "from disk, in another context, it goes on as from RAM"
    assert cold.cached == 0 and distance(third, cold) < rounding(model)  # other pass ends, other rounding


def completed(http: httpx.Client, tokens: list[int]) -> dict[str, Any]:
    """A greedy answer to token ids, with everything about it that must repeat exactly."""
    body = {"prompt": tokens, "n_predict": 24, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    answer = http.post("/completion", json={**body, "n_probs": 3})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("arch", ["qwen4exp", "lfm2", "llama"])
def test_an_answer_outlives_a_stop(tiny_model: TinyModel, tmp_path: Path, arch: str) -> None:
    """What was generated need not be read again: the slots' ends are written, and go on as if nothing had been."""
    model, ids = tiny_model(arch), np.random.default_rng(3).integers(20, 200, (2, 2, 300)).tolist()
    history: list[list[int]] = []
    with served(model, "-c", 2048, "-j", 2, "--cache-disk", tmp_path / "cache") as first:
        for started, _ in ids:
            history.append(started + completed(first.http, started)["tokens"])
        assert "Traceback" not in first.stop()
    with served(model, "-c", 2048, "-j", 2, "--cache-disk", tmp_path / "cache") as second:
        again = [completed(second.http, before + new) for before, (_, new) in zip(history, ids, strict=True)]
        assert second.http.get("/v1/cache/check").json()["problems"] == []
    with served(model, "-c", 2048, "-j", 2) as uninterrupted:
        assert [started + completed(uninterrupted.http, started)["tokens"] for started, _ in ids] == history
        straight = [completed(uninterrupted.http, before + new) for before, (_, new) in zip(history, ids, strict=True)]
    for restored, live, before in zip(again, straight, history, strict=True):
        assert restored["gufo"]["reuse_source"] == "disk" and live["gufo"]["reuse_source"] == "live"
        assert restored["timings"]["cache_n"] == live["timings"]["cache_n"] == len(before) - 1
        assert restored["completion_probabilities"] == live["completion_probabilities"]


def test_a_killed_server_keeps_what_it_said_was_written(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with served(model, "-c", 4096, "--cache-disk", folder) as first:
        talk = two_turns(first.http)
        wait_until_written(first.http)
        acknowledged = on_disk(folder)
        first.kill()
    with served(model, "-c", 1024, "-j", 3, "--cache-disk", folder) as second:
        assert set(acknowledged) <= set(on_disk(folder))
        third = talk.turn(second.http, "Third?")
        assert third.source == "disk" and third.cached >= acknowledged[-1] > 300
        cold = ask(second.http, talk.messages[:-1], cache_prompt=False)
        assert third.text == cold.text
        assert "Traceback" not in second.log


def test_a_checkpoint_from_disk_becomes_a_citizen_of_ram(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with in_process(model, folder) as http:
        talk = two_turns(http)
    with in_process(model, folder) as http:
        assert talk.turn(http, "Third?").source == "disk"
        ask(http, [{"role": "user", "content": "Something else takes the slot."}])
        fourth = talk.turn(http, "Fourth?")
        assert fourth.source == "ram", "deeper than what lies on disk"
        n_files = len(list((folder / "v1/chunks").iterdir()))
    # its chunks were bound to their files: the newer checkpoint added only new ones
    n_chunks = (fourth.usage["prompt_tokens"]) // 256
    assert n_files <= n_chunks and len(list((folder / "v1/chunks").iterdir())) <= n_chunks + 1


# -- identity ------------------------------------------------------------------------------------
def test_what_is_another_state_misses_and_says_so(model: Path, tmp_path: Path, tiny_model: TinyModel) -> None:
    folder, path = tmp_path / "cache", tmp_path / "model.gguf"
    shutil.copy(model, path)
    with in_process(path, folder) as http:
        talk = two_turns(http)
    question = [*talk.messages, {"role": "user", "content": "Third?"}]
    template = (Path(__file__).parents[2] / "gufo_gguf/models/chat.jinja").read_text(encoding="utf-8")
    for other in ({"cache_type_k": "q8_0", "cache_type_v": "q8_0"}, {"chat_template": template + "{# 2 #}"}):
        with in_process(path, folder, **other) as http:
            missed = ask(http, question)
            assert (missed.cached, missed.source, missed.miss) == (0, "none", "identity"), other
    shutil.copy(tiny_model("qwen4exp", seed=1), path)
    with in_process(path, folder) as http:
        missed = ask(http, question)
        assert (missed.cached, missed.miss) == (0, "identity"), "other weights at the same path"
    shutil.copy(model, path)
    with in_process(path, folder) as http:
        assert ask(http, question).source == "disk", "and the old ones again"


@pytest.mark.parametrize(
    "other",
    [
        {"alias": "someone"},
        {"n_ctx": 1024},
        {"n_slots": 3},
        {"n_ctx": 8192, "n_slots": 2, "alias": "x", "max_queue": 1},
    ],
    ids=str,
)
def test_what_is_the_same_state_hits(model: Path, tmp_path: Path, other: dict[str, Any]) -> None:
    folder, moved = tmp_path / "cache", tmp_path / "moved.gguf"
    with in_process(model, folder) as http:
        talk = two_turns(http)
    shutil.copy(model, moved)
    stored = on_disk(folder)[-1]
    with in_process(moved, folder, **other) as http:
        third = talk.turn(http, "Third?")
        assert third.source == "disk" and third.cached >= stored


# -- damage --------------------------------------------------------------------------------------
def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("what", ["first chunk", "private", "missing chunk"])
def test_a_damaged_file_costs_time_and_nothing_else(
    model: Path, tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "cache"
    with in_process(model, folder) as http:
        talk = two_turns(http)
    question = [*talk.messages, {"role": "user", "content": "Third?"}]
    with in_process(model, None) as http:
        cold = ask(http, question)
    if what == "private":
        for path in (folder / "v1/private").iterdir():
            flip(path)
    else:
        firsts = {record.chunks[0].key for record in browse(PosixFileSystem(str(folder), create=False)).records}
        assert len(firsts) == 1, "shared by all"
        path = folder / "v1/chunks" / f"{firsts.pop()}.chunk"
        flip(path) if what == "first chunk" else path.unlink()
    with caplog.at_level(logging.WARNING, logger="gufo"), in_process(model, folder) as http:
        reply = ask(http, question)
        assert reply.exact == cold.exact, "served cold, as if the folder were not there"
        assert reply.cached == 0
        if what != "missing chunk":  # found at the restore; a missing file is found at the start
            assert reply.miss == "quarantined"
        assert http.get("/v1/cache").json()["disk"]["disk_damage_total"] >= 1
        wait_until_written(http)
        again = ask(http, question)
        assert again.exact == reply.exact
    words = "missing" if what == "missing chunk" else "checksum"
    assert any("disk cache" in r.message and words in r.message for r in caplog.records)
    checked = check_store(PosixFileSystem(str(folder), create=False))
    assert checked.damage == () and checked.n_checkpoints > 0, "what was damaged is gone"
    with in_process(model, folder) as http:
        reply = ask(http, question)
        assert reply.source == "disk", "what was written anew is sound"
        assert reply.text == cold.text


# -- folders that cannot be used -----------------------------------------------------------------
def warnings(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and word in r.getMessage()]


def test_a_folder_in_use_is_one_warning_and_serving_goes_on(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "cache"
    holder = DiskStore.open(str(folder), 1 << 30)
    try:
        with caplog.at_level(logging.WARNING, logger="gufo"), in_process(model, folder) as http:
            talk = two_turns(http)
            assert talk.turn(http, "Third?").source == "live"
            assert http.get("/v1/cache").json()["disk"] is None
    finally:
        holder.close()
    [said] = warnings(caplog, "disk cache")
    assert str(folder) in said and f"process {os.getpid()}" in said


@pytest.mark.parametrize("how", ["a file", "no permission", "a later release"])
def test_a_folder_that_cannot_be_used_is_one_warning(
    model: Path, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    if how == "a file":
        folder.write_text("")
    elif how == "a later release":
        (folder / "v2").mkdir(parents=True)
    else:
        folder.mkdir()

        def refuse(self: PosixFileSystem, name: str) -> None:  # root may write anywhere: refuse in its place
            raise PermissionError(13, "Permission denied", name)

        monkeypatch.setattr(PosixFileSystem, "make_folder", refuse)
    with caplog.at_level(logging.WARNING, logger="gufo"), in_process(model, folder) as http:
        talk = two_turns(http)
        assert talk.turn(http, "Third?").source == "live"
    [said] = warnings(caplog, "disk cache")
    assert str(folder) in said
    if how == "a later release":
        assert list(folder.iterdir()) == [folder / "v2"], "left alone"


def test_a_full_disk_is_one_warning_and_comes_back(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    full = True
    write = PosixFileSystem.write

    def maybe(self: PosixFileSystem, handle: int, data: memoryview) -> int:
        if full:
            raise OSError(28, "No space left on device")
        return write(self, handle, data)

    monkeypatch.setattr(PosixFileSystem, "write", maybe)
    monkeypatch.setattr("gufo_gguf.engine.disk_writer.PROBE_S", 0.05)
    with caplog.at_level(logging.WARNING, logger="gufo"), in_process(model, folder) as http:
        talk = two_turns(http)
        for _ in range(200):
            if http.get("/v1/cache").json()["disk"]["suspended"]:
                break
            ask(http, [{"role": "user", "content": "Give it a moment."}], max_tokens=1)
        assert "disk is full" in http.get("/v1/cache").json()["disk"]["suspended"]
        assert talk.turn(http, "Third?").source != "none"
        assert len(warnings(caplog, "disk is full")) == 1
        full = False
        for _ in range(200):
            if not http.get("/v1/cache").json()["disk"]["suspended"]:
                break
            ask(http, [{"role": "user", "content": "Give it a moment."}], max_tokens=1)
        other = Talk(system="Another conversation. " * 60)
        other.turn(http, "Written again?")
        wait_until_written(http)
    assert on_disk(folder)


# -- start-up ------------------------------------------------------------------------------------
class CountingFileSystem(PosixFileSystem):
    """Counts what is read through it, by folder."""

    read_bytes: ClassVar[Counter[str]] = Counter()
    opened: ClassVar[dict[int, str]] = {}

    def open(self, folder: str, name: str) -> int:
        handle = super().open(folder, name)
        self.opened[handle] = folder
        return handle

    def read(self, handle: int, out: memoryview, offset: int) -> int:
        n = super().read(handle, out, offset)
        self.read_bytes[self.opened.get(handle, "?")] += n
        return n

    def read_file(self, folder: str, name: str, max_bytes: int) -> tuple[bytes, int]:
        data, disk_bytes = super().read_file(folder, name, max_bytes)
        self.read_bytes[folder] += len(data)
        return data, disk_bytes


def test_a_start_with_a_thousand_manifests_reads_no_payload(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    with in_process(model, folder) as http:
        talk = two_turns(http)
    stored = on_disk(folder)[-1]
    multiply(folder, 1000)
    monkeypatch.setattr("gufo_gguf.store.disk.PosixFileSystem", CountingFileSystem)
    CountingFileSystem.read_bytes.clear()
    with in_process(model, folder) as http:
        assert http.get("/v1/cache").json()["disk"]["checkpoints"] >= 1000
        read = dict(CountingFileSystem.read_bytes)
        manifests = sum(p.stat().st_size for p in (folder / "v1/manifests").iterdir())
        assert set(read) == {"v1/manifests"} and manifests <= read["v1/manifests"] <= manifests + 4096
        third = talk.turn(http, "Third?")
        assert third.source == "disk" and third.cached >= stored
        assert CountingFileSystem.read_bytes["v1/private"] > 0, "the counter counts"


def multiply(folder: Path, n: int) -> None:
    """n more checkpoints that share the chunks of the first: other histories, own private files."""
    layout, fs = Layout(), PosixFileSystem(str(folder), create=False)
    key = sorted(p.stem for p in (folder / "v1/manifests").iterdir())[0]
    found = read_manifest(fs, layout, key)
    assert isinstance(found, Manifest)
    source = folder / "v1/private" / f"{found.private.key}.private"
    rng = np.random.default_rng(7)
    for i in range(n):
        tokens = found.meta.tokens.copy()
        tokens[-8:] = rng.integers(0, 300, 8)
        m = found.meta
        meta = CheckpointMeta(m.scope, tokens, m.origin, m.chunk_rows, m.row_bytes, m.inputs, m.created_s, m.labels)
        private = found.private._replace(key=random_key())
        made = Manifest(random_key(), found.sequence + 1 + i, meta, found.chunks, private)
        os.link(source, folder / "v1/private" / f"{made.private.key}.private")
        (folder / "v1/manifests" / f"{made.key}.manifest").write_bytes(encode(made))
    fs.shut()


def test_logits_restored_for_one_prompt_never_reach_another_of_the_same_length(model: Path, tmp_path: Path) -> None:
    """Same slot, same position, other conversation: the logits its checkpoint keeps must be its own."""

    def first_token(http: httpx.Client, prompt: list[int], **more: Any) -> tuple[str, float]:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 1, "ignore_eos": True, **more}
        reply = http.post("/v1/completions", json=body).raise_for_status().json()
        return reply["usage"]["gufo"]["reuse_source"], reply["choices"][0]["logprobs"]["token_logprobs"][0]

    one, other = ([int(t) for t in np.random.default_rng(seed).integers(10, 250, 300)] for seed in (1, 2))
    folder = tmp_path / "cache"
    with in_process(model, folder) as http:
        first_token(http, one)
    with in_process(model, folder) as http:
        assert first_token(http, one)[0] == "disk"
        source, computed = first_token(http, other)
        assert source == "none"
        assert first_token(http, other) == ("ram", computed)
    with in_process(model, folder) as http:
        assert first_token(http, other) == ("disk", computed)


def test_without_a_ram_tier_the_disk_tier_is_still_written(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with served(model, "-c", 2048, "--cache-disk", folder, "--cache-ram-bytes", 0) as first:
        talk = two_turns(first.http)
        assert "in spite of --cache-ram-bytes 0" in first.stop()
    assert on_disk(folder)
    with served(model, "-c", 2048, "--cache-disk", folder, "--cache-ram-bytes", 0) as second:
        third = talk.turn(second.http, "Third?")
        assert third.source == "disk" and third.cached >= on_disk(folder)[-1]
        assert second.http.get("/v1/cache/check").json()["problems"] == []
