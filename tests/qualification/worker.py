"""The other process of ``qualify.in_another_process``: reads a job, writes what it found."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from tests.qualification.qualify import Job, carry_out


def main(question: str, answer: str) -> None:
    job = pickle.loads(Path(question).read_bytes())
    assert isinstance(job, Job)
    Path(answer).write_bytes(pickle.dumps(carry_out(job)))


if __name__ == "__main__":
    main(*sys.argv[1:])
