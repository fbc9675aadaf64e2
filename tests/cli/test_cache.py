"""``gufo cache`` on folders with known checkpoints, on a folder in use, and against a server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gufo_gguf.cli.cache import _plain
from gufo_gguf.cli.main import app
from gufo_gguf.core.errors import GufoError
from gufo_gguf.server.settings import ServerSettings
from gufo_gguf.store.browse import browse, open_for_reading
from gufo_gguf.store.disk import DiskStore
from gufo_gguf.store.fs import PosixFileSystem
from tests.server.conftest import running_server
from tests.server.standin import StandinEngine
from tests.store.world import Spec, World, expected_bytes, restored_bytes

A1, A2 = Spec("a", 150), Spec("a", 300)
B = Spec("b", 200, parent="a", shared=128)


def gufo(*args: object) -> Result:
    return CliRunner().invoke(app, ["cache", *map(str, args)], env={"COLUMNS": "160"})


def state(root: Path) -> dict[str, tuple[bytes, int]]:
    """Every file's bytes and modification time."""
    return {
        str(p.relative_to(root)): (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(root.rglob("*")) if p.is_file()
    }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three checkpoints: A1 and A2 of one conversation, B branched off it."""
    folder = tmp_path / "cache"
    world = World(PosixFileSystem(str(folder)))
    for spec in (A1, A2, B):
        world.write_durably(spec)
    world.store.close()
    return folder


@pytest.fixture
def in_use(root: Path) -> Iterator[int]:
    """The folder held by another process; its pid."""
    code = "import sys; from gufo_gguf.store.disk import DiskStore; s = DiskStore.open(sys.argv[1], 1 << 30); "
    code += "print('open', flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    assert child.stdout.readline() == b"open\n"
    yield child.pid
    child.stdin.close()
    assert child.wait(30) == 0


def listing(root: Path) -> list[dict[str, object]]:
    result = gufo("ls", "--cache-disk", root, "--json")
    assert result.exit_code == 0, result.output
    found: list[dict[str, object]] = json.loads(result.output)["checkpoints"]
    return found


def test_ls_counts_every_block_once(root: Path) -> None:
    rows = listing(root)
    assert [row["tokens"] for row in rows] == [150, 300, 200]
    shelf = browse(open_for_reading(str(root)))
    # what only one checkpoint holds, plus each shared file once, is everything there is
    shared = {k for r in shelf.records for k in iter(r.chunks.keys())}
    shared = {k for k in shared if shelf.catalogue.file(k).refs > 1}  # type: ignore[union-attr]
    once = sum(shelf.catalogue.file(k).disk_bytes for k in shared)  # type: ignore[union-attr]
    assert len(shared) == 2
    assert sum(int(row["unique_bytes"]) for row in rows) + once == shelf.usage.used_bytes  # type: ignore[call-overload]
    blocks = sum(p.stat().st_blocks * 512 for p in root.rglob("*.*") if p.is_file())
    assert shelf.usage.used_bytes == blocks


def test_ls_shows_a_line_per_checkpoint_and_the_sum(root: Path) -> None:
    output = gufo("ls", "--cache-disk", root).output
    lines = [line for line in output.splitlines() if re.match(r"\s*[0-9a-f]{8}", line)]
    assert len(lines) == 3 and all("prompt" in line and "ok" in line for line in lines)
    assert "3 checkpoints in" in output and "no manifest" not in output and "in use" not in output


@pytest.mark.parametrize("harm", [None, "lose a chunk", "leave a stray file"])
def test_ls_and_check_say_the_same_of_a_folder(root: Path, harm: str | None) -> None:
    if harm == "lose a chunk":
        _lose(root)
    elif harm is not None:
        (root / "v1/chunks" / ("0" * 32 + ".chunk")).write_bytes(b"x" * 5000)
    listed, checked = (gufo(name, "--cache-disk", root).output.splitlines() for name in ("ls", "check"))
    assert re.match(r"\d checkpoints in \d+ files, [\d.]+ .?i?B on disk", listed[-1])
    assert listed[-1] in checked
    assert any("of content read: " in line for line in checked)


@pytest.mark.parametrize("columns", [160, 80, 30])
def test_no_table_is_cut_in_a_pipe(root: Path, columns: int) -> None:
    ident = str(listing(root)[0]["id"])
    for args in (["ls"], ["show", ident]):
        result = CliRunner().invoke(app, ["cache", *args, "--cache-disk", str(root)], env={"COLUMNS": str(columns)})
        assert result.output == gufo(*args, "--cache-disk", root).output and "…" not in result.output


def test_looking_changes_nothing_also_while_in_use(root: Path, in_use: int) -> None:
    before = state(root)
    assert f"in use by process {in_use}" in gufo("ls", "--cache-disk", root).output
    ident = str(listing(root)[0]["id"])
    for args in (["ls"], ["show", ident], ["check"]):
        result = gufo(*args, "--cache-disk", root)
        assert result.exit_code == 0, result.output
    assert state(root) == before


def test_rm_is_refused_on_a_folder_in_use(root: Path, in_use: int) -> None:
    before = state(root)
    with pytest.raises(GufoError, match=f"in use by process {in_use}"):
        CliRunner().invoke(app, ["cache", "rm", str(listing(root)[0]["id"]), "--cache-disk", str(root)],
                           catch_exceptions=False)  # fmt: skip
    assert state(root) == before


def test_show_names_the_sharers(root: Path) -> None:
    a1, a2, b = (str(row["id"]) for row in listing(root))
    shown = json.loads(gufo("show", b[:12], "--cache-disk", root, "--json").output)
    assert shown["id"] == b and shown["tokens"] == 200 and shown["chunks"] == 3 and shown["inputs"] == [1]
    assert {other["id"]: other["chunks"] for other in shown["shares_with"]} == {a1: 2, a2: 2}
    text = gufo("show", b[:12], "--cache-disk", root).output
    assert f"{a1[:8]} (150 tokens): 2 chunks" in text and "label name" in text


def test_rm_removes_what_only_it_needs(root: Path) -> None:
    a1, a2, b = (str(row["id"]) for row in listing(root))
    result = gufo("rm", a2[:10], "--cache-disk", root)
    assert result.exit_code == 0 and f"removed {a2} (300 tokens)" in result.output
    assert [row["id"] for row in listing(root)] == [a1, b]
    store = DiskStore(PosixFileSystem(str(root)), 1 << 30)
    list(store.load())
    assert store.catalogue.loose() == [] and store.catalogue.usage().debris_bytes == 0
    for spec in (A1, B):
        record = next(r for r in store.catalogue.records() if r.labels["name"] == spec.name)
        assert restored_bytes(store, record) == expected_bytes(spec)
    store.close()
    assert gufo("check", "--cache-disk", root).exit_code == 0


def test_rm_is_all_or_none(root: Path) -> None:
    before = state(root)
    ident = str(listing(root)[0]["id"])
    for wrong in ("ffffffffffff", ""):
        result = gufo("rm", ident, wrong, "--cache-disk", root)
        assert isinstance(result.exception, GufoError) and "no checkpoint" in str(result.exception)
    after = state(root)
    assert {k: v[0] for k, v in after.items() if "LOCK" not in k} == {
        k: v[0] for k, v in before.items() if "LOCK" not in k
    }


def test_rm_of_all(root: Path) -> None:
    result = gufo("rm", "--all", "--cache-disk", root)
    assert result.exit_code == 0 and "3 checkpoints removed" in result.output
    assert listing(root) == [] and [p for p in (root / "v1").rglob("*.*") if p.is_file()] == []
    assert "0 checkpoints in 0 files" in gufo("ls", "--cache-disk", root).output
    for args in (["rm"], ["rm", "--all", "abc"]):
        wrong = gufo(*args, "--cache-disk", root)
        assert isinstance(wrong.exception, GufoError) and "--all" in str(wrong.exception)


def test_one_is_not_several(root: Path) -> None:
    first, *rest = (str(row["id"]) for row in listing(root))
    gufo("rm", *rest, "--cache-disk", root)
    assert re.search(r"^1 checkpoint in \d+ files", gufo("ls", "--cache-disk", root).output, re.MULTILINE)
    assert "1 checkpoint in " in gufo("check", "--cache-disk", root).output
    assert "1 checkpoint removed" in gufo("rm", first, "--cache-disk", root).output


def test_an_id_that_begins_several_is_refused(root: Path) -> None:
    from gufo_gguf.core.errors import StoreError

    shelf = browse(open_for_reading(str(root)))
    short = shelf.short_ids(at_least=1)
    assert all(shelf.find(text).key == key for key, text in short.items())  # type: ignore[union-attr]
    assert all(len(text) == 1 or any(o.key != key and o.key.startswith(text[:-1]) for o in shelf.records)
               for key, text in short.items())  # fmt: skip
    first = shelf.records[0].key
    many = [r.key for r in shelf.records if r.key[0] == first[0]]
    if len(many) > 1:
        with pytest.raises(StoreError, match="give more"):
            shelf.find(first[0])


Damage = Callable[[Path], str]


def _flip(root: Path) -> str:
    path = next(iter(sorted((root / "v1/chunks").iterdir())))
    data = bytearray(path.read_bytes())
    data[77] ^= 4
    path.write_bytes(data)
    return "checksum"


def _cut(root: Path) -> str:
    path = next(iter(sorted((root / "v1/private").iterdir())))
    os.truncate(path, path.stat().st_size - 1)
    return "size"


def _lose(root: Path) -> str:
    next(iter(sorted((root / "v1/chunks").iterdir()))).unlink()
    return "missing"


def _garble(root: Path) -> str:
    path = next(iter(sorted((root / "v1/manifests").iterdir())))
    path.write_bytes(b"GUFOCKPT and then nonsense" * 20)
    return "format"


@pytest.mark.parametrize("harm", [_flip, _cut, _lose, _garble])
def test_check_finds_damage_and_fails(root: Path, harm: Damage) -> None:
    assert gufo("check", "--cache-disk", root).exit_code == 0
    reason = harm(root)
    before = state(root)
    result = gufo("check", "--cache-disk", root)
    assert result.exit_code == 1 and reason in result.output and "cannot be restored: checkpoint" in result.output
    assert state(root) == before, "check repairs nothing"
    listed = gufo("ls", "--cache-disk", root)
    assert listed.exit_code == 0
    if reason != "checksum":  # that takes reading the payload
        assert reason in listed.output


def test_folders_that_are_none(tmp_path: Path) -> None:
    for args in (["ls"], ["check"], ["rm", "abc"], ["show", "abc"]):
        for folder in (tmp_path / "none", tmp_path):
            result = gufo(*args, "--cache-disk", folder)
            assert isinstance(result.exception, GufoError) and str(folder) in str(result.exception)
    assert list(tmp_path.iterdir()) == [], "looking creates nothing"


def test_check_wants_one_thing(root: Path) -> None:
    for args in ([], ["--cache-disk", root, "--url", "http://127.0.0.1:1"]):
        result = gufo("check", *args)
        assert isinstance(result.exception, GufoError) and "--url" in str(result.exception)


def test_check_of_a_running_server() -> None:
    engine = StandinEngine()
    with running_server(engine, ServerSettings(port=0, drain_s=0.2, api_keys=("sk-1",))) as running:
        good = gufo("check", "--url", running.url, "--api-key", "sk-1")
        assert good.exit_code == 0 and "adds up" in good.output
        engine.problems = ("chunk 3: 2 references counted, 1 held",)
        bad = gufo("check", "--url", running.url + "/v1", "--api-key", "sk-1")
        assert bad.exit_code == 1 and "chunk 3" in bad.output
        refused = gufo("check", "--url", running.url)
        assert isinstance(refused.exception, GufoError) and "401" in str(refused.exception)
    gone = gufo("check", "--url", running.url)
    assert isinstance(gone.exception, GufoError) and "does not answer" in str(gone.exception)


def test_words_of_a_file_are_no_commands_to_the_terminal() -> None:
    assert "\x1b" not in _plain("a\x1b[31mb[bold]") and _plain("[bold]") != "[bold]"
