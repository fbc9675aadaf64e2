"""``gufo.toml``: flags that need not be typed.

    ctx-size = 32768                 every command that has the flag
    cache-disk = "~/agent-cache"
    cache-disk-bytes = "40G"

    [serve]                          this command alone
    port = 8081
    api-key = ["one", "two"]

Keys are flags without their dashes, and ``model``.  A flag wins over its variable, a variable over the
file, the file over the default.  One file is read: --config, else ./gufo.toml, else the one in the
user's config folder.  A key that no command knows, or a value of another kind, is an error: a setting
that is silently left out costs more than a message.

The file becomes click's ``default_map``, which has just that precedence.  Rejected: reading it in each
command (every flag would need a third meaning, "not given").
"""

from __future__ import annotations

import difflib
import inspect
import tomllib
import types
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import typer

from gufo_gguf.core import env
from gufo_gguf.core.errors import ConfigError

FILE = "gufo.toml"
_KINDS: dict[type, tuple[str, tuple[type, ...]]] = {
    bool: ("true or false", (bool,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    str: ("text in quotes", (str,)),
    Path: ("text in quotes", (str,)),
}
"""Type of a flag -> what its value is called, and TOML's types for it."""


def config_file(asked: Path | None) -> Path | None:
    """The file to read; None when there is none.  Raises ConfigError when the one asked for is missing."""
    if asked is not None:
        if not asked.exists():
            raise ConfigError(f"--config {asked}: there is no such file")
        return asked
    places = (Path(FILE), env.config_dir() / FILE)
    return next((place for place in places if place.is_file()), None)


def use_config(ctx: typer.Context, value: Path | None) -> Path | None:
    """Callback of --config: make the file's values the defaults of this command's flags."""
    if ctx.resilient_parsing:
        return value
    file = config_file(value)
    if file is not None:
        ctx.default_map = _defaults(ctx, file, _read(file))
        if ctx.default_map:
            typer.echo(f"settings from {file}: {', '.join(_shown(ctx))}", err=True)
    return value


def _shown(ctx: typer.Context) -> list[str]:
    return sorted(name.replace("_", "-") for name in ctx.default_map or ())


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: not TOML: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {getattr(error, 'strerror', None) or error}") from error


def _defaults(ctx: typer.Context, file: Path, found: dict[str, Any]) -> dict[str, Any]:
    """Parameter name -> value, for the command that runs; the whole file is checked whatever runs."""
    commands: dict[str, Any] = {ctx.info_name or "": ctx.command}
    root = ctx.find_root().command
    commands |= {n: c for n, c in getattr(root, "commands", {}).items() if _has_config(c)}
    out: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for key, value in found.items():
        if key in commands and isinstance(value, dict):
            for inner, setting in value.items():
                parameter = _find(file, f"[{key}] ", inner, {key: commands[key]})[key]
                checked = _checked(ctx, file, f"[{key}] {inner}", commands[key], parameter, setting)
                if commands[key] is ctx.command:
                    own[parameter.name] = checked
            continue
        for name, parameter in _find(file, "", key, commands).items():
            checked = _checked(ctx, file, key, commands[name], parameter, value)
            if commands[name] is ctx.command:
                out[parameter.name] = checked
    return out | own


def _has_config(command: Any) -> bool:
    return any(p.name == "config" for p in command.params)


def keys_of(command: Any) -> dict[str, Any]:
    """What a file may say about a command: key -> parameter."""
    found: dict[str, Any] = {}
    for parameter in command.params:
        if parameter.name == "model":
            found["model"] = parameter
        if parameter.name in ("config", "help") or "--json" in parameter.opts or getattr(parameter, "hidden", False):
            continue
        for name in parameter.opts:
            if name.startswith("--"):
                found[name.removeprefix("--")] = parameter
    return found


def _find(file: Path, where: str, key: str, commands: dict[str, Any]) -> dict[str, Any]:
    """Command -> its parameter of this key.  ConfigError with the nearest key when none has it."""
    known = {name: keys_of(command) for name, command in commands.items()}
    found = {name: keys[key] for name, keys in known.items() if key in keys}
    if found:
        return found
    names = sorted({k for keys in known.values() for k in keys} | (set() if where else set(commands)))
    close = difflib.get_close_matches(key.replace("_", "-"), names, 1)
    hint = f"; did you mean {close[0]}?" if close else "; keys are flags without their dashes, such as ctx-size"
    raise ConfigError(f"{file}: {where}{key}: there is no such setting{hint}")


def _checked(ctx: typer.Context, file: Path, key: str, command: Any, parameter: Any, value: Any) -> Any:
    """The value, if it is of the flag's kind and in its range; its content is never in the message."""
    kind, is_size, many = _kind(command, parameter)
    label, accepted = _KINDS[kind]
    if is_size:
        label, accepted = 'a size, such as "8G"', (int, str)
    values = value if many and isinstance(value, list) else [value]
    for one in values:
        if not isinstance(one, accepted) or (isinstance(one, bool) and kind is not bool):
            raise ConfigError(f"{file}: {key}: must be {label}" + (", or a list of such" if many else ""))
    if kind is Path:
        values = [str(Path(one).expanduser()) for one in values]
    value = values if many else values[0]
    try:
        parameter.process_value(ctx, value)
    except typer.BadParameter as error:
        raise ConfigError(f"{file}: {key}: {error.message}") from error
    return value


def _kind(command: Any, parameter: Any) -> tuple[type, bool, bool]:
    """(type of one value, is it a size, may there be several), from the command's signature."""
    annotation = inspect.signature(command.callback).parameters[parameter.name].annotation
    is_size = False
    if get_origin(annotation) is Annotated:
        annotation, info = get_args(annotation)[:2]
        is_size = info.parser is not None
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(a for a in get_args(annotation) if a is not type(None))
    many = get_origin(annotation) is list
    kind = get_args(annotation)[0] if many else annotation
    assert kind in _KINDS, f"{parameter.name} is of a type that files do not know: {kind}"
    return kind, is_size, many
