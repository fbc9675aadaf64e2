"""gufo.toml: which file, which keys, which precedence, and errors that name the place."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

import gufo_gguf.cli.serve as serve_module
from gufo_gguf.cli.config import keys_of
from gufo_gguf.cli.flags import variable_of
from gufo_gguf.cli.main import app
from gufo_gguf.core.errors import ConfigError
from gufo_gguf.engine.flags import DEFAULTS, check_flags
from gufo_gguf.server import run

WITH_MODEL = ("serve", "chat", "doctor")


def command(name: str) -> Any:
    return typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def nobodys_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file of the person who runs the tests."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home-config"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("GUFO_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What ``gufo serve`` would run with; it stops before it loads anything."""
    seen: dict[str, Any] = {}

    class Stop(Exception):
        pass

    def bind(server: Any) -> Any:
        frame = inspect.currentframe()
        assert frame is not None and frame.f_back is not None
        seen.update(server=server, chosen=frame.f_back.f_locals["chosen"])
        raise Stop

    monkeypatch.setattr(run, "bind", bind)
    return seen


def serve(*args: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, ["serve", "m.gguf", *args], env=env)


def test_a_flag_beats_its_variable_beats_the_file_beats_the_default(settings: dict[str, Any]) -> None:
    serve()
    assert settings["chosen"].flags["ctx_size"] == DEFAULTS["ctx_size"] == 0
    Path("gufo.toml").write_text("ctx-size = 100\n")
    result = serve()
    assert settings["chosen"].flags["ctx_size"] == 100 and "settings from gufo.toml: ctx-size" in result.output
    serve(env={"GUFO_CTX_SIZE": "200"})
    assert settings["chosen"].flags["ctx_size"] == 200
    serve("--ctx-size", "300", env={"GUFO_CTX_SIZE": "200"})
    assert settings["chosen"].flags["ctx_size"] == 300


def test_every_kind_of_value(settings: dict[str, Any], tmp_path: Path) -> None:
    Path("gufo.toml").write_text(
        'cache-ram-bytes = "8G"\ncache-disk = "~/cache"\ncache-disk-bytes = 1048576\nswa-full = true\n'
        'cache-type-k = "q8_0"\nsessions = 3\ntemp = 0\n[serve]\nport = 0\napi-key = ["one", "two"]\n'
        "isolate-keys = true\ntop-p = 0.5\n[doctor]\nctx-size = 9\n"
    )
    result = serve()
    flags, server = settings["chosen"].flags, settings["server"]
    assert (flags["cache_ram_bytes"], flags["cache_disk_bytes"], flags["cache_disk"]) == (
        8 << 30,
        1 << 20,
        tmp_path / "cache",
    )
    assert (flags["swa_full"], flags["cache_type_k"], flags["sessions"], flags["ctx_size"]) == (True, "q8_0", 3, 0)
    assert (server.port, server.api_keys, server.isolate_keys) == (0, ("one", "two"), True)
    assert (server.sampling.temperature, server.sampling.top_p) == (0, 0.5)
    assert "one" not in result.output.replace("none", ""), "values, keys among them, are not shown"


def test_a_commands_own_table_wins(settings: dict[str, Any]) -> None:
    Path("gufo.toml").write_text("threads = 1\n[serve]\nthreads = 2\n[chat]\nthreads = 3\n")
    serve()
    assert settings["chosen"].flags["threads"] == 2


