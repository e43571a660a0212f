"""The command line of `dlrover-hooks run`: torchrun's flags where they exist, and additional ones."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any

import click
from click.core import ParameterSource

from dlrover_hooks import config as settings
from dlrover_hooks.errors import HooksError, LaunchError, UsageError

_USAGE, _GAVE_UP = 78, 77
_INSTEAD = {
    "--rdzv-conf": "its timeouts are --replace-timeout here",
    "--start-method": "every worker is a process of its own that executes SCRIPT: leave it out",
    "--event-log-handler": "the master tells: GET /v1/jobs/JOB, /metrics",
    "--role": "there is one role, ROLE_NAME=default",
    "--run-path": "name the script itself",
    "--local-ranks-filter": "print on LOCAL_RANK 0 only, in the script",
    "--logs-specs": "the workers write where the launcher does, or into files (--log-dir)",
    "--numa-binding": "start the launcher under numactl, or bind by LOCAL_RANK in the script",
    "--signals-to-handle": "SIGINT and SIGTERM end the run, with --grace seconds for the workers",
    "--virtual-local-rank": "choose the device by LOCAL_RANK",
    "--duplicate-stdout-filters": "pipe the launcher's output through grep",
    "--duplicate-stderr-filters": "pipe the launcher's output through grep",
}
"""Unsupported flags of torchrun, and what to use instead."""


class _Torchruns(click.Command):
    """Reports what to use instead of a flag that only torchrun has."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if (instead := _INSTEAD.get(error.option_name)) is not None:
                raise click.UsageError(f"torchrun's {error.option_name} is not needed here: {instead}.", ctx) from error
            raise


class _Range(click.ParamType):
    """`N` or `MIN:MAX`."""

    name = "N|MIN:MAX"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from dlrover_hooks.launcher.options import bounds

        try:
            return bounds(value, param.opts[0] if param else "") if isinstance(value, str) else value
        except UsageError as error:
            self.fail(str(error), param, ctx)


class _Duration(click.ParamType):
    """Seconds, or a duration such as `10m`."""

    name = "DURATION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            seconds = settings.interval(f"{value}s" if value.replace(".", "", 1).isdigit() else value, name="it")
            return float(str(seconds).removesuffix("s"))
        except (UsageError, ValueError):
            self.fail(f"{value!r} is no duration: give seconds, or such as 90s, 10m", param, ctx)


@click.command(cls=_Torchruns, short_help="Run a script with N workers per node; replace what dies.",
               context_settings={"allow_interspersed_args": False})  # fmt: skip
@click.option("--nnodes", type=_Range(), default="1", show_default=True,
              help="Nodes of the job. Start the same command on each of them.")  # fmt: skip
@click.option("--nproc-per-node", "--workers", "-n", "nproc", type=_Range(), default="1", show_default=True,
              help="Workers on each node.")  # fmt: skip
@click.option("--fault-level", type=click.Choice(["hot", "shrink", "elastic"]),
              help="When a worker or a node is lost. hot: replace it, the others wait up to --replace-timeout, then "
              "exit 77. shrink: go on with what is left (at least MIN), never grow. elastic: go on with what is left, "
              "grow up to MAX.  [default: hot for N, elastic for MIN:MAX]")  # fmt: skip
@click.option("--replace-timeout", "replace_timeout_s", type=_Duration(), default="10m", show_default=True,
              help="Wait so long for nodes that are missing (a minute at least at the start), "
              "then exit 77.")  # fmt: skip
@click.option("--hang-timeout", "hang_timeout_s", type=_Duration(), default="60s", show_default=True,
              help="A worker that is silent for so long hangs: it is killed and replaced. For the master that is "
              "served here.")  # fmt: skip
@click.option("--master-away", "master_away_s", type=_Duration(), default="2m", show_default=True,
              help="Workers train on while the master is away. Once it is needed, for the next round, and has not "
              "answered for so long, exit 77.")  # fmt: skip
