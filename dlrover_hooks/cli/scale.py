"""`dlrover-hooks scale`: changes the number of a running job's nodes, or of the tasks of a parameter server job."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, NamedTuple

import click

from dlrover_hooks.cli.job_master import asking, job_master
from dlrover_hooks.errors import HooksError, Stale, UsageError

if TYPE_CHECKING:
    from dlrover_hooks.client import MasterClient
    from dlrover_hooks.protocol import DesiredNodes, NodeType, Tasks

_USAGE, _FAILED = 78, 1
_PATIENCE_S = 30.0
_POLL_S = 10.0


@click.command(short_help="Change the servers and workers of a job.")
@click.option("--job", envvar="DLROVER_HOOKS_JOB", help="Name of the job.  [default: the only one on this machine]")
@click.option("--ps", type=click.IntRange(min=1), help="Parameter servers that it shall have.")
@click.option("--workers", type=click.IntRange(min=1), help="Workers that it shall have.")
@click.option("--release", is_flag=True,
              help="For a job that the master plans: let it make plans again. A number that was given holds until "
              "then.")  # fmt: skip
@click.option("--migrate", metavar="ps:I|worker:I", help="Replace this task by a new one; the new one runs first.")
@click.option("--timeout", type=click.FloatRange(min=1), default=120.0, show_default=True,
              help="Seconds until the change is rolled back if a new task is not ready.")  # fmt: skip
@click.option("--no-wait", is_flag=True, help="Return as soon as the master knows of it.")
@click.option("--master", envvar="DLROVER_HOOKS_MASTER",
              help="The master's address, for a job that was not started on this machine.")  # fmt: skip
@click.option("--token", envvar="DLROVER_HOOKS_TOKEN", help="The master's bearer token.")
def scale(
    job: str | None,
    ps: int | None,
    workers: int | None,
    release: bool,
    migrate: str | None,
    timeout: float,
    no_wait: bool,
    master: str | None,
    token: str | None,
) -> None:
    """Change the parameter servers and workers of JOB, wait until they are used, and show them.

    JOB was started with `dlrover-hooks run --ps`, or with `--mode`. Without an option its tasks, or nodes, are only
    shown. Of a job that the master plans, a number that is given holds until `--release`.

    Exit codes: 0 done, 1 rolled back or refused, 78 wrong address or options.
    """
    try:
        asked = job_master(job, master, token, tasks=True)
        change = ScaleRequest(ps, workers, _task(migrate) if migrate else None, release, timeout)
        with asking("scale", asked.master, asked.token) as client:
            kind = JobKind(asked.planned, asked.tasks) if master is None else _kind(client, asked.job)
            _check_fits(asked.job, change, kind)
            _send(client, asked.job, change, planned=kind.planned)
            if not kind.tasks:
                _show_nodes(_nodes(client, asked.job, timeout, wait=not no_wait), timeout, wait=not no_wait)
                return
            found = _tasks(client, asked.job, timeout, wait=not no_wait)
    except HooksError as error:
        click.echo(f"dlrover-hooks scale: {error}", err=True)
        sys.exit(_USAGE if isinstance(error, UsageError) else _FAILED)
    _show(asked.job, found)
    if found.problem and not no_wait:
        click.echo(f"dlrover-hooks scale: {found.problem}", err=True)
        sys.exit(_FAILED)


class ScaleRequest(NamedTuple):
    """What the command line asks for."""

    ps: int | None
    workers: int | None
    moved: tuple[NodeType, int] | None
    release: bool
    timeout_s: float


class JobKind(NamedTuple):
    """`planned`: the master plans the nodes of the job. `tasks`: these are parameter servers and their workers."""

    planned: bool
    tasks: bool


def _kind(client: MasterClient, job: str) -> JobKind:
    from dlrover_hooks import protocol as p

    try:
        return JobKind(True, client.call(p.ShowPlans(job), timeout_s=_PATIENCE_S).ps)
    except Stale:
        return JobKind(False, True)


def _check_fits(job: str, change: ScaleRequest, kind: JobKind) -> None:
    """Raises UsageError if this kind of job does not have what is to be changed."""
    if not kind.tasks and (change.ps is not None or change.moved is not None):
        raise UsageError(f"job {job} has no parameter servers", hint="give --workers or --release")
    if change.release and not kind.planned:
        raise UsageError("--release is for a job that was started with --mode", hint="leave it out")


def _send(client: MasterClient, job: str, change: ScaleRequest, *, planned: bool) -> None:
    """Send what is asked for, if anything is."""
    from dlrover_hooks import protocol as p

    own, counts = client.incarnation, {"ps": change.ps, "worker": change.workers}
    groups = {name: p.NodeGroupResource(count) for name, count in counts.items() if count is not None}
    if planned and (groups or change.release):
        client.call(p.ScaleNodes(job, own, p.ResourcePlan(groups), change.release), timeout_s=_PATIENCE_S)
    elif groups:
        target = p.ScaleTasks(job, own, change.ps, change.workers, ready_within_s=change.timeout_s)
        client.call(target, timeout_s=_PATIENCE_S)
    if change.moved is not None:
        client.call(p.MigrateTask(job, own, *change.moved, change.timeout_s), timeout_s=_PATIENCE_S)


def _tasks(client: MasterClient, job: str, within_s: float, *, wait: bool) -> Tasks:
    """The tasks; `wait` until the last change is carried out or rolled back."""
    from dlrover_hooks import protocol as p

    found = client.call(p.ShowTasks(job), timeout_s=_PATIENCE_S)
    until = time.monotonic() + within_s + _PATIENCE_S
    while wait and not _settled(found) and time.monotonic() < until:
        new = client.call(p.AwaitTasks(job, client.incarnation, found.number, _POLL_S), timeout_s=_PATIENCE_S)
        found = new if new.number != found.number else found
    return found


def _nodes(client: MasterClient, job: str, within_s: float, *, wait: bool) -> DesiredNodes:
    """The planned nodes; `wait` until all of them run."""
    from dlrover_hooks import protocol as p

    found = client.call(p.AwaitNodes(job, client.incarnation), timeout_s=_PATIENCE_S)
    until = time.monotonic() + within_s
    while wait and not found.finished and not _all_run(found) and time.monotonic() < until:
        new = client.call(p.AwaitNodes(job, client.incarnation, found.number, _POLL_S), timeout_s=_PATIENCE_S)
        found = new if new.number != found.number else found
    return found


def _show_nodes(found: DesiredNodes, within_s: float, *, wait: bool) -> None:
    for node in found.nodes:
        click.echo(f"  {node.name:<12} {node.status.value}")
    if wait and not _all_run(found):
        click.echo(f"dlrover-hooks scale: not all nodes run after {within_s:g} s", err=True)
        sys.exit(_FAILED)


def _all_run(found: DesiredNodes) -> bool:
    return all(node.status.value == "running" for node in found.nodes)


def _task(text: str) -> tuple[NodeType, int]:
    """Parses `ps:1`. Raises UsageError."""
    from dlrover_hooks.protocol import NodeType

    kind, _, index = text.partition(":")
    if kind not in ("ps", "worker") or not index.isdigit():
        raise UsageError(f"--migrate {text!r} names no task", hint="such as --migrate ps:1")
    return NodeType(kind), int(index)


def _settled(found: Tasks) -> bool:
    """The job has the tasks that it shall have, all run, and the chief uses the newest cluster version."""
    from dlrover_hooks.protocol import NodeStatus, NodeType

    kinds = [task.type for task in found.tasks if task.status is NodeStatus.RUNNING]
    complete = (kinds.count(NodeType.PS), kinds.count(NodeType.WORKER)) == (found.ps, found.workers)
    running = complete and len(kinds) == len(found.tasks)
    return found.finished or (running and found.version > 0 and found.acknowledged == found.version)


def _show(job: str, found: Tasks) -> None:
    click.echo(f"job {job}: cluster version {found.acknowledged}" + (", finished" if found.finished else ""))
    for task in sorted(found.tasks, key=lambda one: (one.type.value, one.index, one.id)):
        address = f"  {task.address}" if task.address else ""
        click.echo(f"  {task.type.value:<6} {task.index}  {task.status.value}{address}  {task.reason}".rstrip())
