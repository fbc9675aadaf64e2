"""Generated models as files: same bytes, right sizes, clear refusals.  No native library."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from typer.testing import CliRunner

from gufo_gguf.cli.model import model_app
from gufo_gguf.core.errors import ConfigError
from gufo_gguf.models import qwen4exp
from gufo_gguf.models.recipe import Recipe, write
from gufo_gguf.models.shape import shape_geometry, state_size, write_shape
from gufo_gguf.models.tensors import FileType, Tensor, draw, matrix, stored_bytes, stored_type, vector
from gufo_gguf.models.tiny import TINY_ARCHS, tiny_recipe, write_tiny
from gufo_gguf.models.tokenizer import N_TOKENS, byte_alphabet, vocabulary


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("ftype", ["f16", "q8_0"])
def test_same_arguments_give_the_same_bytes_and_another_seed_others(tmp_path: Path, ftype: str) -> None:
    digests: list[str] = []
    for seed in (7, 7, 8):
        path = tmp_path / f"{len(digests)}.gguf"
        write_tiny("qwen4exp", path, seed=seed, ftype=ftype)
        digests.append(_digest(path))
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


def test_a_tensor_does_not_depend_on_the_tensors_around_it(tmp_path: Path) -> None:
    one, two = matrix("one", 64, 8), matrix("two", 64, 8)
    contents: list[dict[str, bytes]] = []
    for tensors in ((one, two), (two, one), (two,)):
        path = tmp_path / f"{len(contents)}.gguf"
        write(Recipe("llama", "order", {}, tensors), path, 3, FileType.F16)
        contents.append({t.name: t.data.tobytes() for t in GGUFReader(path).tensors})
    assert contents[0] == contents[1]
    assert contents[2]["two.weight"] == contents[0]["two.weight"] != contents[0]["one.weight"]


def test_first_drawn_bytes_are_those_of_every_numpy_release() -> None:
    # SFC64 with SeedSequence([0, crc32(name)]): if this changes, every cached model changes with it
    drawn = draw(vector("pinned", 4, low=-1.0, high=1.0), 0, FileType.F16).view(np.float32)
    assert drawn.tolist() == pytest.approx([0.3252137, 0.7113044, 0.2786342, 0.5073081], abs=1e-6)


@pytest.mark.parametrize("arch", TINY_ARCHS)
@pytest.mark.parametrize("ftype", list(FileType))
def test_the_file_holds_what_the_recipe_says(tmp_path: Path, arch: str, ftype: FileType) -> None:
    path = tmp_path / "model.gguf"
    write_tiny(arch, path, ftype=ftype)
    recipe = tiny_recipe(arch)
    reader = GGUFReader(path)
    stored = {t.name: t for t in reader.tensors}
    assert list(stored) == [t.name for t in recipe.tensors]
    for tensor in recipe.tensors:
        assert tuple(stored[tensor.name].shape) == tensor.shape
        assert stored[tensor.name].tensor_type == stored_type(tensor, ftype)
        assert stored[tensor.name].n_bytes == stored_bytes(tensor, ftype)
    for key in recipe.keys:
        assert reader.get_field(f"{arch}.{key}") is not None
    assert path.stat().st_size < 8_000_000
    if ftype is FileType.Q8_0:
        # q8_0 must not be a name on an f16 file: only what llama.cpp needs in f32 may differ
        assert {t.tensor_type for t in reader.tensors} == {GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0}


@pytest.mark.parametrize("ftype", list(FileType))
def test_values_fill_their_range(ftype: FileType) -> None:
    tensor = matrix("m", 96, 512, gain=2.0, zero_rows=(5, 511))
    data = draw(tensor, 1, ftype)
    if ftype is FileType.Q8_0:
        values = dequantize(data.reshape(512, -1), GGMLQuantizationType.Q8_0)
    else:
        values = data.view(np.float16).astype(np.float32).reshape(512, 96)
    assert np.all(values[[5, 511]] == 0)
    kept = np.delete(values, [5, 511], axis=0)
    assert abs(float(kept.std()) - 2.0 / 96**0.5) < 0.003
    assert abs(float(kept.mean())) < 0.003
    assert -tensor.high * 1.001 <= kept.min() < -0.98 * tensor.high
    assert 0.98 * tensor.high < kept.max() <= tensor.high * 1.001


def test_rows_that_blocks_do_not_divide_fall_back_to_f16() -> None:
    assert stored_type(matrix("m", 48, 4), FileType.Q8_0) is GGMLQuantizationType.F16
    assert stored_type(matrix("m", 64, 4), FileType.Q8_0) is GGMLQuantizationType.Q8_0
    assert stored_type(vector("v", 64, low=0, high=1), FileType.Q8_0) is GGMLQuantizationType.F32


def test_unknown_names_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'gpt5'.*qwen4exp, qwen35.*llama"):
        write_tiny("gpt5", tmp_path / "x.gguf")
    with pytest.raises(ConfigError, match=r"'q4'.*f16, q8_0"):
        write_tiny("llama", tmp_path / "x.gguf", ftype="q4")
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_tiny("lfm2", path)
    before = _digest(path)
    broken = Tensor("broken", (64, 2), 0.0, 1.0, keep_f32=False, zero_rows=(99,))
    with pytest.raises(IndexError):
        write(Recipe("lfm2", "broken", {}, (broken,)), path, 0, FileType.F16)
    assert _digest(path) == before
    assert list(tmp_path.iterdir()) == [path]


def test_places_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no folder .*missing"):
        write_tiny("lfm2", tmp_path / "missing" / "model.gguf")
    with pytest.raises(ConfigError, match="it is a folder"):
        write_shape("flash-next", shape_geometry("flash-next", 1), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_vocabulary_is_a_byte_level_bpe() -> None:
    vocab = vocabulary()
    assert len(vocab.tokens) == len(vocab.types) == len(set(vocab.tokens)) == N_TOKENS
    assert list(vocab.tokens[:256]) == byte_alphabet()
    known = set(vocab.tokens[:256])
    for i, merge in enumerate(vocab.merges):
        left, right = merge.split(" ")
        assert left in known and right in known, "a merge of something that no earlier merge made"
        assert vocab.tokens[256 + i] == left + right
        known.add(left + right)
    assert len(set(vocabulary(1024).tokens)) == 1024
    assert vocabulary(1024).tokens[: N_TOKENS - 1] != () and vocabulary(1024).merges == vocab.merges
    with pytest.raises(ValueError, match="at least"):
        vocabulary(100)


def test_impossible_geometries_are_refused() -> None:
    tiny = qwen4exp.TINY
    for change, complaint in (
        ({"n_layer": 1}, "layer 1"),
        ({"n_embd": 130}, "multiple of 4"),
        ({"n_expert": 1}, "uses 2"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            qwen4exp.recipe(dataclasses.replace(tiny, **change), "x")


def test_flash_next_has_the_real_state_and_row_sizes() -> None:
    # measured on the real geometry: 27,648 bytes a token, about 118 MB of private state
    state = state_size(shape_geometry("flash-next", 16))
    assert state.row_bytes == 27_648
    assert 117.5e6 < state.private_bytes < 118.5e6
    geometry = shape_geometry("flash-next", 4)
    assert (geometry.n_expert, geometry.n_expert_used) == (4, 4)


def test_shape_refuses_what_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'big'.*flash-next"):
        shape_geometry("big", 4)
    with pytest.raises(ConfigError, match="n_vocab is 100"):
        shape_geometry("flash-next", 4, n_vocab=100)
    huge = shape_geometry("flash-next", 1_000_000)
    with pytest.raises(ConfigError, match=r"takes .* GB free; use fewer experts"):
        write_shape("flash-next", huge, tmp_path / "x.gguf")
    assert list(tmp_path.iterdir()) == []


def test_command_line_writes_and_reports(tmp_path: Path) -> None:
    runner = CliRunner()
    out = tmp_path / "tiny.gguf"
    result = runner.invoke(model_app, ["tiny", "mamba2", str(out), "--seed", "5", "--type", "q8_0"])
    assert result.exit_code == 0 and f"{out.stat().st_size / 1e6:.1f} MB" in result.output
    write_tiny("mamba2", tmp_path / "same.gguf", seed=5, ftype="q8_0")
    assert _digest(out) == _digest(tmp_path / "same.gguf")

    shaped = tmp_path / "shape.gguf"
    small = ["--experts", "2", "--layers", "4", "--n-embd", "128", "--n-vocab", "768"]
    result = runner.invoke(model_app, ["shape", "flash-next", *small, "--type", "q8_0", str(shaped)])
    assert result.exit_code == 0, result.output
    assert "2,304 bytes of rows a token" in result.output
    assert {t.tensor_type for t in GGUFReader(shaped).tensors} >= {GGMLQuantizationType.Q8_0}
