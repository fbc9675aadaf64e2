"""Models of the Hugging Face hub: ``-hf ORG/REPO[:QUANT]`` to the path of a GGUF file.

    ORG/REPO          Q4_K_M; else the only model there; else the quantisations there are listed
    ORG/REPO:Q8_0     the model whose file name has that quantisation, case ignored
    ORG/REPO:x.gguf   that file

Listing, downloading, resuming and the folder are huggingface-hub's, so a file that another program
fetched is not fetched again.  A split model is fetched whole; its first part is the path.  Without a
network, what was fetched before is found in that folder.

HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE are that library's and mean what they mean elsewhere.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from gufo_gguf.core.errors import ConfigError

DEFAULT_QUANT = "Q4_K_M"
_REPO = re.compile(r"[\w.-]+/[\w.-]+")
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_QUANT = re.compile(r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|MXFP4\w*|NVFP4|BF16|F16|F32))$", re.IGNORECASE)
_NO_MODEL = re.compile(r"mmproj|imatrix|(?:^|/)mtp-", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class HubModel:
    """One model of a repository: the files of all its parts, in order."""

    files: tuple[str, ...]
    quant: str
    """Upper case; "" when the name says none."""


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse(spec: str) -> tuple[str, str]:
    """(ORG/REPO, quantisation or file; "" = not said).  Raises ConfigError."""
    repo, _, quant = spec.removeprefix("hf.co/").removeprefix("https://huggingface.co/").partition(":")
    if not _REPO.fullmatch(repo):
        raise ConfigError(f"-hf {spec}: write ORG/REPO or ORG/REPO:QUANT, such as ggml-org/gemma-3-1b-it-GGUF:Q4_K_M")
    return repo, quant


def models_among(files: Iterable[str]) -> list[HubModel]:
    """The whole models among a repository's files; projectors, matrices and incomplete splits are none."""
    single: list[HubModel] = []
    parts: dict[str, dict[int, str]] = defaultdict(dict)
    totals: dict[str, int] = {}
    for name in sorted(files):
        if not name.lower().endswith(".gguf") or _NO_MODEL.search(name):
            continue
        split = _PART.search(name)
        if split is None:
            single.append(HubModel((name,), quant_of(name[:-5])))
            continue
        stem = name[: split.start()]
        parts[stem][int(split.group(1))] = name
        totals[stem] = int(split.group(2))
    for stem, found in parts.items():
        if len(found) == totals[stem]:
            single.append(HubModel(tuple(found[i] for i in sorted(found)), quant_of(stem)))
    return single


def quant_of(stem: str) -> str:
    """The quantisation that a file name without its ending says, upper case; "" when it says none."""
    found = _QUANT.search(stem)
    return found.group(1).upper() if found else ""


def choose(repo: str, models: list[HubModel], wanted: str) -> HubModel:
    """The model that is meant.  ConfigError that lists what there is."""
    there = ", ".join(sorted({m.quant or m.files[0] for m in models}))
    if not models:
        raise ConfigError(f"-hf {repo}: there is no GGUF model in this repository")
    if wanted.lower().endswith(".gguf"):
        matching = [m for m in models if wanted in m.files]
    else:
        quant = wanted.upper() or DEFAULT_QUANT
        matching = [m for m in models if m.quant == quant] or [m for m in models if m.quant == f"UD-{quant}"]
        if not wanted and not matching and len(models) == 1:
            matching = models
    if not matching:
        what = wanted or f"{DEFAULT_QUANT}, which is taken when none is named,"
        raise ConfigError(f"-hf {repo}: {what} is not in this repository; name one of: {there}")
    if len(matching) > 1:
        names = ", ".join(m.files[0] for m in matching)
        raise ConfigError(f"-hf {repo}: several models fit; name the file: {names}")
    return matching[0]


def fetched_from_hub(spec: str, say: Callable[[str], None] = _say) -> Path:
    """Path of the (first) file of a hub's model, fetched where it is not here yet.

    Raises ConfigError that says what to do: no network, no such repository, no access, no such
    quantisation, no room.
    """
    repo, wanted = parse(spec)
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    # the base of what the library's HTTP client raises; which client that is depends on its release
    transport = cast(type[Exception], HfHubHTTPError.__mro__[1])
    offline = False
    try:
        files = [file.rfilename for file in huggingface_hub.HfApi().model_info(repo).siblings or ()]
    except HfHubHTTPError as error:
        raise _refused(repo, error) from error
    except (transport, OSError) as error:
        files = _here(repo)
        if not files:
            raise _unreachable(repo, error) from error
        offline = True
        say(f"the hub cannot be reached: using what was fetched from {repo} before")
    model = choose(repo, models_among(files), wanted)
    paths = []
    for name in model.files:
        try:
            paths.append(_file(repo, name, offline, say))
        except HfHubHTTPError as error:
            raise _refused(repo, error) from error
        except (transport, OSError) as error:
            raise _unreachable(repo, error) from error
    return paths[0]


def _file(repo: str, name: str, offline: bool, say: Callable[[str], None]) -> Path:
    import huggingface_hub
    from huggingface_hub import utils

    held = huggingface_hub.try_to_load_from_cache(repo, name)
    if offline or (isinstance(held, str) and _offline_wanted()):
        return Path(huggingface_hub.hf_hub_download(repo, name, local_files_only=True))
    if not isinstance(held, str):
        say(f"fetching {name} from {repo}")
    quiet = not sys.stderr.isatty() and not utils.are_progress_bars_disabled()  # type: ignore[attr-defined]
    if quiet:  # a bar in a log is a line per update
        utils.disable_progress_bars()  # type: ignore[attr-defined]
    try:
        return Path(huggingface_hub.hf_hub_download(repo, name))
    finally:
        if quiet:
            utils.enable_progress_bars()  # type: ignore[attr-defined]


def _offline_wanted() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _here(repo: str) -> list[str]:
    """Files of the repository that were fetched before."""
    import huggingface_hub

    try:
        folder = Path(huggingface_hub.snapshot_download(repo, local_files_only=True))
    except (OSError, ValueError):
        return []
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf") if path.exists()]


def _refused(repo: str, error: Exception) -> ConfigError:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    status = getattr(getattr(error, "response", None), "status_code", None)
    token = "set HF_TOKEN to a token that may read it (or run `hf auth login`)"
    if isinstance(error, GatedRepoError):
        return ConfigError(f"-hf {repo}: access to this repository must be asked for on its page; then {token}")
    if isinstance(error, RepositoryNotFoundError):
        # the hub tells strangers nothing about private repositories
        return ConfigError(f"-hf {repo}: there is no such repository, or it is private; if it is, {token}")
    if status in (401, 403):
        return ConfigError(f"-hf {repo}: the hub refuses access (status {status}); {token}")
    return ConfigError(f"-hf {repo}: the hub answers with status {status}; try again later")


def _unreachable(repo: str, error: Exception) -> ConfigError:
    words = str(error).splitlines()
    why = f"{type(error).__name__}: {words[0] if words else ''}".rstrip(": ")
    if getattr(error, "errno", None) == 28:
        return ConfigError(f"-hf {repo}: no room on the disk for it; HF_HOME names another folder")
    return ConfigError(
        f"-hf {repo}: the hub cannot be reached and nothing of this repository was fetched before ({why}); "
        "name a file instead, or set HF_ENDPOINT to a mirror"
    )
