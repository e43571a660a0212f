"""The worker processes of one node: their start, environment and end."""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import select
import selectors
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dlrover_hooks import config as settings
from dlrover_hooks.errors import UsageError
from dlrover_hooks.host.child_process import Child
from dlrover_hooks.launcher.processes.log_files import Logs
from dlrover_hooks.launcher.processes.worker_errors import FinalErrors
from dlrover_hooks.launcher.warm.standby_pool import Standbys
from dlrover_hooks.protocol import JobView, Seat, Seated
from dlrover_hooks.worker.round_join import seat_environment


class Workers:
    """Running and ended workers by incarnation; `selector` wakes when one dies. Main thread only.

    Args:
        command: the command of each worker.
        newcomer: the command of a process that replaces a dead one.
        environment: common to all of them, in every round.
        selector: the launcher's.
        standbys: warm processes that become workers at once.
        logs: destination of their output, if not the launcher's own.
    """

    def __init__(
        self,
        command: Sequence[str],
        newcomer: Sequence[str],
        environment: Mapping[str, str],
        selector: selectors.BaseSelector,
        standbys: Standbys | None = None,
        logs: Logs | None = None,
    ) -> None:
        self._standbys, self._logs = standbys, logs
        self._command, self._newcomer, self._environment, self._selector = command, newcomer, environment, selector
        self.children: dict[str, Child] = {}
        self.seats: dict[str, Seat] = {}
        self.ranks: dict[str, int] = {}
        """By incarnation; those of new workers are their predecessors'."""
        self.final_errors: dict[str, FinalErrors] = {}
        """Pipes for the errors that end them."""
        self._told = set[str]()

    def start(self, seat: Seat, seated: Seated, index: int, local_workers: int, **more: str) -> None:
        """Start a worker with an assigned rank: entry `index` of `seated`. `more`: variables for this process only."""
        own, local_rank = seat.incarnation, seat.local_rank
        place = seat_environment(
            seated, incarnation=own, local_rank=local_rank, local_world_size=local_workers, index=index
        )
        self._launch(seated.ranks[index], seated.round or 0, self._command, seat, place | more)

    def start_newcomer(self, predecessor: str, seat: Seat, number: int, local_workers: int, **more: str) -> None:
        """Start a worker for round `number` that replaces an ended one: it imports first, and then joins by itself."""
        rank = self.ranks[predecessor]
        self.forget(predecessor)
        self.start_member(seat, rank, number, local_workers, **more)

    def start_member(self, seat: Seat, rank: int, number: int, local_workers: int, **more: str) -> None:
        """Start a worker that imports first, and then joins round `number` by itself. `rank`: the one that it may get,
        for messages."""
        place = {
            "LOCAL_RANK": str(seat.local_rank),
            "LOCAL_WORLD_SIZE": str(local_workers),
            "DLROVER_HOOKS_INCARNATION": seat.incarnation,
            "DLROVER_HOOKS_JOIN": "1",
        }
        self._launch(rank, number, self._newcomer, seat, place | more)

    def _launch(self, rank: int, number: int, command: Sequence[str], seat: Seat, place: Mapping[str, str]) -> None:
        own, name = seat.incarnation, worker_name(rank, seat.local_rank)
        with self._output(own, seat.local_rank, rank, number) as (out, err):
            errors = self.final_errors[own] = FinalErrors(prints=err != 2)
            env = settings.worker_environment(**{**self._environment, **place, **errors.environment})
            child, fds = None, errors.pass_fds
            if self._standbys is not None:
                child = self._standbys.take(name, self._newcomer, env, stdout=out, stderr=err, error_pipe=fds)
            if child is None:
                child = Child(name, command, env=env, pass_fds=fds, die_with_parent=True, stdout=out, stderr=err)
        errors.started()
        self.children[own], self.seats[own], self.ranks[own] = child, seat, rank
        self._selector.register(child, selectors.EVENT_READ)

    def _output(self, *worker: Any) -> contextlib.AbstractContextManager[tuple[int, int]]:
        return self._logs.files(*worker) if self._logs is not None else contextlib.nullcontext((1, 2))

    def _show_rest(self, incarnation: str) -> None:
        if self._logs is not None:
            self._logs.ended(incarnation)

    def seated(self, view: JobView) -> None:
        """Update ranks and names: a survivor may have got another rank with the last round."""
        for member in view.members:
            if (child := self.children.get(member.incarnation)) is not None:
                self.ranks[member.incarnation] = member.rank
                child.name = worker_name(member.rank, member.local_rank)

    def refill(self) -> None:
        """Replace standbys that were taken. Call it at every turn."""
        if self._standbys is not None:
            self._standbys.refill()

    def wait(self, timeout_s: float) -> None:
        """Wait until one of them ends."""
        select.select([*self.running().values()], [], [], timeout_s)

    def forget(self, incarnation: str) -> Child:
        """Remove a worker that has ended and is replaced; also ends the rest of its session."""
        child = self.children.pop(incarnation)
        if incarnation not in self._told:
            self._selector.unregister(child)
        self._told.discard(incarnation)
        del self.seats[incarnation]
        self.final_errors.pop(incarnation).close()
        del self.ranks[incarnation]
        child.end()
        self._show_rest(incarnation)
        return child

    def dead(self) -> dict[str, Child]:
        """Those that have ended since the last call, by incarnation."""
        found = {key: child for key, child in self.running().items() if child.exit_code() is not None}
        for key, child in found.items():
            self._told.add(key)
            self._selector.unregister(child)
        return found

    def done(self) -> list[str]:
        """Those that have ended with 0, by incarnation."""
        return [key for key in self.children if key in self._told and self.children[key].exit_code() == 0]

    def running(self) -> dict[str, Child]:
        """Those whose end was not returned by `dead` yet, by incarnation."""
        return {key: child for key, child in self.children.items() if key not in self._told}

    def pids(self) -> dict[str, int]:
        """Process ids of those that run, by incarnation."""
        return {key: child.pid for key, child in self.running().items()}

    def signal(self, number: signal.Signals) -> None:
        """Send it to every worker's session."""
        for child in self.children.values():
            child.signal(number)

    def await_end(self, timeout_s: float) -> None:
        """Wait until all have ended by themselves, or `timeout_s` has passed."""
        deadline = time.monotonic() + timeout_s
        for child in self.running().values():
            child.wait(max(0.0, deadline - time.monotonic()))

    def end(self, grace_s: float = 0.0) -> list[int]:
        """End every worker's session; with `grace_s` all get SIGTERM and share the grace. Returns the exit codes."""
        for child in self.running().values():
            self._selector.unregister(child)
        children = list(self.children.values())
        if grace_s > 0:
            for child in children:
                child.ask_to_end()
            deadline = time.monotonic() + grace_s
            for child in children:
                child.wait(max(0.0, deadline - time.monotonic()))
        codes = [child.end() for child in children]
        for incarnation in self.children:
            self._show_rest(incarnation)
        for errors in self.final_errors.values():
            errors.close()
        for table in (self.children, self.seats, self.ranks, self.final_errors):
            table.clear()
        self._told.clear()
        return codes


