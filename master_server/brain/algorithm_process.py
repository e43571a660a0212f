"""`python -m dlrover_hooks.master.brain.algorithm_process NAME INPUT ANSWER`: runs a plug-in once."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import msgspec

from dlrover_hooks.master.brain.records import GROUP, AlgorithmInput, Proposal


def main(name: str, asked: str, answer: str) -> None:
    """Read the arguments of the algorithm `name` from one file, write its answer to another."""
    (point,) = importlib.metadata.entry_points(group=GROUP, name=name)
    given = msgspec.json.decode(Path(asked).read_bytes(), type=AlgorithmInput)
    found = point.load()(given.job, given.history, given.cluster, given.config)
    if found is not None and not isinstance(found, Proposal):
        sys.exit(f"it returned {type(found).__name__}, not a Proposal or None")
    Path(answer).write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
