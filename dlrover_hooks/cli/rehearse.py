"""`dlrover-hooks rehearse`: runs a user's script three times: undisturbed, with faults, and with a relaunch."""

from __future__ import annotations

import sys
import uuid
from typing import Any

import click

from dlrover_hooks.errors import HooksError, UsageError
from dlrover_hooks.testing.faults import fault_plan
from dlrover_hooks.testing.faults.fault_plan import Kind, Target

_COUNTS: tuple[tuple[str, Kind, Target, str], ...] = (
    ("kill", Kind.KILL, Target.WORKER, "SIGKILL a worker."),
    ("stop", Kind.STOP, Target.WORKER, "SIGSTOP a worker for one to two seconds."),
    ("exception", Kind.EXCEPTION, Target.WORKER, "Raise an exception in the training loop."),
    ("hang", Kind.HANG, Target.WORKER, "Hold a worker's GIL for one to two seconds."),
    ("segfault", Kind.SEGFAULT, Target.WORKER, "SIGSEGV in a worker."),
    ("cut", Kind.CUT, Target.WORKER, "Cut a worker off its master for about a second."),
    ("kill-master", Kind.KILL, Target.MASTER, "SIGKILL the master."),
    ("kill-keeper", Kind.KILL, Target.KEEPER, "SIGKILL the keeper, which holds the checkpoints in memory."),
)


def _counts(command: Any) -> Any:
    """Add one option per kind of fault: how many of them."""
    for name, _, _, text in reversed(_COUNTS):
        command = click.option(f"--{name}", type=click.IntRange(min=0), default=0, metavar="N", help=text)(command)
    return command


@click.command("rehearse", short_help="Run a script under faults, and compare the results.",
               context_settings={"ignore_unknown_options": True})  # fmt: skip
@click.option("--nproc-per-node", "--workers", "-n", type=click.IntRange(min=1), default=2,
              show_default=True, help="Workers of each run.")  # fmt: skip
@click.option("--steps", type=click.IntRange(min=5), default=50, show_default=True,
              help="End each run at this optimizer step, unless the script ends before.")  # fmt: skip
@_counts
@click.option("--faults", type=click.Path(dir_okay=False, exists=True),
              help="A file of faults, one in a line: step=20 rank=1 kill.")  # fmt: skip
@click.option("--seed", type=int, help="Draws steps, ranks and moments of the faults; it is printed.")
@click.option(
    "--relaunch",
    type=click.IntRange(min=0),
    metavar="M",
    help="Workers of the second launch of the third run; 0: no third run.  [default: N - 1, at least 1]",
)
@click.option("--timeout", type=click.FloatRange(min=1), default=600.0, show_default=True,
              help="Seconds for each run.")  # fmt: skip
@click.option("--out", type=click.Path(file_okay=False), help="Keep traces, checkpoints and logs in this new folder.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module name, as with python -m.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(nproc_per_node: int, steps: int, faults: str | None, seed: int | None, relaunch: int | None, timeout: float,
            out: str | None, module: bool, script: str, arguments: tuple[str, ...], **counts: int) -> None:  # fmt: skip
    """Run SCRIPT three times with N workers and compare the runs step by step.

    The first run is undisturbed. The second gets faults: without any fault option, three workers are killed. In the
    third the launcher is killed halfway and started again with M workers.

    All runs end at --steps. The script runs unchanged, so each run writes its own output again. Only its checkpoints
    (save_to) go to a folder of the rehearsal. If --steps ends a run, the code after the training loop is not run.

    \b
    dlrover-hooks rehearse train.py --kill 3 --steps 50
    dlrover-hooks rehearse --kill 1 --kill-master 1 -n 4 train.py --lr 1e-3
    dlrover-hooks rehearse --faults faults.txt -- train.py --steps 10000

    Unknown options, and everything after a --, are passed to SCRIPT.

    \b
    The table at the end shows which promises the script keeps:
      1  each sample exactly once: the positions that each step trained
      2  the newest checkpoint is complete: the restored state, against the saved one
      3  a dead worker is replaced: the run reached its end
      4  each step is the same step: hashes of all parameters after each step
      5  a relaunch continues: the positions of each step, with M workers from halfway on
    and whether files in this folder got lines twice. For a broken promise it names the first step, rank and tensor.

    \b
    Exit codes: 0 all kept, 1 one is broken, or there was nothing to compare, 78 usage, 130 Ctrl-C.
    """
    from dlrover_hooks.launcher.processes.workers import worker_command
    from dlrover_hooks.rehearsal.run_trials import rehearse
    from dlrover_hooks.rehearsal.trial_run import RehearsalPlan

    seed = uuid.uuid4().int % 10_000 if seed is None else seed
    try:
        worker_command(script, arguments, module=module)
        menu = [(kind, of) for name, kind, of, _ in _COUNTS for _ in range(counts[name.replace("-", "_")])]
        if not menu and faults is None:
            menu = [(Kind.KILL, Target.WORKER)] * 3
        plan = RehearsalPlan(
            command=(*(["-m"] if module else []), script, *arguments), workers=nproc_per_node, steps=steps,
            faults=fault_plan.read(faults) if faults is not None else (), menu=tuple(menu), seed=seed,
            timeout_s=timeout, relaunched=max(1, nproc_per_node - 1) if relaunch is None else relaunch,
        )  # fmt: skip
        kept = rehearse(plan, out)
    except HooksError as error:
        click.echo(f"dlrover-hooks rehearse: {error}", err=True)
        sys.exit(78 if isinstance(error, UsageError) else 1)
    sys.exit(0 if kept else 1)