def worker_name(rank: int, local_rank: int) -> str:
    """A worker's name in messages: its rank, and its local rank if that is another number."""
    return f"worker {rank}" + (f" (local rank {local_rank})" if local_rank != rank else "")


def worker_command(script: str, arguments: Sequence[str], *, module: bool, python: bool = True) -> tuple[str, ...]:
    """`python -u script args` or `python -u -m module args`, with this interpreter; or `script args` unchanged.

    Raises:
        UsageError: there is no such script, module or program.
    """
    if not python:
        if module or shutil.which(script) is None:
            raise UsageError(f"{script}: no such program" if not module else "-m and --no-python exclude each other")
        return (script, *arguments)
    if module:
        package = script.partition(".")[0]
        if importlib.machinery.PathFinder.find_spec(package, [os.getcwd(), *sys.path]) is None:
            raise UsageError(f"{script}: no such module")
    elif not os.path.exists(script):
        needless = os.path.basename(script).startswith("python")
        raise UsageError(f"{script}: no such file" + (" (`python` is not needed here: name the script)" * needless))
    return (sys.executable, "-u", *(["-m"] if module else []), script, *arguments)


def newcomer_command(command: Sequence[str]) -> tuple[str, ...]:
    """The same program, started through `warm.worker_bootstrap`, which joins for it: a Python script imports first."""
    bootstrap = (sys.executable, "-u", "-m", "dlrover_hooks.launcher.warm.worker_bootstrap")
    if tuple(command[:2]) != (sys.executable, "-u"):
        return (*bootstrap, "--exec", "--", *command)
    return (*bootstrap, "--", *command[2:])
