"""What llama.cpp computes after each layer, read from its graph while it runs; for comparisons.

hc_init ─► layer 0 ─► l_last-0 ─► layer 1 ─► l_last-1 ─► ... ─► result_output
"""

from __future__ import annotations

import ctypes as ct
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gufo_gguf.backend import native
from gufo_gguf.backend.libpath import library_dir, library_name

Array = npt.NDArray[np.float32]


def layer_outputs(
    path: Path, tokens: Sequence[int], cache_type: int, n_ubatch: int, flash: bool = False
) -> dict[str, Array]:
    """Name of a graph node (``l_last-3``, ``result_output``, ``hc_init``) -> one row per token.

    ``cache_type`` is ggml's number.  One sequence from its start; all tokens give an output, so that
    the last layer drops none.
    """
    low = native.bindings()
    native.library()
    base = ct.CDLL(str(library_dir() / library_name("ggml-base")))
    base.ggml_get_name.restype, base.ggml_get_name.argtypes = ct.c_char_p, [ct.c_void_p]
    base.ggml_nelements.restype, base.ggml_nelements.argtypes = ct.c_int64, [ct.c_void_p]
    base.ggml_get_data_f32.restype, base.ggml_get_data_f32.argtypes = ct.POINTER(ct.c_float), [ct.c_void_p]
    found: dict[str, list[Array]] = defaultdict(list)

    def on_node(tensor: int, asked: bool, _: object) -> bool:
        name = base.ggml_get_name(tensor).decode()
        wanted = name.startswith("l_last-") or name in ("hc_init", "result_output")
        if wanted and not asked:
            n = base.ggml_nelements(tensor)
            found[name].append(np.ctypeslib.as_array(base.ggml_get_data_f32(tensor), (n,)).copy())
        return wanted or not asked

    callback = low.ggml_backend_sched_eval_callback(on_node)
    low.llama_backend_init()
    model = low.llama_model_load_from_file(str(path).encode(), low.llama_model_default_params())
    assert model, native.last_log()
    params = low.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = len(tokens), len(tokens), n_ubatch
    params.n_threads = params.n_threads_batch = 1
    params.n_seq_max, params.n_outputs_max = 1, len(tokens)
    params.type_k = params.type_v = cache_type
    params.flash_attn_type = int(flash)
    params.cb_eval = callback
    context = low.llama_init_from_model(model, params)
    assert context, native.last_log()
    batch = low.llama_batch_init(len(tokens), 0, 1)
    try:
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
            batch.seq_id[i][0] = 0
        assert low.llama_decode(context, batch) == 0
    finally:
        low.llama_batch_free(batch)
        low.llama_free(context)
        low.llama_model_free(model)
    return {name: np.concatenate(parts).reshape(len(tokens), -1) for name, parts in found.items()}