def test_which_file(settings: dict[str, Any], tmp_path: Path) -> None:
    home = tmp_path / "home-config" / "gufo-gguf"
    home.mkdir(parents=True)
    (home / "gufo.toml").write_text("threads = 1\n")
    serve()
    assert settings["chosen"].flags["threads"] == 1
    Path("gufo.toml").write_text("threads = 2\n")
    serve()
    assert settings["chosen"].flags["threads"] == 2
    Path("other.toml").write_text("threads = 3\n")
    serve("--config", "other.toml")
    assert settings["chosen"].flags["threads"] == 3
    serve(env={"GUFO_CONFIG": "other.toml"})
    assert settings["chosen"].flags["threads"] == 3
    serve("--config", "/dev/null")
    assert settings["chosen"].flags["threads"] == 0
    gone = serve("--config", "gone.toml")
    assert isinstance(gone.exception, ConfigError) and "gone.toml" in str(gone.exception)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ctx-sise = 1", ("ctx-sise", "did you mean ctx-size?")),
        ("ctx_size = 1", ("ctx_size", "did you mean ctx-size?")),
        ("[serve]\nprot = 1", ("[serve] prot", "did you mean port?")),
        ("[chat]\nport = 1", ("[chat] port", "no such setting")),
        ("[server]\nport = 1", ("server", "did you mean serve?")),
        ("xyzzy = 1", ("xyzzy", "flags without their dashes")),
        ('ctx-size = "8192"', ("ctx-size", "a whole number")),
        ("threads = true", ("threads", "a whole number")),
        ("port = 8080.5", ("port", "a whole number")),
        ("temp = 'hot'", ("temp", "a number")),
        ("no-cache = 'yes'", ("no-cache", "true or false")),
        ("alias = 5", ("alias", "text in quotes")),
        ("api-key = [1]", ("api-key", "a list")),
        ("cache-ram-bytes = 'lots'", ("cache-ram-bytes", "not a size")),
        ("cache-ram-bytes = 1.5", ("cache-ram-bytes", "a size")),
        ("port = 99999", ("port", "65535")),
        ("[doctor]\nsessions = 0", ("[doctor] sessions", "1")),
        ("temp = ", ("not TOML",)),
        ("json = true", ("json", "no such setting")),
    ],
)
def test_errors_name_the_file_and_the_key(settings: dict[str, Any], text: str, words: tuple[str, ...]) -> None:
    Path("gufo.toml").write_text(text)
    result = serve()
    assert isinstance(result.exception, ConfigError), result.output
    for word in ("gufo.toml", *words):
        assert word in str(result.exception)
    assert not settings, "nothing was started"


def test_a_value_never_stands_in_an_error(settings: dict[str, Any]) -> None:
    Path("gufo.toml").write_text("api-key = ['sk-secret', 5]")
    assert "sk-secret" not in str(serve().exception)


def test_of_contradicting_settings_the_stronger_source_wins(settings: dict[str, Any]) -> None:
    Path("gufo.toml").write_text("no-cache = true\nhf-repo = 'a/b'\n")
    serve("--cache-disk", "d")
    assert settings["chosen"].flags["cache"] is True and settings["chosen"].flags["cache_disk"] == Path("d")
    assert (settings["chosen"].model, settings["chosen"].hf_repo) == ("m.gguf", None)
    Path("gufo.toml").write_text("cache-disk = 'd'\nmodel = 'file.gguf'\n")
    CliRunner().invoke(app, ["serve", "--no-cache", "-hf", "a/b"])
    assert settings["chosen"].flags["cache"] is False and settings["chosen"].flags["cache_disk"] is None
    assert (settings["chosen"].model, settings["chosen"].hf_repo) == (None, "a/b")
    Path("gufo.toml").unlink()
    for args in (["--no-cache", "--cache-disk", "d"], ["-hf", "a/b"]):
        assert isinstance(serve(*args).exception, ConfigError)


def test_every_flag_has_its_variable() -> None:
    for name in (*WITH_MODEL, "demo"):
        for key, parameter in keys_of(command(name)).items():
            if f"--{key}" == next((o for o in parameter.opts if o.startswith("--")), "--model"):
                assert parameter.envvar == variable_of(f"--{key}"), f"{name} --{key}"


def test_commands_agree_about_the_flags_they_share() -> None:
    seen: dict[str, Any] = {}
    for name in WITH_MODEL:
        for key, parameter in keys_of(command(name)).items():
            what = (parameter.envvar, parameter.default, sorted(parameter.opts), parameter.multiple)
            assert seen.setdefault(key, what) == what, f"{name} --{key}"
    assert {"ctx-size", "cache-disk", "temp", "api-key"} <= seen.keys()


def test_defaults_are_those_of_the_engine() -> None:
    from gufo_gguf.engine.engine import EngineOptions
    from gufo_gguf.engine.flags import engine_options

    assert engine_options() == EngineOptions()
    signature = inspect.signature(serve_module.serve).parameters
    for name in DEFAULTS.keys() - {"cache", "chat_template"}:
        assert signature[name].default == DEFAULTS[name]  # type: ignore[literal-required]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"ctx_sise": 1}, "did you mean ctx_size"),
        ({"ctx_size": 2_000_000_000, "sessions": 64}, "--ctx-size"),
        ({"cache": False, "cache_disk": "d"}, "contradict"),
        ({"cache_disk_staging_bytes": 1}, "at least 4096"),
        ({"cache_ram_bytes": -1}, "--cache-ram-bytes -1: a size is 0 or more"),
        ({"cache_disk_bytes": -5}, "--cache-disk-bytes -5: a size is 0 or more"),
        ({"cache_disk_spacing": 0}, "use 1 or more"),
    ],
)
def test_what_cannot_work_is_said_before_a_model_is_loaded(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        check_flags(**flags)
