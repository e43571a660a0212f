"""`dlrover-hooks forget`: deletes a job's data from a master."""

from __future__ import annotations

import sys

import click

from dlrover_hooks.cli.job_master import asking, check_url
from dlrover_hooks.errors import HooksError, UsageError

_USAGE, _FAILED = 78, 1
_PATIENCE_S = 30.0


@click.command(short_help="Delete a job from a master.")
@click.argument("job")
@click.option("--master", envvar="DLROVER_HOOKS_MASTER", required=True, help="The master's address.")
@click.option("--token", envvar="DLROVER_HOOKS_TOKEN", help="The master's bearer token.")
@click.option("--force", is_flag=True, help="Also if it has workers: the master then refuses them, and they end.")
def forget(job: str, master: str, token: str | None, force: bool) -> None:
    """Delete a master's data of JOB: its rounds, ledgers and votes. Its checkpoints stay.

    Exit codes: 0 done, 1 the master refused or did not answer, 78 wrong address or options.
    """
    from dlrover_hooks.protocol import DeleteJob

    try:
        check_url(master)
        with asking("forget", master, token) as client:
            client.call(DeleteJob(job, force=force), timeout_s=_PATIENCE_S)
    except HooksError as error:
        click.echo(f"dlrover-hooks forget: {error}", err=True)
        sys.exit(_USAGE if isinstance(error, UsageError) else _FAILED)
    click.echo(f"job {job} is deleted at {master}; its checkpoints stay where they are")