@click.option("--rdzv-endpoint", "endpoint", default="", envvar="DLROVER_HOOKS_MASTER",
              help="Where the nodes meet. HOST[:PORT] (8780): the first node serves the master there. "
              "http://HOST:PORT: a master runs there (python -m dlrover_hooks.master).")  # fmt: skip
@click.option("--master-addr", default="", help="HOST of --rdzv-endpoint, as in torchrun's static rendezvous.")
@click.option("--master-port", type=click.IntRange(1, 65535), help="Its PORT.")
@click.option("--node-rank", type=click.IntRange(min=0),
              help="0 serves the master, the others do not. Left out, the machine does whose address it is. Global "
              "ranks come from the master.")  # fmt: skip
@click.option("--token", envvar="DLROVER_HOOKS_TOKEN",
              help="Secret of the master: the same on all nodes, needed off loopback. Better in the environment "
              "(DLROVER_HOOKS_TOKEN), where ps does not show it.")  # fmt: skip
@click.option("--local-addr", default="", help="How the other nodes reach this one, if not the way it finds.")
@click.option("--slurm", is_flag=True, help="Take nodes, ranks, address and job from SLURM: "
              "srun dlrover-hooks run --slurm SCRIPT.")  # fmt: skip
@click.option("--max-restarts", type=click.IntRange(min=0), default=10, show_default=True,
              help="Give up (exit 77) when the job, on all its nodes, has failed more often than that.")  # fmt: skip
@click.option("--standby", type=click.IntRange(min=0),
              help="Keep so many idle processes on each node that have imported what the workers did: one takes the "
              "seat of a worker that died at once. 0: none, replacements start cold.  [default: one for each worker, "
              "while there is memory to spare]")  # fmt: skip
@click.option("--job", "--rdzv-id", default="",
              help="Name of the job: started again under it, an unfinished run resumes. "
              "All nodes give the same.")  # fmt: skip
@click.option("--fresh", is_flag=True, help="Start anew even if this job has checkpoints.")
@click.option("--port", type=click.IntRange(0, 65535), default=0,
              help="Port of one machine's own master; 0 picks a free one.")  # fmt: skip
@click.option("--journal", type=click.Path(dir_okay=False),
              help="Keep the master's journal here instead of in a temporary folder.")  # fmt: skip
@click.option("--grace", "--shutdown-timeout", "grace_s", type=click.FloatRange(min=0), default=25.0,
              show_default=True, help="Seconds from SIGTERM (or Ctrl-C) to SIGKILL, for saving a last step. Five less "
              "than what torchrun and Kubernetes give.")  # fmt: skip
@click.option("--log-dir", default="",
              help="Keep each worker's output in LOG_DIR/ROUND/RANK/stdout.log and stderr.log. It is seen here, too, "
              "unless the next two say otherwise.")  # fmt: skip
@click.option("--redirects", "-r", help="Streams that go into files only: 1 stdout, 2 stderr, 3 both; 0:1,1:3 by local "
              "rank.")  # fmt: skip
@click.option("--tee", "-t", help="Streams that go into files and are seen here. Those of neither are only seen.")
@click.option("--preemption", default="none", show_default=True,
              help="Who says that this node is to go: aws, gcp, azure (the cloud's metadata service) or "
              "file:PATH.")  # fmt: skip
