"""A recipe is everything about a model but its random values: keys, tensors, vocabulary.

``write`` turns one into a GGUF file.  The same recipe, seed and file type give the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFValueType, GGUFWriter, LlamaFileType

from gufo_gguf.core.errors import ConfigError
from gufo_gguf.models.tensors import FileType, Tensor, draw, stored_bytes, stored_type
from gufo_gguf.models.tokenizer import END_OF_TEXT, N_TOKENS, PRE_TOKENIZER, TURN_END, vocabulary

_ANY_DTYPE = np.dtype(np.float16)


class U64(tuple[int, ...]):
    """An array that llama.cpp reads as unsigned 64-bit; plain lists of int are 32-bit."""


Value = bool | int | float | str | list[int] | list[bool] | U64

Progress = Callable[[int, int], None]
"""Called with (bytes of tensor data written, bytes in all) after each tensor."""


@dataclass(frozen=True, slots=True)
class Recipe:
    arch: str
    """llama.cpp's name of the architecture."""
    name: str
    keys: Mapping[str, Value]
    """Metadata keys without the ``ARCH.`` prefix."""
    tensors: tuple[Tensor, ...]
    n_vocab: int = N_TOKENS


def chat_template() -> str:
    """The template that every generated model carries; the file says what it is made to exercise."""
    return Path(__file__).with_name("chat.jinja").read_text(encoding="utf-8")


def file_type(name: str) -> FileType:
    """FileType of a name; ConfigError that lists the known ones."""
    try:
        return FileType(name)
    except ValueError:
        raise ConfigError(f"unknown file type {name!r}; known: {', '.join(FileType)}") from None


def write(recipe: Recipe, path: Path, seed: int, ftype: FileType, progress: Progress | None = None) -> None:
    """Write the model to path, replacing what is there only once the file is complete.

    Raises ConfigError if path cannot be written; no partial file stays behind.
    """
    check_target(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    writer = GGUFWriter(partial, recipe.arch)
    try:
        _add_keys(writer, recipe, ftype)
        _add_tokenizer(writer, recipe.n_vocab)
        for tensor in recipe.tensors:
            dtype = stored_type(tensor, ftype)
            n_bytes = stored_bytes(tensor, ftype)
            # the writer takes NumPy's order, the row length last; the NumPy type is not looked at
            writer.add_tensor_info(tensor.name, tensor.shape[::-1], _ANY_DTYPE, n_bytes, dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        _write_tensors(writer, recipe, seed, ftype, progress)
        writer.close()
        os.replace(partial, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        writer.close()
        partial.unlink(missing_ok=True)


def check_target(path: Path) -> None:
    """ConfigError unless a file can be put there; said before minutes of work, not after."""
    folder = path.absolute().parent
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder; name a file")
    if not folder.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"cannot write {path}: no permission to write into {folder}")


def _write_tensors(writer: GGUFWriter, recipe: Recipe, seed: int, ftype: FileType, progress: Progress | None) -> None:
    sizes = [stored_bytes(tensor, ftype) for tensor in recipe.tensors]
    n_total, n_done = sum(sizes), 0
    buffer = np.empty(max(sizes), np.uint8)
    for tensor in recipe.tensors:
        data = draw(tensor, seed, ftype, buffer)
        writer.write_tensor_data(data)
        n_done += data.nbytes
        if progress is not None:
            progress(n_done, n_total)


def _add_keys(writer: GGUFWriter, recipe: Recipe, ftype: FileType) -> None:
    writer.add_name(recipe.name)
    writer.add_description("random weights, for tests and measurements; it has learned nothing")
    writer.add_quantization_version(2)
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0 if ftype is FileType.Q8_0 else LlamaFileType.MOSTLY_F16)
    for key, value in recipe.keys.items():
        full = f"{recipe.arch}.{key}"
        match value:
            case bool():
                writer.add_bool(full, value)
            case int():
                writer.add_uint32(full, value)
            case float():
                writer.add_float32(full, value)
            case str():
                writer.add_string(full, value)
            case U64():
                writer.add_key_value(full, list(value), GGUFValueType.ARRAY, GGUFValueType.UINT64)
            case _:
                writer.add_array(full, value)


def _add_tokenizer(writer: GGUFWriter, n_vocab: int) -> None:
    vocab = vocabulary(n_vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list(list(vocab.tokens))
    writer.add_token_types(list(vocab.types))
    writer.add_token_merges(list(vocab.merges))
    writer.add_bos_token_id(vocab.id_of(END_OF_TEXT))
    writer.add_eos_token_id(vocab.id_of(TURN_END))
    writer.add_eot_token_id(vocab.id_of(TURN_END))
    writer.add_pad_token_id(vocab.id_of(END_OF_TEXT))
    # a template writes its own start; a second one would shift every prefix by a token
    writer.add_add_bos_token(False)
    writer.add_chat_template(chat_template())
