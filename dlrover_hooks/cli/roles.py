"""`dlrover-hooks roles`: shows a job of several roles, restarts a role, and stops the job."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

import click

from dlrover_hooks.cli.job_master import asking, job_master
from dlrover_hooks.errors import HooksError, UsageError

if TYPE_CHECKING:
    from dlrover_hooks.job.job_handle import JobHandle
    from dlrover_hooks.protocol import Roles

_USAGE, _FAILED = 78, 1
_PATIENCE_S = 30.0
_EVENTS = 10
_WIDTH = 160
"""Of the tables where there is no terminal."""


class RolesChange(NamedTuple):
    """What the command line asks for. `restart`: a role, or empty."""

    restart: str
    stop: bool


@click.command(short_help="Show a job of several roles.")
@click.option("--job", envvar="DLROVER_HOOKS_JOB", help="Name of the job.  [default: the only one with roles]")
@click.option("--restart", metavar="ROLE", default="", help="Start all workers of this role again. It counts in no "
              "budget.")  # fmt: skip
@click.option("--stop", is_flag=True, help="Stop the job: its workers are ended. The exit code of the job is 130.")
@click.option("--events", type=click.IntRange(min=0), default=_EVENTS, show_default=True,
              help="Show so many of the newest events.")  # fmt: skip
@click.option("--json", is_flag=True, help="Print the master's answer, a line of JSON.")
@click.option("--ray-address", metavar="ADDRESS",
              help="The job runs on the Ray cluster at this address; --master is not used. auto: at RAY_ADDRESS, or "
              "on this machine.")  # fmt: skip
@click.option("--master", envvar="DLROVER_HOOKS_MASTER",
              help="The master's address, for a job that was not started on this machine.")  # fmt: skip
@click.option("--token", envvar="DLROVER_HOOKS_TOKEN", help="The master's bearer token.")
def roles(
    job: str | None,
    restart: str,
    stop: bool,
    events: int,
    json: bool,
    ray_address: str | None,
    master: str | None,
    token: str | None,
) -> None:
    """Show the workers, budgets and newest events of a job of several roles.

    Without --ray-address it is a job of this machine, or of the master at --master. --restart and --stop change it
    first.

    \b
    dlrover-hooks roles --job ppo                              what runs, and what has happened
    dlrover-hooks roles --job ppo --restart rollout            start the workers of this role again
    dlrover-hooks roles --job ppo --ray-address auto --stop    stop a job on Ray

    Exit codes: 0 done, 1 refused, or the master does not answer, 78 wrong address or options.
    """
    import msgspec
    from rich.console import Console

    from dlrover_hooks.cli.role_tables import headline, tables

    change = RolesChange(restart, stop)
    try:
        if restart and stop:
            raise UsageError("--restart and --stop do not go together", hint="give one of them")
        if ray_address is not None:
            name, found = _on_ray(job, ray_address, change)
        else:
            name, found = _at_master(job, master, token, change)
    except HooksError as error:
        click.echo(f"dlrover-hooks roles: {error}", err=True)
        sys.exit(_USAGE if isinstance(error, UsageError) else _FAILED)
    if json:
        click.echo(msgspec.json.encode(found))
    elif stop:  # its workers are being ended
        click.echo(headline(name, found))
    else:
        width = None if sys.stdout.isatty() else _WIDTH
        Console(width=width, markup=False, highlight=False).print(tables(name, found, events))


def _at_master(job: str | None, master: str | None, token: str | None, change: RolesChange) -> tuple[str, Roles]:
    """The job's name, and its state after the change."""
    from dlrover_hooks import protocol as p
    from dlrover_hooks.job.job_handle import STOPPED

    asked = job_master(job, master, token, roles=True)
    with asking("roles", asked.master, asked.token) as client:
        if change.restart:
            request = p.RestartRole(asked.job, client.incarnation, change.restart)
        elif change.stop:
            request = p.StopRoles(asked.job, client.incarnation, STOPPED)
        else:
            request = p.ShowRoles(asked.job)
        return asked.job, client.call(request, timeout_s=_PATIENCE_S)


def _on_ray(job: str | None, address: str, change: RolesChange) -> tuple[str, Roles]:
    """As `_at_master`. Stopping returns when the job has ended."""
    from dlrover_hooks.integrations.ray import attach  # raises MissingExtra
    from dlrover_hooks.integrations.ray.cluster_jobs import connect, job_named

    connect(address)
    handle: JobHandle = attach(job_named(job))
    if change.restart:
        handle.restart(change.restart)
    elif change.stop:
        handle.stop()
    return handle.name, handle.status()
