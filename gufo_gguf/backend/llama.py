"""The llama.cpp backend: one model, one context, ``n_slots`` sequences in streams of their own.

Loading goes through the llama-cpp-python bindings (their struct mirrors belong to the very release
our libllama is built from); running and state go through libgufo.  One owner thread makes all calls.
"""

from __future__ import annotations

import ctypes as c
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gufo_gguf.backend import native
from gufo_gguf.backend.base import BackendInfo, Bytes, Logits, Span
from gufo_gguf.backend.fingerprint import fingerprint, model_files
from gufo_gguf.backend.fit import UNCHECKED_CELLS, context_bytes
from gufo_gguf.backend.libpath import build_info, library_dir
from gufo_gguf.backend.vocab import Vocab
from gufo_gguf.cache.types import Component, ComponentKind, Inventory, Tokens
from gufo_gguf.core.cores import allowed_cores
from gufo_gguf.core.errors import BackendError, ConfigError, ModelError, UnsupportedMemory
from gufo_gguf.core.memory import available_bytes

FORK_VERSION = 2
"""Counts changes of the overlay that change state bytes; part of every state's identity."""

CACHE_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2, "q4_1": 3, "iq4_nl": 20, "q5_0": 6, "q5_1": 7}
"""--cache-type-k/-v names, as llama-server's, with ggml's type numbers."""


@dataclass(frozen=True, slots=True)
class LlamaOptions:
    """How to load and run a model.  ``n_ctx`` is per slot; 0 = what the model was trained with."""

    n_ctx: int = 0
    n_slots: int = 1
    n_batch: int = 2048
    n_ubatch: int = 512
    n_threads: int = 0
    """0 = physical cores, at most 16."""
    n_gpu_layers: int = -1
    """-1 = all that fit where there is a GPU."""
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    swa_full: bool = False
    """Sliding-window models: keep every row of the window layers (more memory, cut anywhere)."""
    chat_template: str | None = None
    """Overrides the model's own; part of the identity."""
    use_mmap: bool = True


def default_threads() -> int:
    """Physical cores this process may run on, at most 16."""
    import psutil

    allowed = allowed_cores()
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed, 16))


def _cache_type(flag: str, name: str) -> int:
    if name not in CACHE_TYPES:
        raise ConfigError(f"{flag} {name!r} is not one of {', '.join(CACHE_TYPES)}")
    return CACHE_TYPES[name]


class _Batch:
    """The arrays of a pass, made once: a pass of one token should not pay for allocations."""

    def __init__(self, n_batch: int) -> None:
        self.tokens = np.zeros(n_batch, np.int32)
        self.slots = np.zeros(n_batch, np.uint32)
        self.want = np.zeros(n_batch, np.int8)
        self.addresses = tuple(native.pointer(a) for a in (self.tokens, self.slots, self.want))


