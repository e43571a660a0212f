"""The `dlrover-hooks` command: `run` a training script, serve a `master`, look after checkpoints (`ckpt`)."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

import click

from dlrover_hooks import __version__
from dlrover_hooks.ckpt import ckpt
from dlrover_hooks.errors import HooksError, LaunchError, UsageError

_USAGE, _GAVE_UP = 78, 77


class Commands(click.Group):
    """Ends with 78, not with click's 2, for a command line that must be mended."""

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
    dlrover-hooks master --port 8780
    dlrover-hooks ckpt ls ckpt/
    """


main.add_command(ckpt)


@main.command(short_help="Run a script with N workers; restart them if one dies.",
              context_settings={"allow_interspersed_args": False})  # fmt: skip
@click.option("--nproc-per-node", "--workers", "-n", "workers", type=click.IntRange(min=1), default=1,
              show_default=True, help="Workers on this machine.")  # fmt: skip
@click.option("--max-restarts", type=click.IntRange(min=0), default=10, show_default=True,
              help="Give up (exit 77) after this many restarts.")  # fmt: skip
@click.option("--job", default="", help="Name of the job: started again under it, an unfinished run resumes.")
@click.option("--fresh", is_flag=True, help="Start anew even if this job has checkpoints.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="Port of the embedded master; 0 picks a free one."
)
@click.option(
    "--journal",
    type=click.Path(dir_okay=False),
    help="Keep the master's journal here instead of in a temporary folder.",
)
@click.option("--grace", "grace_s", type=click.FloatRange(min=0), default=10.0, show_default=True,
              help="Seconds the workers get after SIGTERM on Ctrl-C.")  # fmt: skip
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module name, as with python -m.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(workers: int, max_restarts: int, job: str, fresh: bool, port: int, journal: str | None, grace_s: float,
        module: bool, script: str, arguments: tuple[str, ...]) -> None:  # fmt: skip
    """Run SCRIPT with N workers under an embedded master, and restart them when one dies.

    Everything after SCRIPT goes to the script. The workers get the environment torchrun would give them.

    \b
    Exit codes: 0 done, 1 the script failed (before any progress, or after training was finished),
    77 gave up, 78 usage, 130 Ctrl-C, 143 SIGTERM.
    """
    from dlrover_hooks.runtime.launch import Launcher, Options, worker_command

    logging.basicConfig(format="[dlrover-hooks] %(message)s", level=logging.INFO, stream=sys.stderr)
    try:
        options = Options(
            command=worker_command(script, arguments, module=module), workers=workers, max_restarts=max_restarts,
            job=job, fresh=fresh, port=port, journal=journal, grace_s=grace_s,
        )  # fmt: skip
        code = Launcher(options).run()
    except HooksError as error:
        click.echo(f"dlrover-hooks run: {error}", err=True)
        code = _USAGE if isinstance(error, (UsageError, LaunchError)) else _GAVE_UP
    sys.exit(code)


@main.command(add_help_option=False, short_help="Serve the master.", context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def master(arguments: tuple[str, ...]) -> None:
    """Serve the master; the same as python -m dlrover_hooks.master (see --help there)."""
    from dlrover_hooks.master.__main__ import command

    command.main(list(arguments), prog_name="dlrover-hooks master")


if __name__ == "__main__":
    main()
