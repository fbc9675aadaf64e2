"""What the package shows, and that importing it is cheap."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import gufo_gguf
import gufo_gguf.api
from gufo_gguf.core import errors


def test_all_is_what_the_package_shows() -> None:
    assert gufo_gguf.__all__ == sorted(gufo_gguf.__all__, key=lambda n: (n.startswith("_"), n))
    for name in gufo_gguf.__all__:
        assert getattr(gufo_gguf, name) is not None
    shown = {n for n in vars(gufo_gguf.api) if n[0].isupper()}
    assert shown == set(gufo_gguf.api.__all__)
    assert set(gufo_gguf.api.__all__) | {"GufoError", "SamplingParams", "__version__"} == set(gufo_gguf.__all__)
    assert dir(gufo_gguf) == sorted(gufo_gguf.__all__)


def test_what_type_checkers_see_is_what_there_is() -> None:
    tree = ast.parse(Path(gufo_gguf.__file__).read_text(encoding="utf-8"))
    imported = {
        alias.name
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == set(gufo_gguf.__all__) - {"__version__"}


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    assert not hasattr(gufo_gguf, "Motor")


def test_import_alone_loads_nothing_heavy() -> None:
    code = "import sys, gufo_gguf; print([m for m in ('numpy', 'llama_cpp', 'fastapi', 'typer') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_everything_public_is_documented_and_typed() -> None:
    for cls in (gufo_gguf.Engine, gufo_gguf.Conversation, gufo_gguf.AnswerStream):
        assert inspect.getdoc(cls)
        for name, member in inspect.getmembers(cls, inspect.isfunction):
            if not name.startswith("_"):
                assert inspect.getdoc(member), f"{cls.__name__}.{name} says nothing"
                assert "return" in member.__annotations__, f"{cls.__name__}.{name} has no return type"


def test_every_error_hangs_on_one_tree() -> None:
    found = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == errors.__name__]
    assert len(found) > 8 and all(issubclass(cls, gufo_gguf.GufoError) for cls in found)
    for cls in found:
        assert cls.__name__ in (errors.__doc__ or "")


def test_flags_of_serve_and_names_of_the_api_agree() -> None:
    from gufo_gguf.cli.serve import serve
    from gufo_gguf.engine.engine import EngineOptions
    from gufo_gguf.engine.flags import DEFAULTS, EngineFlags

    flags = set(inspect.signature(serve).parameters)
    renamed = {"cache": "no_cache", "chat_template": "chat_template_file"}
    assert {renamed.get(name, name) for name in DEFAULTS} <= flags
    assert EngineFlags.__annotations__.keys() == DEFAULTS.keys()
    of_measurements = {"chunk_rows", "ablation"}
    assert set(EngineOptions.__dataclass_fields__) - {"llama"} - of_measurements <= DEFAULTS.keys()


def test_a_setting_that_is_not_there_is_named() -> None:
    with pytest.raises(gufo_gguf.GufoError, match="ctx_sise: there is no such setting; did you mean ctx_size"):
        gufo_gguf.Engine("owlet", ctx_sise=1)  # type: ignore[call-arg]
    with pytest.raises(gufo_gguf.GufoError, match="name one model"):
        gufo_gguf.Engine("owlet", hf_repo="a/b")
