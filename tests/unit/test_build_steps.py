"""`make` runs two commands; what they announce is one count."""

from __future__ import annotations

import re
from pathlib import Path

BUILD = Path(__file__).resolve().parents[2] / "native" / "gufobuild"


def test_each_step_of_a_first_make_is_announced_in_one_count() -> None:
    source = {name: (BUILD / f"{name}.py").read_text(encoding="utf-8") for name in ("console", "venv", "native")}
    n_steps = int(re.findall(r"^STEPS = (\d+)$", source["console"], re.MULTILINE)[0])
    first, second = ({int(n) for n in re.findall(r"\bstep\((\d+), ", source[name])} for name in ("venv", "native"))
    assert sorted(first | second) == list(range(1, n_steps + 1))
    assert max(first) < min(second)
    assert not re.search(r"\[\d/\d\]", source["venv"] + source["native"]), "counted by hand"
