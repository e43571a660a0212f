"""A scheduling policy of a user, for tests of the allocator and of the controller."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dlrover_hooks.master.di_orchestrator.allocator import JobInfo, NodeInfo, NodeList


class ScriptedPolicy:
    """Every job gets what `answer` returns; what it raises is an error of the policy."""

    def __init__(self, answer: Callable[[], NodeList]) -> None:
        self._answer = answer

    def allocate(self, job: JobInfo, nodes: Mapping[str, NodeInfo]) -> NodeList:
        """See `Policy`."""
        return self._answer()

    def optimize(
        self, jobs: Mapping[str, JobInfo], nodes: Mapping[str, NodeInfo], prev_allocations: Mapping[str, NodeList]
    ) -> dict[str, NodeList]:
        """See `Policy`."""
        return {key: self._answer() for key in jobs}


def broken() -> NodeList:
    """An answer that is a bug."""
    raise ZeroDivisionError("a bug")
