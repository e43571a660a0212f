"""The `dlrover-hooks` command: `run` a training script, or serve a `master`."""

from __future__ import annotations

import logging
import sys

import click

from dlrover_hooks import __version__
from dlrover_hooks.errors import HooksError


@click.group(context_settings={"auto_envvar_prefix": "DLROVER_HOOKS", "help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Hooks that keep training runs alive.

    \b
    dlrover-hooks run --nproc-per-node 2 train.py --lr 1e-3
    dlrover-hooks master --port 8780
    """


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
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
    Exit codes: 0 done, 1 the script failed before any progress, 77 gave up, 78 usage, 130 Ctrl-C.
    """
    from dlrover_hooks.runtime.launch import USAGE, Launcher, Options, worker_command

    logging.basicConfig(format="[dlrover-hooks] %(message)s", level=logging.INFO, stream=sys.stderr)
    options = Options(
        command=worker_command(script, arguments, module=module), workers=workers, max_restarts=max_restarts, job=job,
        fresh=fresh, port=port, journal=journal, grace_s=grace_s,
    )  # fmt: skip
    try:
        code = Launcher(options).run()
    except HooksError as error:
        click.echo(f"dlrover-hooks run: {error}", err=True)
        code = USAGE
    sys.exit(code)


@main.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def master(arguments: tuple[str, ...]) -> None:
    """Serve the master; the same as python -m dlrover_hooks.master (see --help there)."""
    from dlrover_hooks.master.__main__ import command

    command.main(list(arguments), prog_name="dlrover-hooks master")


if __name__ == "__main__":
    main()
