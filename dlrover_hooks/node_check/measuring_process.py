"""`-m dlrover_hooks.node_check.measuring_process FD FOLDER`: measures this node, writes each `Measure` to FD as JSON.

A process of its own: torch, and the memory that it takes on each device, are gone at its end, and a measurement that
hangs in a driver can be given up. Before each measurement it writes the same line without a result.
"""

from __future__ import annotations

import os
import sys

import msgspec

from dlrover_hooks.node_check import local_measures
from dlrover_hooks.protocol import Measure

_LONGEST = 400


def main(fd: int, folder: str) -> None:
    """Measure, and write to `fd`."""
    for task in local_measures.tasks(folder):
        measure = Measure(task.kind, task.what[:_LONGEST], task.model[:_LONGEST])
        _say(fd, measure)
        try:
            _say(fd, msgspec.structs.replace(measure, speed=task.run()))
        except Exception as error:  # whatever a device or a disk raises is the result
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            _say(fd, msgspec.structs.replace(measure, failed=reason[:_LONGEST]))


def _say(fd: int, measure: Measure) -> None:
    os.write(fd, msgspec.json.encode(measure) + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
