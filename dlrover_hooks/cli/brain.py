"""`dlrover-hooks brain`: serves the Brain, upgrades its database, replays recorded jobs."""

from __future__ import annotations

import sys

import click

from dlrover_hooks.errors import MissingExtra

_USAGE = 78


@click.command(
    add_help_option=False, short_help="Serve the Brain, which plans all jobs.",
    context_settings={"ignore_unknown_options": True},
)  # fmt: skip
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def brain(arguments: tuple[str, ...]) -> None:
    """Serve the Brain; the same as python -m dlrover_hooks.master.brain (see --help there)."""
    try:
        from dlrover_hooks.master.brain.__main__ import command
    except MissingExtra as error:
        click.echo(f"dlrover-hooks brain: {error}", err=True)
        sys.exit(_USAGE)
    command.main(list(arguments), prog_name="dlrover-hooks brain")
