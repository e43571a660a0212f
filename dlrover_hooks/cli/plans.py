"""`dlrover-hooks plans`: shows what was planned for the nodes of a job, why, and what became of it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from dlrover_hooks.cli.job_master import asking, job_master
from dlrover_hooks.errors import HooksError, UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dlrover_hooks.protocol import Plans, PlanView

_USAGE, _FAILED = 78, 1
_PATIENCE_S = 30.0
_WIDTH = 160
"""Of the table where there is no terminal."""


@click.command(short_help="Show the plans for a job's nodes.")
@click.argument("job", required=False)
@click.option("--master", envvar="DLROVER_HOOKS_MASTER",
              help="The master's address, for a job that was not started on this machine.")  # fmt: skip
@click.option("--token", envvar="DLROVER_HOOKS_TOKEN", help="The master's bearer token.")
@click.option("--json", is_flag=True, help="Print the master's answer, a line of JSON.")
def plans(job: str | None, master: str | None, token: str | None, json: bool) -> None:
    """Show the plans for the nodes of JOB, the oldest first: what, why, the predicted and the measured speed in steps
    per second, and whether the plan was kept or rolled back.

    JOB may be left out if it is the only one on this machine. `dlrover-hooks scale --workers N` makes a plan by hand.

    Exit codes: 0 done, 1 the master refused or did not answer, 78 wrong address or options.
    """
    import msgspec
    from rich.console import Console

    from dlrover_hooks.protocol import ShowPlans

    try:
        asked = job_master(job, master, token)
        with asking("plans", asked.master, asked.token) as client:
            found = client.call(ShowPlans(asked.job), timeout_s=_PATIENCE_S)
    except HooksError as error:
        click.echo(f"dlrover-hooks plans: {error}", err=True)
        sys.exit(_USAGE if isinstance(error, UsageError) else _FAILED)
    if json:
        click.echo(msgspec.json.encode(found))
    else:
        width = None if sys.stdout.isatty() else _WIDTH
        Console(width=width).print(_shown(found))


def _shown(found: Plans) -> RenderableType:
    from rich.console import Group
    from rich.table import Table

    table = Table("no", "age", "plan", "why", "before", "predicted", "measured", "outcome", box=None, pad_edge=False)
    for name in ("before", "predicted", "measured"):
        next(column for column in table.columns if column.header == name).justify = "right"
    for plan in found.plans:
        table.add_row(
            str(plan.number), _age(plan.age_s), plan.what, plan.reason, _speed(plan.before), _speed(plan.predicted),
            _speed(plan.measured), _outcome(plan),
        )  # fmt: skip
    nodes = len(found.nodes)
    head = f"job {found.job}: mode {found.mode.value}, {nodes} node{'s' * (nodes != 1)}"
    head += f", {found.speed:.3g} steps/s" if found.speed is not None else ""
    lines = [head, *([f"no plan now: {found.waits}"] if found.waits else [])]
    lines += [f"last problem: {found.problem}"] if found.problem else []
    return Group("\n".join(lines), *([table] if found.plans else ["no plan was made yet"]))


def _outcome(plan: PlanView) -> str:
    return f"{plan.outcome}: {plan.decided}" if plan.decided else plan.outcome


def _speed(speed: float | None) -> str:
    return "-" if speed is None else f"{speed:.3g}"


def _age(seconds: float) -> str:
    """Such as 40s, 12m or 3h20m."""
    minutes = int(seconds) // 60
    if minutes < 1:
        return f"{seconds:.0f}s"
    return f"{minutes}m" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"