@click.option("--requeue", is_flag=True, help="SLURM: scontrol requeue, once, when the job was preempted.")
@click.option("--standalone", is_flag=True, help="As without it: one machine, a master of its own.")
@click.option("--rdzv-backend", help="Has no meaning here: the rendezvous is the master's.")
@click.option("--monitor-interval", type=float, help="Has no meaning here: an end is heard at once.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module name, as with python -m.")
@click.option("--no-python", is_flag=True, help="SCRIPT is a program, not Python's.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(script: str, arguments: tuple[str, ...], module: bool, no_python: bool, **flags: Any) -> None:
    """Run SCRIPT with N workers per node under a master, and replace workers that die.

    Everything after SCRIPT is passed to it. The workers get the same environment as under torchrun.

    \b
    One machine:    dlrover-hooks run --nproc-per-node 2 --job mine train.py
    Two machines:   export DLROVER_HOOKS_TOKEN=...       (the same on both)
                    dlrover-hooks run --nnodes 2 --rdzv-endpoint node-a --job mine train.py
    One to four:    dlrover-hooks run --nnodes 1:4 --rdzv-endpoint node-a --job mine train.py
    SLURM:          srun dlrover-hooks run --slurm train.py

    \b
    Exit codes: 0 done, 1 the script failed (before any progress, twice alike, or after training was finished),
    75 preempted: start it again, 76 bad node: replace it, 77 gave up, 78 usage, 130 Ctrl-C, 143 SIGTERM.
    """
    logging.basicConfig(format="[dlrover-hooks] %(message)s", level=logging.INFO, stream=sys.stderr)
    try:
        code = _run(script, arguments, module, no_python, flags)
    except HooksError as error:
        click.echo(f"dlrover-hooks run: {error}", err=True)
        code = _USAGE if isinstance(error, (UsageError, LaunchError)) else _GAVE_UP
    sys.exit(code)


def _by_slurm(flags: dict[str, Any], owned: contextlib.ExitStack) -> None:
    """Fill in from SLURM the values that the command line leaves out. Raises UsageError, LaunchError."""
    from dlrover_hooks.launcher.options import Bounds
    from dlrover_hooks.launcher.slurm import allocation, shared_token, token_path

    found = allocation(settings.slurm_environment())
    given = click.get_current_context().get_parameter_source
    flags["job"] = flags["job"] or found.job
    if given("nnodes") is ParameterSource.DEFAULT:
        flags["nnodes"] = Bounds(found.nodes, found.nodes)
    if given("nproc") is ParameterSource.DEFAULT and found.gpus:
        flags["nproc"] = Bounds(found.gpus, found.gpus)
    if flags["node_rank"] is None:
        flags["node_rank"] = found.node_rank
    if not flags["endpoint"] and found.endpoint:
        flags["endpoint"] = found.endpoint
        if not flags["token"]:
            first = found.node_rank == 0
            flags["token"] = owned.enter_context(shared_token(found.life, make=first))
            flags["temporary"] = (token_path(found.life),) if first else ()


def _run(script: str, arguments: tuple[str, ...], module: bool, no_python: bool, flags: dict[str, Any]) -> int:
    from dlrover_hooks.launcher.processes.workers import worker_command

    with contextlib.ExitStack() as owned:
        if flags["master_addr"]:
            port = f":{flags['master_port']}" if flags["master_port"] else ""
            flags["endpoint"] = flags["master_addr"] + port
        flags["temporary"] = ()
        if flags["slurm"]:
            _by_slurm(flags, owned)
        return _launch(worker_command(script, arguments, module=module, python=not no_python), flags)


_SAME = (
    *(
        "endpoint",
        "replace_timeout_s",
        "hang_timeout_s",
        "master_away_s",
        "max_restarts",
        "job",
        "fresh",
        "node_rank",
        "local_addr",
    ),
    *("token", "port", "journal", "grace_s", "preemption", "requeue", "standby", "log_dir", "temporary"),
)
"""Flags that are passed to `LaunchOptions` unchanged."""


def _launch(command: tuple[str, ...], flags: dict[str, Any]) -> int:
    from dlrover_hooks.launcher import launcher
    from dlrover_hooks.launcher.options import LaunchOptions, Level, check
    from dlrover_hooks.launcher.processes.log_files import Streams, streams

    redirects, tee = (streams(flags[name] or "0", f"--{name}") for name in ("redirects", "tee"))
    if flags["log_dir"] and flags["redirects"] is flags["tee"] is None:
        tee = Streams(3)
    level = Level(flags["fault_level"]) if flags["fault_level"] else None
    options = LaunchOptions(
        command=command, nodes=flags["nnodes"], workers=flags["nproc"], level=level, redirects=redirects, tee=tee,
        **{name: flags[name] for name in _SAME},
    )  # fmt: skip
    check(options)
    return launcher.Launcher(options).run()
