"""Calling ``native/include/gufo.h``'s sampler and chat sections through ctypes.

One place knows signatures, error codes and who frees what; callers see Python values and the
exceptions of ``core.errors``.  The library is handed in, never looked up here.  cffi was rejected:
a compiler at install time for two dozen functions.
"""

from __future__ import annotations

import ctypes as ct
import json
from enum import IntEnum
from typing import Any

import msgspec

from gufo_gguf.core.errors import BackendError, ContextFull, RequestError, SlotNotReady, StateRejected


class Status(IntEnum):
    """``enum gufo_status``."""

    OK = 0
    INVALID = 1
    UNSUPPORTED = 2
    NOT_READY = 3
    REJECTED = 4
    FULL = 5
    BACKEND = 6
    ABORTED = 7


_P = ct.c_void_p
_S = ct.c_char_p
_OUT = ct.POINTER(ct.c_char_p)
_I32P = ct.POINTER(ct.c_int32)
_INT = ct.c_int
_I32 = ct.c_int32
_SIZE = ct.c_size_t

_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "gufo_last_error": (_S, ()),
    "gufo_last_status": (_INT, ()),
    "gufo_string_free": (None, (_P,)),
    "gufo_sampler_new": (_P, (_P, _S)),
    "gufo_sampler_free": (None, (_P,)),
    "gufo_sampler_clone": (_P, (_P,)),
    "gufo_sampler_reset": (_INT, (_P,)),
    "gufo_sampler_accept": (_INT, (_P, _P, _SIZE, _INT)),
    "gufo_sampler_sample": (_INT, (_P, _P, _I32, _I32P)),
    "gufo_sampler_sample_logits": (_INT, (_P, _P, _I32, _I32P)),
    "gufo_sampler_candidates": (_INT, (_P, _I32, _P, _P, _I32P)),
    "gufo_sampler_seed": (ct.c_uint32, (_P,)),
    "gufo_sampler_end_reasoning": (_INT, (_P, ct.POINTER(_INT))),
    "gufo_sampler_preserved": (_INT, (_P, _P, _SIZE, ct.POINTER(_SIZE))),
    "gufo_logprobs": (_INT, (_P, _I32, _I32, _I32, _P, _P, _P)),
    "gufo_schema_to_grammar": (_INT, (_S, _P)),
    "gufo_chat_new": (_P, (_P, _S)),
    "gufo_chat_free": (None, (_P,)),
    "gufo_chat_info": (_INT, (_P, _P, _P)),
    "gufo_chat_render": (_INT, (_P, _S, _P)),
    "gufo_chat_parser_new": (_P, (_S,)),
    "gufo_chat_parser_free": (None, (_P,)),
    "gufo_chat_parser_feed": (_INT, (_P, _S, _SIZE, _INT, _P)),
    "gufo_chat_parser_message": (_INT, (_P, _P)),
}


def bind(lib: ct.CDLL) -> ct.CDLL:
    """Declare the functions used here on ``lib``; repeating it changes nothing."""
    for name, (restype, argtypes) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype = restype
        function.argtypes = argtypes
    return lib


def error_of(lib: ct.CDLL, code: int) -> Exception:
    """The exception for a failed call of this thread.

    INVALID is the request's fault; its message begins with the field, which becomes ``param``.
    """
    message = (lib.gufo_last_error() or b"").decode("utf-8", "replace")
    if code == Status.INVALID:
        field, colon, _ = message.partition(": ")
        return RequestError(message, param=field if colon and field.isidentifier() else None)
    kinds: dict[int, type[BackendError]] = {
        Status.NOT_READY: SlotNotReady,
        Status.REJECTED: StateRejected,
        Status.FULL: ContextFull,
    }
    return kinds.get(code, BackendError)(message or f"the native layer failed with code {code}")


def check(lib: ct.CDLL, code: int) -> None:
    if code != Status.OK:
        raise error_of(lib, code)


def made(lib: ct.CDLL, handle: int | None) -> int:
    """A handle from a constructor, or the exception for NULL."""
    if not handle:
        raise error_of(lib, lib.gufo_last_status())
    return handle


def call_for_text(lib: ct.CDLL, function: Any, *args: Any) -> str:
    """Call ``function(*args, char ** out)``; the text, its native copy freed."""
    out = ct.c_void_p()
    check(lib, function(*args, ct.byref(out)))
    try:
        return ct.string_at(out.value or 0).decode("utf-8")
    finally:
        lib.gufo_string_free(out)


def call_for_json(lib: ct.CDLL, function: Any, *args: Any) -> Any:
    return msgspec.json.decode(call_for_text(lib, function, *args))


def to_json(value: object) -> bytes:
    """Compact UTF-8 JSON; lone surrogates (a client's half emoji) become U+FFFD, since llama.cpp refuses them."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
