"""A server under agents for a while: ``python -m tests.soak --minutes 60``.

Passes when nothing wrong was answered, no client saw a failure that it did not cause, the cache's books
add up, every slot is idle at the end, memory was flat after the warm-up, and the server's log is clean.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.soak.soak import soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sessions", type=int, default=3, help="slots of the server")
    parser.add_argument("--model", type=Path, help="a GGUF file; Owlet by default, the only one whose facts count")
    options = parser.parse_args()
    report = soak(options.minutes, options.seed, options.sessions, options.model, lambda line: print(line, flush=True))
    print(json.dumps(report.summary(), indent=2))
    for problem in report.problems():
        print("PROBLEM:", problem)
    return 1 if report.problems() else 0


if __name__ == "__main__":
    sys.exit(main())
