"""Write a model of this architecture as GGUF: F32 (for the oracle), F16 and Q8_0.

    python -m models.owlet.export --weights FOLDER --out FOLDER [--top-k N]

Matrices are stored in the file's type, all that llama.cpp reads as float32 stays float32.  Files
are cut into parts of at most 16 MB, which llama.cpp loads as one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import quantize

from gufo_gguf.models import qwen4exp
from gufo_gguf.models.recipe import U64, Value
from models.owlet.geometry import OWLET, Geometry
from models.owlet.weights import Array, load_parts, to_gguf

PART_BYTES_MAX = 16_000_000
F32, F16, Q8_0 = GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0
_FILE_TYPES = {F32: LlamaFileType.ALL_F32, F16: LlamaFileType.MOSTLY_F16, Q8_0: LlamaFileType.MOSTLY_Q8_0}
_Q8_0_BLOCK = 32


def generator_geometry(g: Geometry) -> qwen4exp.Geometry:
    """The same sizes in the class of the generator of random models, which knows keys and tensors."""
    return qwen4exp.Geometry(
        **{name: value for name, value in g.as_dict().items() if name not in ("norm_epsilon", "rope_base", "eos_token")}
    )


def write_gguf(
    path: Path,
    g: Geometry,
    arrays: Mapping[str, Array],
    add_tokenizer: Callable[[GGUFWriter], None],
    dtype: GGMLQuantizationType,
    name: str = "Owlet",
    description: str = "",
) -> list[Path]:
    """Write one file, or parts ``*-0000i-of-0000n.gguf`` when it is larger than PART_BYTES_MAX.

    KeyError for a missing tensor, ValueError for one of another shape.
    """
    recipe = qwen4exp.recipe(generator_geometry(g), name)
    writer = GGUFWriter(path, recipe.arch, split_max_size=PART_BYTES_MAX)
    writer.add_name(name)
    if description:
        writer.add_description(description)
    writer.add_license("MIT")
    writer.add_quantization_version(2)
    writer.add_file_type(_FILE_TYPES[dtype])
    for key, value in {**recipe.keys, "ple.eos_token_id": g.eos_token}.items():
        _add(writer, f"{recipe.arch}.{key}", value)
    add_tokenizer(writer)
    for tensor in recipe.tensors:
        array = arrays[tensor.name]
        if array.shape != tensor.shape[::-1]:
            raise ValueError(f"{tensor.name} has shape {array.shape}, expected {tensor.shape[::-1]}")
        kind = F32 if tensor.keep_f32 else dtype
        if kind is Q8_0 and array.shape[-1] % _Q8_0_BLOCK:
            kind = F16
        data = quantize(np.ascontiguousarray(array), kind)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(path.parent.glob(f"{path.stem}-*-of-*.gguf"))
    return parts or [path]


def _add(writer: GGUFWriter, key: str, value: Value) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case U64():
            writer.add_key_value(key, list(value), GGUFValueType.ARRAY, GGUFValueType.UINT64)
        case _:
            writer.add_array(key, value)


def main() -> None:
    from models.owlet.tokenizer import add_to_gguf

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, required=True, help="folder with weights-*.npz of a training run")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--top-k", type=int, default=OWLET.indexer_top_k, help="tokens a query may attend to")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    arrays = to_gguf(load_parts(args.weights, "weights"))
    geometry = replace(OWLET, indexer_top_k=args.top_k)
    about = "a small qwen4exp model trained to remember what it read; see its card for what it can and cannot do"
    for dtype in (F16, Q8_0):
        path = args.out / f"owlet-{dtype.name.lower()}.gguf"
        for part in write_gguf(path, geometry, arrays, add_to_gguf, dtype, description=about):
            print(f"{part}  {part.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
