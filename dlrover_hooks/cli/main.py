"""The `dlrover-hooks` command and its subcommands, one module each."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import click

from dlrover_hooks import __version__
from dlrover_hooks.cli.brain import brain
from dlrover_hooks.cli.check import check
from dlrover_hooks.cli.ckpt import ckpt
from dlrover_hooks.cli.forget_job import forget
from dlrover_hooks.cli.manifest import manifest
from dlrover_hooks.cli.plans import plans
from dlrover_hooks.cli.rehearse import command as rehearse
from dlrover_hooks.cli.roles import roles
from dlrover_hooks.cli.run import run
from dlrover_hooks.cli.scale import scale
from dlrover_hooks.cli.vitals import vitals

_USAGE, _CTRL_C = 78, 130


class Commands(click.Group):
    """Exits with 78 (click's default is 2) for a wrong command line, and with 130 after Ctrl-C."""

    def make_context(self, *args: Any, **more: Any) -> click.Context:
        with _exit_code():
            return super().make_context(*args, **more)

    def invoke(self, ctx: click.Context) -> Any:
        with _exit_code():
            return super().invoke(ctx)


@contextlib.contextmanager
def _exit_code() -> Iterator[None]:
    try:
        yield
    except click.UsageError as error:
        error.exit_code = _USAGE  # pyright: ignore[reportAttributeAccessIssue]  # click reads the instance
        raise
    except KeyboardInterrupt:  # click would exit with 1, which has another meaning here
        click.echo("ended with Ctrl-C", err=True)
        sys.exit(_CTRL_C)


@click.group(
    cls=Commands,
    context_settings={
        "auto_envvar_prefix": "DLROVER_HOOKS",
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("_", "-"),  # torchrun's --nproc_per_node
    },
)
@click.version_option(__version__)
def main() -> None:
    """Hooks that keep training runs alive.

    \b
    dlrover-hooks run --nproc-per-node 2 --job mine train.py --lr 1e-3
    dlrover-hooks check
    dlrover-hooks vitals --watch mine
    dlrover-hooks plans mine
    dlrover-hooks roles --job ppo
    dlrover-hooks rehearse --kill 3 --steps 50 train.py --lr 1e-3
    dlrover-hooks master --port 8780
    dlrover-hooks ckpt ls ckpt/
    """


main.add_command(brain)
main.add_command(check)
main.add_command(ckpt)
main.add_command(forget)
main.add_command(manifest)
main.add_command(plans)
main.add_command(roles)
main.add_command(run)
main.add_command(rehearse)
main.add_command(scale)
main.add_command(vitals)


@main.command(add_help_option=False, short_help="Serve the master.", context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def master(arguments: tuple[str, ...]) -> None:
    """Serve the master; the same as python -m dlrover_hooks.master (see --help there)."""
    from dlrover_hooks.master.__main__ import command

    command.main(list(arguments), prog_name="dlrover-hooks master")


if __name__ == "__main__":
    main()
