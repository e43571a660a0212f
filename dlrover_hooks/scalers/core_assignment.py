"""Which processor cores each node of a machine runs on. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection


class CoreAssignment:
    """Shares out `cores`, the numbers of the cores that may be used. Not thread-safe."""

    def __init__(self, cores: Collection[int]) -> None:
        self.cores = frozenset(cores)
        self._taken: dict[str, tuple[frozenset[int], float]] = {}

    def assign(self, name: str, cpu: float) -> frozenset[int]:
        """Cores for `name`, which may use `cpu` of them: whole ones, those that are used least by the others.

        0.5 is one core, shared with others if there are more such nodes than cores. 0 and more than there are: all.
        Replaces what `name` had.
        """
        self.free(name)
        if cpu <= 0:
            return self.cores
        count = min(math.ceil(cpu), len(self.cores))
        load = self.load()
        chosen = frozenset(sorted(self.cores, key=lambda core: (load[core], core))[:count])
        self._taken[name] = (chosen, cpu / count)
        return chosen

    def free(self, name: str) -> None:
        """`name` has ended."""
        self._taken.pop(name, None)

    def load(self) -> dict[int, float]:
        """What is promised of each core; more than 1: it is shared."""
        load = dict.fromkeys(self.cores, 0.0)
        for cores, share in self._taken.values():
            for core in cores:
                load[core] += share
        return load
