"""The full matrix: every architecture x path, over KV types, positions and neighbours.

    python -m tests.qualification [--variants llama,qwen4exp] [--weights f16,q8_0] [--kv q8_0] [--threads N]
                                  [--part 2/4]    every fourth group, for several processes beside each other

Prints one line per group of cases while it runs and a table at the end.  Exit status 1 when any
byte differs or a case failed; an architecture that was skipped shows as "not qualified".
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field

from tests.qualification import cases
from tests.qualification.cases import Case, Path


@dataclass(slots=True)
class Tally:
    """Results of one cell of the table."""

    n_cases: int = 0
    n_bytes: int = 0
    failed: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return self.n_cases > 0 and not self.n_bytes and not self.failed

    def __str__(self) -> str:
        if self.failed:
            return f"{len(self.failed)} FAILED"
        if not self.n_cases:
            return "not qualified"
        return f"{self.n_bytes} differ" if self.n_bytes else f"0 / {self.n_cases}"


def _list(known: tuple[str, ...]) -> object:
    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        unknown = set(chosen) - set(known)
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not one of {', '.join(known)}")
        return chosen

    return parse


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.qualification", description=__doc__.split("\n")[0])
    names = tuple(cases.BY_NAME)
    parser.add_argument("--variants", type=_list(names), default=names, help="default: all")  # type: ignore[arg-type]
    parser.add_argument("--weights", type=_list(cases.WEIGHTS), default=("f16",), help="default: f16")  # type: ignore[arg-type]
    parser.add_argument("--kv", type=_list(cases.KV_TYPES), default=cases.KV_TYPES, help="default: all")  # type: ignore[arg-type]
    parser.add_argument("--part", default="1/1", help="I/N: groups I, I + N, I + 2N, ...; default all")
    parser.add_argument("--threads", type=int, default=1, help="threads that compute; default 1")
    return parser.parse_args()


def _groups(arguments: argparse.Namespace) -> dict[Case, list[Case]]:
    groups: dict[Case, list[Case]] = defaultdict(list)
    for case in cases.full(arguments.weights):
        if case.variant in arguments.variants and case.kv in arguments.kv:
            groups[case.group].append(case)
    first, step = (int(x) for x in arguments.part.split("/"))
    return dict(list(groups.items())[first - 1 :: step])


def _table(results: dict[tuple[str, Path], Tally]) -> str:
    head = ["", *Path]
    lines = [[v.name, *(str(results[v.name, path]) for path in Path)] for v in cases.VARIANTS]
    widths = [max(len(row[i]) for row in [head, *lines]) for i in range(len(head))]
    rows = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *lines]]
    return "\n".join([rows[0], "-" * len(rows[0]), *rows[1:]])


def main() -> int:
    arguments = _arguments()
    os.environ["GUFO_QUALIFY_THREADS"] = str(arguments.threads)  # read by the harness, here and in other processes
    from tests.qualification.qualify import run_group

    groups = _groups(arguments)
    results: dict[tuple[str, Path], Tally] = defaultdict(Tally)
    started = time.monotonic()
    for i, (group, members) in enumerate(groups.items()):
        name = str(dataclasses.replace(group, path=Path.SAME)).replace("-same_slot", "")
        print(f"[{i + 1}/{len(groups)}] {name}", end=" ", flush=True)
        _run(run_group, group, members, results)
        print(f"({time.monotonic() - started:.0f} s)", flush=True)

    n_cases = sum(tally.n_cases for tally in results.values())
    print(f"\n{n_cases} cases, {arguments.threads} thread(s): differing bytes / cases\n\n{_table(results)}")
    failures = [text for tally in results.values() for text in tally.failed]
    for text in failures:
        print(f"\n{text}")
    wanted = {(group.variant, path) for group in groups for path in Path}
    return 0 if wanted and all(results[cell].good for cell in wanted) else 1


def _run(run_group: object, group: Case, members: list[Case], results: dict[tuple[str, Path], Tally]) -> None:
    assert callable(run_group)
    wanted = [case.path for case in members]
    try:
        for path, differences in run_group(group, wanted):
            tally = results[group.variant, path]
            tally.n_cases += 1
            tally.n_bytes += sum(differences.values())
            wanted.remove(path)
            found = {name: n for name, n in differences.items() if n}
            print(f"{path}: {found};" if found else ".", end="", flush=True)
    except Exception as error:  # one case that cannot run must not hide the others
        for path in wanted:
            results[group.variant, path].failed.append(f"{group}: {type(error).__name__}: {error}")
        print(f"failed: {error}", end=" ")


if __name__ == "__main__":
    sys.exit(main())
