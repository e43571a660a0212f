"""Executes algorithms: those of this package here, plug-ins each in a process of its own that is killed at its limit.

A plug-in is an entry point in the group `dlrover_hooks.brain_algorithms`, a function of the type `records.Algorithm`.
"""

from __future__ import annotations

import importlib.metadata
import logging
import sys
import tempfile
from pathlib import Path

import msgspec

from dlrover_hooks import config as settings
from dlrover_hooks.errors import HooksError, UsageError
from dlrover_hooks.host.child_process import Child, described
from dlrover_hooks.master.brain.algorithms.registry import BUILT_IN
from dlrover_hooks.master.brain.records import GROUP, AlgorithmInput, Proposal
from dlrover_hooks.protocol import Message

log = logging.getLogger("dlrover_hooks.brain")
LIMIT_S = 15.0
"""Of a plug-in, with the start of its process. Those of this package are bounded by the size of their input."""
_SAID = 2000
"""Characters of a plug-in's last words that are kept."""


class Executed(Message, frozen=True):
    """What an algorithm answered; with an `error` it gave no answer."""

    proposal: Proposal | None = None
    error: str = ""


def available() -> dict[str, str]:
    """The names of all algorithms, and where each comes from."""
    own = {name: "dlrover-hooks" for name in BUILT_IN}
    return own | {point.name: point.value for point in _plug_ins() if point.name not in own}


def check_name(name: str) -> None:
    """Raises `UsageError` if no algorithm is called so."""
    if name not in BUILT_IN and name not in {point.name for point in _plug_ins()}:
        raise UsageError(
            f"there is no algorithm {name!r}",
            hint=f"there are {', '.join(sorted(available()))}; plug-ins are entry points in the group {GROUP}",
        )


def _plug_ins() -> list[importlib.metadata.EntryPoint]:
    return list(importlib.metadata.entry_points(group=GROUP))


class AlgorithmExecutor:
    """`limit_s`: seconds that a plug-in has. Threads may share it."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.limit_s = limit_s

    def execute(self, name: str, given: AlgorithmInput) -> Executed:
        """The answer of the algorithm `name`. An error, a plan that breaks a rule, or no answer in time is `error`."""
        if name not in BUILT_IN:
            return self._apart(name, given)
        try:
            proposal = BUILT_IN[name](given.job, given.history, given.cluster, given.config)
        except Exception as error:  # another algorithm answers instead
            log.exception("the algorithm %s failed for job %s", name, given.job.registration.job)
            return _failed(name, f"{type(error).__name__}: {error}")
        return _checked(name, proposal, given)

    def _apart(self, name: str, given: AlgorithmInput) -> Executed:
        with tempfile.TemporaryDirectory(prefix="dlrover-hooks-algorithm-") as folder:
            asked, answer, said = (Path(folder, part) for part in ("input.json", "answer.json", "said"))
            asked.write_bytes(msgspec.json.encode(given))
            command = [sys.executable, "-m", "dlrover_hooks.master.brain.algorithm_process", name, asked, answer]
            with said.open("wb") as output:
                child = Child(
                    f"algorithm {name}", [str(part) for part in command], env=_environment(), die_with_parent=True,
                    stdout=output.fileno(), stderr=output.fileno(),
                )  # fmt: skip
                try:
                    code = child.wait(self.limit_s)
                finally:
                    child.end()
            if code is None:
                return _failed(name, f"no answer within {self.limit_s:g} s")
            if code != 0:
                words = said.read_text(errors="replace").strip()[-_SAID:]
                return _failed(name, f"it ended with {described(code)}: {words or 'it said nothing'}")
            try:
                proposal = msgspec.json.decode(answer.read_bytes(), type=Proposal | None)
            except (OSError, msgspec.MsgspecError, HooksError) as error:
                return _failed(name, f"its answer is malformed: {error}")
        return _checked(name, proposal, given)


def _failed(name: str, why: str) -> Executed:
    return Executed(error=f"algorithm {name}: {why}")


def _environment() -> dict[str, str]:
    """Without tokens and the password of the database."""
    return {name: text for name, text in settings.environment().items() if not name.startswith(settings.PREFIX)}


def _checked(name: str, proposal: Proposal | None, given: AlgorithmInput) -> Executed:
    """A plan names types and nodes that the job has, and stays within its limits of counts."""
    if proposal is None:
        return Executed()
    limits, plan = given.job.registration.limits, proposal.plan
    nodes = {node.name for sample in given.job.samples[-1:] for node in sample.nodes}
    try:
        plan.check(nodes | {node.name for node in given.job.oom_nodes})
    except HooksError as error:
        return _failed(name, error.message)
    most = {"worker": limits.max_workers, "ps": limits.max_ps}
    for kind, group in plan.node_group_resources.items():
        if group.count > most.get(kind, group.count):
            return _failed(name, f"it plans {group.count} nodes of type {kind}, the job may have {most[kind]}")
    return Executed(proposal)
