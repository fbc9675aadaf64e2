"""The native build's mechanics: the archive, the lock, publication, the pointer, the logs.

No compiler runs here; what a build does with one is seen by every native test.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "native"))

from gufobuild import cachedir, console, fetch, native, recipe, venv  # noqa: E402
from gufobuild.cachedir import CacheDir  # noqa: E402
from gufobuild.errors import BuildError  # noqa: E402

HOLDER = """
import sys; sys.path.insert(0, {native!r})
from pathlib import Path
from gufobuild.cachedir import locked
with locked(Path({lock!r}), print) as fd:
    {body}
"""


def holder(lock: Path, body: str) -> subprocess.Popen[str]:
    """A process that holds the lock; returns once it says so."""
    program = HOLDER.format(native=str(ROOT / "native"), lock=str(lock), body=body)
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


# -- the archive -----------------------------------------------------------------------------------


def pinned(content: bytes) -> recipe.Upstream:
    return recipe.Upstream("some-package", "1.0", hashlib.sha256(content).hexdigest(), "vendor/x", "abc")


def tarball(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def fake_python(folder: Path, file_name: str, content: bytes) -> Path:
    """Something that, run like ``python -m pip download … -d FOLDER``, leaves a file in FOLDER."""
    (folder / "payload").write_bytes(content)
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nfor last; do :; done\ncp "{folder}/payload" "$last/{file_name}"\n')
    script.chmod(0o755)
    return script


def test_archive_is_downloaded_checked_and_kept(tmp_path: Path) -> None:
    cache, content = CacheDir(tmp_path / "cache"), b"the release"
    upstream = pinned(content)
    python = fake_python(tmp_path, upstream.archive, content)
    path = fetch.archive(cache, upstream, tmp_path / "log", os.environ, str(python))
    assert path.read_bytes() == content
    python.unlink()
    assert fetch.archive(cache, upstream, tmp_path / "log", os.environ, str(python)) == path, "not fetched twice"
    assert [p.name for p in cache.downloads.iterdir()] == [upstream.archive]


def test_another_archive_is_refused_with_both_hashes(tmp_path: Path) -> None:
    cache, upstream = CacheDir(tmp_path / "cache"), pinned(b"the release")
    python = fake_python(tmp_path, upstream.archive, b"something else")
    with pytest.raises(BuildError) as caught:
        fetch.archive(cache, upstream, tmp_path / "log", os.environ, str(python))
    assert upstream.sha256 in str(caught.value)
    assert hashlib.sha256(b"something else").hexdigest() in str(caught.value)
    assert not list(cache.downloads.iterdir()), "nothing of it is kept"


def test_a_kept_archive_that_was_damaged_is_refused_and_removed(tmp_path: Path) -> None:
    cache, upstream = CacheDir(tmp_path), pinned(b"the release")
    cache.downloads.mkdir()
    (cache.downloads / upstream.archive).write_bytes(b"the releas")
    with pytest.raises(BuildError, match="not the pinned release"):
        fetch.archive(cache, upstream, tmp_path / "log", os.environ)
    assert not (cache.downloads / upstream.archive).exists()


def test_a_failed_download_names_the_offline_way(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho no network >&2\nexit 1\n")
    script.chmod(0o755)
    cache = CacheDir(tmp_path / "cache")
    with pytest.raises(BuildError, match=r"(?s)no network.*put some_package-1\.0\.tar\.gz into"):
        fetch.archive(cache, pinned(b""), tmp_path / "log", os.environ, str(script))


def test_source_holds_the_vendored_folder_alone(tmp_path: Path) -> None:
    content = tarball(
        {
            "some_package-1.0/setup.py": b"no",
            "some_package-1.0/vendor/x/CMakeLists.txt": b"project(x)",
            "some_package-1.0/vendor/x/src/a.cpp": b"int a;",
            "some_package-1.0/vendor/x/.git": b"gitdir: elsewhere",
        }
    )
    upstream, cache = pinned(content), CacheDir(tmp_path / "cache")
    path = tmp_path / upstream.archive
    path.write_bytes(content)
    root = fetch.source(cache, upstream, path)
    assert sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()) == [
        "CMakeLists.txt",
        "src/a.cpp",
    ]
    path.unlink()
    assert fetch.source(cache, upstream, path) == root, "not unpacked twice"


# -- the lock --------------------------------------------------------------------------------------


def test_a_second_build_waits_for_the_first(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    child = holder(lock, "print('held', flush=True); sys.stdin.read()")
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        assert child.stdin is not None
        child.stdin.close()  # only now does the first one end

    with cachedir.locked(lock, say, poll_s=0.01):
        assert child.wait() == 0
    assert len(said) == 1 and str(child.pid) in said[0] and str(lock) in said[0]


def test_the_lock_is_free_after_a_failure(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), cachedir.locked(tmp_path / "lock", pytest.fail):
        raise RuntimeError("build failed")
    with cachedir.locked(tmp_path / "lock", pytest.fail):
        pass


def test_the_lock_outlives_a_killed_build_until_its_compilers_are_gone(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    body = (
        "import subprocess; c = subprocess.Popen(['sh', '-c', 'read x'], stdin=0, pass_fds=[fd]);"
        "print('held', flush=True); c.wait()"
    )
    build = holder(lock, body)
    build.kill()
    assert build.wait() == -signal.SIGKILL
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        assert build.stdin is not None
        build.stdin.close()  # the compiler ends

    with cachedir.locked(lock, say, poll_s=0.01):
        assert said, "the compiler that was left behind still held the lock"


# -- publication -----------------------------------------------------------------------------------


def test_publish_is_all_or_nothing(tmp_path: Path) -> None:
    target = tmp_path / "lib-cpu-1"

    def broken(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cachedir.publish(target, broken)
    assert not list(tmp_path.iterdir())

    (tmp_path / ".tmp-lib-cpu-0-99").mkdir()  # what a kill leaves
    cachedir.publish(target, lambda folder: (folder / "whole").touch())
    assert [p.name for p in tmp_path.iterdir()] == ["lib-cpu-1"]
    cachedir.publish(target, lambda folder: pytest.fail("made twice"))


def test_old_libraries_are_forgotten_by_last_use(tmp_path: Path) -> None:
    cache = CacheDir(tmp_path)
    folders = [cache.library("cpu", str(i)) for i in range(5)]
    for i, folder in enumerate(folders):
        folder.mkdir(parents=True)
        os.utime(folder, (100 - i, 100 - i))
    gone = cachedir.forget_old_libraries(cache, keep=folders[4], n_keep=3)
    assert gone == [folders[2], folders[3]]
    assert sorted(cache.native.iterdir()) == [folders[0], folders[1], folders[4]]


def test_links_stay_links_and_files_share_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "libx.so.1").write_text("x")
    (tmp_path / "libx.so").symlink_to("libx.so.1")
    out = tmp_path / "out"
    out.mkdir()
    for name in ("libx.so.1", "libx.so"):
        cachedir.link_or_copy(tmp_path / name, out / name)
    assert os.readlink(out / "libx.so") == "libx.so.1"
    assert (out / "libx.so.1").stat().st_ino == (tmp_path / "libx.so.1").stat().st_ino


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("libllama.so", True),
        ("libllama-common.so.0.5.0", True),
        ("libggml-base.so.0", True),
        ("libggml-cuda.so", True),
        ("libllama.0.dylib", True),
        ("libllama.dylib", True),
        ("libllama-server-impl.so", False),
        ("libmtmd.so", False),
        ("llama-bench", False),
    ],
)
def test_which_libraries_are_published(name: str, wanted: bool) -> None:
    assert bool(native._LIBRARIES.fullmatch(name)) is wanted


# -- the pointer -----------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path: Path) -> native.Job:
    sources = tmp_path / "checkout" / "native"
    (sources / "src").mkdir(parents=True)
    (sources / "src" / "a.cpp").write_text("int a;")
    (sources / "CMakeLists.txt").write_text("project(gufo)")
    upstream = {"package": "p", "version": "1", "sha256": "0", "source": "s", "commit": "c"}
    (sources / "upstream.json").write_text(json.dumps(upstream))
    return native.Job(tmp_path / "checkout", CacheDir(tmp_path / "cache"), "cpu")


def test_a_second_checkout_links_without_building(job: native.Job, tmp_path: Path, monkeypatch) -> None:
    built: list[Path] = []

    def build(asked: native.Job, upstream, compilers, plan, environ) -> Path:
        library = asked.cache.library("cpu", plan.library_key(recipe.sources_hash(asked.native)))
        library.mkdir(parents=True)
        built.append(library)
        return library

    monkeypatch.setattr(native, "build", build)
    first = native.ensure(job, os.environ)
    assert json.loads(job.pointer.read_text()) == {"dir": str(first), "kind": "cpu"}

    subprocess.run(["cp", "-r", str(job.native), str(tmp_path / "native")], check=True)
    second = native.Job(tmp_path, job.cache, "cpu")
    assert native.ensure(second, os.environ) == first
    assert json.loads(second.pointer.read_text())["dir"] == str(first)
    assert built == [first]

    (job.native / "src" / "a.cpp").write_text("int b;")
    third = native.ensure(job, os.environ)
    assert built == [first, third] and third != first
    assert json.loads(job.pointer.read_text())["dir"] == str(third)


# -- logs and the environment's stamp --------------------------------------------------------------


def test_a_failing_command_shows_its_end_and_where_the_rest_is(tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    script = "for i in $(seq 200); do echo line $i; done; echo /copied/a.cpp:1: error >&2; exit 3"
    with pytest.raises(BuildError) as caught:
        console.run_logged(
            ["sh", "-c", script], log, "compiling", rewrite=lambda line: line.replace("/copied", "native/src")
        )
    text = str(caught.value)
    assert "native/src/a.cpp:1: error" in text and "exit status 3" in text and str(log) in text
    assert "line 200\n" in text and "line 10\n" not in text
    assert "line 10\n" in log.read_text()


def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no-such-program"):
        console.run_logged(["no-such-program"], tmp_path / "log", "x")


def test_the_environments_stamp(tmp_path: Path) -> None:
    (tmp_path / "native").mkdir()
    (tmp_path / "pyproject.toml").write_text("[project]")
    (tmp_path / "native" / "upstream.json").write_text("{}")
    env = venv.Venv(tmp_path)
    assert not venv.is_ready(env, [])
    env.python.parent.mkdir(parents=True)
    env.python.touch()
    env.stamp.write_text(json.dumps({"digest": venv.digest(tmp_path), "extras": ["dev"]}))
    assert venv.is_ready(env, []) and venv.is_ready(env, ["dev"])
    assert not venv.is_ready(env, ["dev", "bench"])
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    assert not venv.is_ready(env, [])
    env.stamp.write_text("{")
    assert not venv.is_ready(env, [])