class LlamaBackend:
    """See ``backend.base.Backend``.  Raises ModelError with the file and llama.cpp's own reason."""

    def __init__(
        self, path: str | Path, options: LlamaOptions = LlamaOptions(), progress: Callable[[float], None] | None = None
    ) -> None:
        self.path = Path(path)
        self.options = options
        self._model: Any = None
        self._ctx: Any = None
        self._address = 0
        self._state: int | None = None
        self._check_file()
        self._low = native.bindings()
        self._lib = native.library()
        self._low.llama_backend_init()
        try:
            self._load(progress)
            self._open_context()
            self.info = self._describe()
            self._batch = _Batch(self.info.n_batch)
        except BaseException:
            self.close()
            raise

    # -- loading ---------------------------------------------------------------------------------
    def _check_file(self) -> None:
        if not self.path.is_file():
            raise ModelError(
                f"{self.path}: no such model file; name a GGUF file, owlet or smollm2, or a model of the hub with -hf"
            )
        for part in model_files(self.path):
            with part.open("rb") as file:
                magic = file.read(4)
            if magic != b"GGUF":
                raise ModelError(f"{part}: not a GGUF file (it starts with {magic!r}); convert the model to GGUF first")

    def _load(self, progress: Callable[[float], None] | None) -> None:
        params = self._low.llama_model_default_params()
        if self.options.n_gpu_layers >= 0:
            params.n_gpu_layers = self.options.n_gpu_layers
        params.load_mode = -1 if self.options.use_mmap else 0
        # one reference for as long as the load runs; without a callback llama.cpp prints dots
        callback = self._low.llama_progress_callback(lambda done, _: (progress(done) if progress else None, True)[1])
        params.progress_callback = callback
        native.last_log()
        self._model = self._low.llama_model_load_from_file(str(self.path).encode(), params)
        if not self._model:
            raise ModelError(f"{self.path}: llama.cpp cannot load this model: {native.last_log() or 'no reason given'}")

    def _open_context(self) -> None:
        low, options = self._low, self.options
        params = low.llama_context_default_params()
        n_train = int(low.llama_model_n_ctx_train(self._model))
        n_ctx = options.n_ctx or n_train
        threads = options.n_threads or default_threads()
        params.n_ctx = n_ctx * options.n_slots
        params.n_seq_max = options.n_slots
        params.n_batch = min(options.n_batch, max(n_ctx, 32))
        params.n_ubatch = min(options.n_ubatch, params.n_batch)
        params.n_outputs_max = options.n_slots
        params.n_threads = params.n_threads_batch = threads
        params.type_k = _cache_type("--cache-type-k", options.cache_type_k)
        params.type_v = _cache_type("--cache-type-v", options.cache_type_v)
        params.flash_attn_type = 1
        params.kv_unified = False
        params.swa_full = options.swa_full
        params.offload_kqv = True
        params.no_perf = True
        if params.n_ctx > UNCHECKED_CELLS:
            self._refuse_too_large(params, n_ctx)
        native.last_log()
        self._ctx = low.llama_init_from_model(self._model, params)
        if not self._ctx:
            reason = native.last_log() or "no reason given"
            raise ModelError(
                f"{self.path}: no context of {options.n_slots} x {n_ctx} tokens ({reason}); "
                f"try a smaller --ctx-size, fewer --sessions or a smaller --cache-type-k/-v"
            )
        status = c.c_int(0)
        address = self._address = int(c.cast(self._ctx, c.c_void_p).value or 0)
        self._uncacheable: str | None = None
        self._state = self._lib.gufo_state_open(address, options.n_slots, c.byref(status))
        if not self._state:
            try:
                native.check(status.value)
            except UnsupportedMemory as error:
                self._uncacheable = str(error)
            self._state = self._lib.gufo_run_open(address, options.n_slots, c.byref(status))
            native.check(status.value)

    def _refuse_too_large(self, params: Any, n_ctx: int) -> None:
        """ModelError if a context of this size would take more memory than there is."""
        low, n_slots = self._low, self.options.n_slots

        def host_bytes(n: int) -> int:
            small = type(params).from_buffer_copy(params)
            small.n_ctx = n * n_slots
            small.n_batch, small.n_ubatch = min(params.n_batch, n), min(params.n_ubatch, n)
            ctx = low.llama_init_from_model(self._model, small)
            if not ctx:
                return 0  # the real one will say why
            try:
                return int(self._lib.gufo_host_bytes(c.cast(ctx, c.c_void_p).value))
            finally:
                low.llama_free(ctx)

        need, free = context_bytes(host_bytes, n_ctx, n_slots), available_bytes()
        if need > free:
            raise ModelError(
                f"{self.path}: a context of {n_slots} x {n_ctx} tokens takes about {need / 1e9:.1f} GB and "
                f"{free / 1e9:.1f} GB are free; try a smaller --ctx-size, fewer --sessions or a smaller "
                "--cache-type-k/-v"
            )

    def _describe(self) -> BackendInfo:
        low = self._low
        inventory = None if self._uncacheable else self._inventory()
        vocab = low.llama_model_get_vocab(self._model)
        settings = self.settings()
        return BackendInfo(
            identity=hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16).hexdigest(),
            model_name=self.meta("general.name") or self.path.stem,
            arch=self.meta("general.architecture") or "unknown",
            device=self._device(),
            n_ctx=int(low.llama_n_ctx_seq(self._ctx)),
            n_ctx_train=int(low.llama_model_n_ctx_train(self._model)),
            n_slots=self.options.n_slots,
            n_batch=int(low.llama_n_batch(self._ctx)),
            n_ubatch=int(low.llama_n_ubatch(self._ctx)),
            n_vocab=int(low.llama_vocab_n_tokens(vocab)),
            memory=self._lib.gufo_memory_kind(self._state).decode(),
            inventory=inventory,
            uncacheable=self._uncacheable,
            n_params=int(low.llama_model_n_params(self._model)),
            model_bytes=int(low.llama_model_size(self._model)),
        )

    def _device(self) -> str:
        kind = build_info(library_dir()).get("kind")
        return str(kind) if kind else "cpu"

    def settings(self) -> dict[str, Any]:
        """All that decides whether two states may be mixed, readable; its digest is the identity.

        Context size, slot count, threads, port and alias are not in it: what they change in a
        computation's bytes leaves states that the model computed all the same.
        """
        options = self.options
        return {
            "weights": fingerprint(self.path),
            "template": options.chat_template or self.meta("tokenizer.chat_template") or "",
            "cache_type": [options.cache_type_k, options.cache_type_v],
            "swa_full": options.swa_full,
            "n_ubatch": int(self._low.llama_n_ubatch(self._ctx)),
            "components": [] if self._uncacheable else [asdict(x) for x in self._inventory().components],
            "fork": FORK_VERSION,
            "device": self._device(),
        }

    def _inventory(self) -> Inventory:
        components = []
        for i in range(self._lib.gufo_n_components(self._state)):
            raw = native.NativeComponent()
            native.check(self._lib.gufo_get_component(self._state, i, c.byref(raw)))
            kind = ComponentKind.ROWS if raw.is_rows else ComponentKind.PRIVATE
            components.append(Component(raw.id.decode(), kind, raw.dtype.decode(), int(raw.n_bytes), int(raw.layout)))
        return Inventory(self._lib.gufo_memory_kind(self._state).decode(), tuple(components))

    def meta(self, key: str) -> str | None:
        """A value of the model's metadata as text, or None."""
        size = 1 << 16
        while True:
            buffer = c.create_string_buffer(size)
            n = self._low.llama_model_meta_val_str(self._model, key.encode(), buffer, size)
            if n < 0:
                return None
            if n < size:
                return buffer.raw[:n].decode("utf-8", "replace")
            size = n + 1

    @property
    def model_ptr(self) -> int:
        """Address of the llama_model, for the chat and sampler bridges."""
        return int(c.cast(self._model, c.c_void_p).value or 0)

    def vocab(self) -> Vocab:
        """The model's vocabulary; usable from any thread while this backend is open."""
        return Vocab(self._model)

    @property
    def ctx_ptr(self) -> int:
        """Address of the llama_context; 0 when closed."""
        return self._address

    # -- running ---------------------------------------------------------------------------------
    def decode(self, spans: Sequence[Span]) -> None:
        batch, at = self._batch, 0
        n = sum(span.tokens.size for span in spans)
        if n > self.info.n_batch:
            raise ValueError(f"{n} tokens in one pass, n_batch is {self.info.n_batch}")
        batch.want[:n] = 0
        for span in spans:
            end = at + span.tokens.size
            batch.tokens[at:end] = span.tokens
            batch.slots[at:end] = span.slot
            batch.want[end - 1] = span.want_logits
            at = end
        native.check(self._lib.gufo_decode(self._state, n, *batch.addresses))

    def logits(self, slot: int) -> Logits:
        out = np.empty(self.info.n_vocab, dtype=np.float32)
        native.check(self._lib.gufo_logits(self._state, slot, native.pointer(out), out.size))
        return out

    def output_index(self, slot: int) -> int:
        """Batch index to sample the slot from; BackendError when the last decode gave it no logits."""
        index = int(self._lib.gufo_output_index(self._state, slot))
        if index < 0:
            raise BackendError(f"the last decode gave no logits for slot {slot}")
        return index

    def position(self, slot: int) -> int:
        out = c.c_int32()
        native.check(self._lib.gufo_position(self._state, slot, c.byref(out)))
        return out.value

    def truncate(self, slot: int, n_tokens: int) -> None:
        native.check(self._lib.gufo_truncate(self._state, slot, n_tokens))

    # -- state -----------------------------------------------------------------------------------
    def rows_out(self, slot: int, first: int, n: int, out: Bytes) -> None:
        native.check(self._lib.gufo_rows_out(self._state, slot, first, n, native.pointer(out), out.nbytes))

    def pieces_out(self, slot: int, pieces: Sequence[tuple[int, int, Bytes]]) -> None:
        raw = native.pieces([(first, n, out, n) for first, n, out in pieces])
        native.check(self._lib.gufo_pieces_out(self._state, slot, raw, len(raw)))

    def private_out(self, slot: int, out: Bytes) -> None:
        native.check(self._lib.gufo_private_out(self._state, slot, native.pointer(out), out.nbytes))

    def begin_restore(self, slot: int, tokens: Tokens, keep_rows: int = 0, *, trusted: bool = False) -> None:
        """See ``Backend``.  ``trusted``: skip the search for NaN; only for payloads this backend gave
        out itself and that were guarded (RAM) or checksummed (disk) since."""
        ids = np.ascontiguousarray(tokens, dtype=np.int32)
        native.check(self._lib.gufo_begin_restore(self._state, slot, native.pointer(ids), ids.size, keep_rows, trusted))

    def load_rows(self, slot: int, first: int, n: int, buffer: Bytes, buffer_rows: int) -> None:
        self.load_pieces(slot, [(first, n, buffer, buffer_rows)])

    def load_pieces(self, slot: int, pieces: Sequence[tuple[int, int, Bytes, int]]) -> None:
        """Many (first, n, buffer, buffer_rows) at once: buffers at one distance go in one copy per tensor.

        On a device the copies are only queued: keep the buffers as they are until finish or abort.
        """
        raw = native.pieces(pieces)
        native.check(self._lib.gufo_load_pieces(self._state, slot, raw, len(raw)))

    def load_row_bytes(self, slot: int, first: int, n: int, buffer_rows: int, offset: int, data: Bytes) -> None:
        native.check(
            self._lib.gufo_load_row_bytes(
                self._state, slot, first, n, buffer_rows, offset, native.pointer(data), data.nbytes
            )
        )

    def load_private_bytes(self, slot: int, offset: int, data: Bytes) -> None:
        native.check(self._lib.gufo_load_private_bytes(self._state, slot, offset, native.pointer(data), data.nbytes))

    def load_private(self, slot: int, buffer: Bytes) -> None:
        native.check(self._lib.gufo_load_private(self._state, slot, native.pointer(buffer), buffer.nbytes))

    def wait_restore(self, slot: int) -> None:
        """Wait for the copies of a running restore that are only queued on a device."""
        native.check(self._lib.gufo_wait_restore(self._state, slot))

    def finish_restore(self, slot: int) -> None:
        native.check(self._lib.gufo_finish_restore(self._state, slot))

    def abort_restore(self, slot: int) -> None:
        native.check(self._lib.gufo_abort_restore(self._state, slot))

    def clear_all(self) -> None:
        """Empty every slot and zero the buffers: the cure for a state that holds NaN."""
        native.check(self._lib.gufo_clear_all(self._state))

    def metadata(self, slot: int) -> bytes:
        """Cells, positions and extras of a slot as llama.cpp would write them; for comparisons."""
        n = c.c_uint64()
        native.check(self._lib.gufo_metadata(self._state, slot, None, 0, c.byref(n)))
        out = np.empty(n.value, dtype=np.uint8)
        native.check(self._lib.gufo_metadata(self._state, slot, native.pointer(out), out.nbytes, c.byref(n)))
        return out.tobytes()

    @property
    def pinned(self) -> bool:
        """Does ``alloc`` give memory pinned for a device?"""
        handle = self._lib.gufo_host_alloc(self._state, 4096)
        try:
            return bool(handle) and bool(self._lib.gufo_host_is_pinned(handle))
        finally:
            if handle:
                self._lib.gufo_host_free(handle)

    def alloc(self, n_bytes: int) -> Bytes:
        assert self._state is not None
        return native.host_array(self._state, n_bytes)

    def close(self) -> None:
        """Idempotent; host memory handed out by ``alloc`` outlives it."""
        if self._state:
            self._lib.gufo_state_close(self._state)
            self._state = None
        if self._ctx:
            self._low.llama_free(self._ctx)
            self._ctx = None
            self._address = 0
        if self._model:
            self._low.llama_model_free(self._model)
            self._model = None

    def __enter__(self) -> LlamaBackend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
