"""What a finished library folder does once it is loaded: calls that need no model and no GPU, and the devices.

`smoke_test` asks less, because it runs in every build.  This is for libraries built where nobody has
their GPU: that they load, that all of gufo.h is there, and what ggml finds instead of a GPU.
"""

from __future__ import annotations

import ctypes as c
import re
import sys
from pathlib import Path

from .errors import BuildError

_DECLARED = re.compile(r"^GUFO_API\b[^;]*?\b(gufo_\w+)\(", re.MULTILINE)
_SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"
_KINDS = {0: "CPU", 1: "GPU", 2: "integrated GPU", 3: "accelerator"}


def declared(header: str) -> list[str]:
    """The functions that gufo.h declares, in its order."""
    return _DECLARED.findall(header)


def report(folder: Path, header: str) -> str:
    """One line per fact.  BuildError when the library does not load, lacks a function, or answers wrongly.

    ctypes binds with RTLD_NOW: a symbol that no library has is an error here, not at the first call.
    """
    try:
        gufo, registry, base = (c.CDLL(str(folder / f"lib{stem}{_SUFFIX}")) for stem in ("gufo", "ggml", "ggml-base"))
    except OSError as error:
        raise BuildError(f"does not load: {error}") from error
    names = declared(header)
    lacks = [name for name in names if not hasattr(gufo, name)]
    if lacks or not names:
        raise BuildError(f"libgufo lacks {', '.join(lacks) or 'everything: gufo.h declares nothing'}")
    return "\n".join(
        [
            f"libgufo loads, ABI {gufo.gufo_abi_version()}: {len(names)} of {len(names)} functions of gufo.h",
            f"an impossible schema: {_refusal(gufo)}",
            f"a schema as grammar: {_grammar(gufo)}",
            *_devices(registry, base),
        ]
    )


def _refusal(gufo: c.CDLL) -> str:
    gufo.gufo_last_error.restype = c.c_char_p
    out = c.c_void_p()
    status = gufo.gufo_schema_to_grammar(b"{", c.byref(out))
    message = gufo.gufo_last_error().decode("utf-8", "replace")
    if status == 0 or not message:
        raise BuildError(f"text that is no JSON gave status {status} and the message '{message}'")
    return f"status {status}, '{message.splitlines()[0]}'"


def _grammar(gufo: c.CDLL) -> str:
    gufo.gufo_string_free.argtypes = [c.c_void_p]
    out = c.c_void_p()
    status = gufo.gufo_schema_to_grammar(b'{"type": "boolean"}', c.byref(out))
    text = c.string_at(out.value).decode() if out.value else ""
    gufo.gufo_string_free(out)
    if status != 0 or "root ::=" not in text:
        raise BuildError(f"a schema gave status {status} and the grammar '{text}'")
    return f"status 0, {len(text.splitlines())} rules"


def _devices(registry: c.CDLL, base: c.CDLL) -> list[str]:
    """ggml's backends with how many devices each has, then the devices."""
    for function in (registry.ggml_backend_reg_count, registry.ggml_backend_dev_count):
        function.restype = c.c_size_t
    for function in (registry.ggml_backend_reg_get, registry.ggml_backend_dev_get):
        function.restype, function.argtypes = c.c_void_p, [c.c_size_t]
    base.ggml_backend_reg_dev_count.restype = c.c_size_t
    base.ggml_backend_reg_dev_count.argtypes = [c.c_void_p]
    for function in (base.ggml_backend_reg_name, base.ggml_backend_dev_name, base.ggml_backend_dev_description):
        function.restype, function.argtypes = c.c_char_p, [c.c_void_p]
    base.ggml_backend_dev_type.argtypes = [c.c_void_p]
    lines = []
    for i in range(registry.ggml_backend_reg_count()):
        backend = registry.ggml_backend_reg_get(i)
        n = base.ggml_backend_reg_dev_count(backend)
        lines.append(f"backend {base.ggml_backend_reg_name(backend).decode()}, devices: {n}")
    for i in range(registry.ggml_backend_dev_count()):
        device = registry.ggml_backend_dev_get(i)
        name, text = base.ggml_backend_dev_name(device).decode(), base.ggml_backend_dev_description(device).decode()
        lines.append(f"device {name} ({_KINDS.get(base.ggml_backend_dev_type(device), 'other')}): {text.strip()}")
    return lines
