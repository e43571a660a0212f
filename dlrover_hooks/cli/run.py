"""The command line of `dlrover-hooks run`: torchrun's flags where they exist, and additional ones."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from dlrover_hooks import config as settings
from dlrover_hooks.cli.duration_type import Duration
from dlrover_hooks.errors import HooksError, LaunchError, MissingExtra, UsageError
from dlrover_hooks.protocol import ResourceLimits, ScalingMode

if TYPE_CHECKING:
    from dlrover_hooks.launcher.options import ScalingOptions

_USAGE, _GAVE_UP = 78, 77
_INSTEAD = {
    "--rdzv-conf": "its timeouts are --replace-timeout here",
    "--start-method": "every worker is a process of its own that executes SCRIPT: leave it out",
    "--event-log-handler": "the master shows it: GET /v1/jobs/JOB, /metrics",
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
_TORCHRUNS = {
    *("nnodes", "nproc-per-node", "rdzv-endpoint", "rdzv-id", "master-addr", "master-port", "node-rank", "local-addr"),
    *("max-restarts", "shutdown-timeout", "log-dir", "redirects", "tee", "standalone", "rdzv-backend"),
    *("monitor-interval", "module", "no-python"),
}
"""Flags that torchrun has under the same name."""


class _Torchruns(click.Command):
    """Reports what to use instead of a flag that only torchrun has."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if (instead := _INSTEAD.get(error.option_name)) is not None:
                raise click.UsageError(f"torchrun's {error.option_name} is not needed here: {instead}.", ctx) from error
            raise


class _Flag(click.Option):
    """`--some-flag` is also read from DLROVER_HOOKS_RUN_SOME_FLAG, and from PET_SOME_FLAG where torchrun has it.

    Kubeflow and others set torchrun's variables. Click's own variables would have the names of parameters.
    """

    def __init__(self, param_decls: Sequence[str], **more: Any) -> None:
        names = [name[2:] for name in param_decls if name.startswith("--")]
        given = [more.pop("envvar")] if "envvar" in more else []
        ours = [f"DLROVER_HOOKS_RUN_{names[0]}"]
        theirs = [f"PET_{name}" for name in names if name in _TORCHRUNS]
        variables = [name.upper().replace("-", "_") for name in (*ours, *theirs)]
        super().__init__(param_decls, envvar=[*given, *variables], allow_from_autoenv=False, **more)


class _Range(click.ParamType):
    """`N` or `MIN:MAX`."""

    name = "N|MIN:MAX"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from dlrover_hooks.launcher.options import bounds

        try:
            return bounds(value, param.opts[0] if param else "") if isinstance(value, str) else value
        except UsageError as error:
            self.fail(str(error), param, ctx)


class _Workers(_Range):
    """As `_Range`, or one for each processor of a kind: torchrun's `auto`, `gpu` and `cpu`."""

    name = "N|MIN:MAX|auto|gpu|cpu"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value not in ("auto", "gpu", "cpu"):
            return super().convert(value, param, ctx)
        from dlrover_hooks.host import processors
        from dlrover_hooks.launcher.options import Bounds

        found = processors.gpus(settings.visible_gpus()) if value != "cpu" else 0
        if value == "gpu" and not found:
            self.fail("gpu: the driver (NVML) shows no GPU here; give a number, or cpu", param, ctx)
        count = found or processors.cpus()
        return Bounds(count, count)


_flag = functools.partial(click.option, cls=_Flag)


@click.command(cls=_Torchruns, short_help="Run a script with N workers per node; replace what dies.",
               context_settings={"allow_interspersed_args": False})  # fmt: skip
@_flag("--nnodes", type=_Range(), default="1", show_default=True,
              help="Nodes of the job. Start the same command on each of them.")  # fmt: skip
@_flag("--nproc-per-node", "--workers", "-n", "nproc", type=_Workers(), metavar="N|MIN:MAX|auto|gpu|cpu",
       default="1", show_default=True,
       help="Workers on each node. auto: one for each GPU, or for each CPU where there is no GPU.")  # fmt: skip
@_flag("--ps", type=click.IntRange(min=1),
              help="TensorFlow parameter servers. SCRIPT then runs once, as the chief, beside so many servers and "
              "--workers workers, all on this machine; `dlrover-hooks scale` changes their number. With --mode: at "
              "least so many.")  # fmt: skip
@_flag("--ready-timeout", "ready_s", type=Duration(), default="2m", show_default=True,
              help="With --ps: a new task that is not ready by then is given up, and the job goes on with the old "
              "ones.")  # fmt: skip
@_flag("--mode", type=click.Choice([mode.value for mode in ScalingMode]),
              help="The job's nodes are agents on this machine (with --ps: servers and workers), and their number "
              "changes while it runs. manual: by `dlrover-hooks scale`. single-job: the master measures the speed and "
              "plans what pays, see `dlrover-hooks plans`. cluster: the Brain plans, see "
              "`dlrover-hooks brain`.")  # fmt: skip
@_flag("--brain", default="", metavar="URL",
              help="With --mode cluster: the Brain's address. Its token is DLROVER_HOOKS_BRAIN_TOKEN.")  # fmt: skip
@_flag("--min-workers", type=click.IntRange(min=1), default=1, show_default=True,
              help="With --mode: nodes at least, of --nproc-per-node processes each. With --ps: workers.")  # fmt: skip
@_flag("--max-workers", type=click.IntRange(min=1),
              help="With --mode: nodes at most.  [default: one for each CPU of this machine]")  # fmt: skip
@_flag("--max-ps", type=click.IntRange(min=1),
              help="With --mode and --ps: parameter servers at most.  [default: one for each CPU of this "
              "machine]")  # fmt: skip
@_flag("--max-cpu", type=click.FloatRange(min=1),
              help="With --mode: cores of all nodes together.  [default: those of this machine]")  # fmt: skip
@_flag("--max-memory", type=click.IntRange(min=1024), metavar="MIB",
              help="With --mode: memory of all nodes together.  [default: what is free on this machine]")  # fmt: skip
@_flag("--plan-window", type=Duration(), default="30s", show_default=True,
              help="With --mode: the speed is measured over windows of this length. A plan is decided after two to six "
              "of them, and the next one is made ten windows later.")  # fmt: skip
@_flag("--fault-level", type=click.Choice(["hot", "shrink", "elastic"]),
              help="When a worker or a node is lost. hot: replace it, the others wait up to --replace-timeout, then "
              "exit 77. shrink: go on with what is left (at least MIN), never grow. elastic: go on with what is left, "
              "grow up to MAX.  [default: hot for N, elastic for MIN:MAX]")  # fmt: skip
@_flag("--replace-timeout", "replace_timeout_s", type=Duration(), default="10m", show_default=True,
              help="Wait so long for nodes that are missing (a minute at least at the start), "
              "then exit 77.")  # fmt: skip
@_flag("--hang-timeout", "hang_timeout_s", type=Duration(), default="60s", show_default=True,
              help="A worker that is silent for so long hangs: it is killed and replaced. For the master that is "
              "served here.")  # fmt: skip
@_flag("--master-away", "master_away_s", type=Duration(), default="2m", show_default=True,
              help="Workers train on while the master is away. Once it is needed, for the next round, and has not "
              "answered for so long, exit 77.")  # fmt: skip
@_flag("--rdzv-endpoint", "endpoint", default="", envvar="DLROVER_HOOKS_MASTER",
              help="Where the nodes meet. HOST[:PORT] (8780): the first node serves the master there. "
              "http://HOST:PORT: a master runs there (python -m dlrover_hooks.master).")  # fmt: skip
@_flag("--master-addr", default="", help="HOST of --rdzv-endpoint, as in torchrun's static rendezvous.")
@_flag("--master-port", type=click.IntRange(1, 65535), help="Its PORT.")
@_flag("--node-rank", type=click.IntRange(min=0),
              help="0 serves the master, the others do not. Left out, the machine does whose address it is. Global "
              "ranks come from the master.")  # fmt: skip
@_flag("--token", envvar="DLROVER_HOOKS_TOKEN",
              help="Secret of the master: the same on all nodes, needed off loopback. Better in the environment "
              "(DLROVER_HOOKS_TOKEN), where ps does not show it.")  # fmt: skip
@_flag("--token-file", type=click.Path(exists=True, dir_okay=False), help="Read the token from this file.")
@_flag("--local-addr", default="", help="How the other nodes reach this one, if not the way it finds.")
@_flag("--slurm", is_flag=True, help="Take nodes, ranks, address and job from SLURM: "
              "srun dlrover-hooks run --slurm SCRIPT.")  # fmt: skip
@_flag("--max-restarts", type=click.IntRange(min=0), default=10, show_default=True,
              help="Give up (exit 77) when the job, on all its nodes, has failed more often than that within "
              "--restart-window.")  # fmt: skip
@_flag("--restart-window", "restart_window_s", type=Duration(), default="1h", show_default=True,
              help="Older failures do not count for --max-restarts, so a long run is not ended by rare failures of its "
              "machines.")  # fmt: skip
@_flag("--standby", type=click.IntRange(min=0),
              help="Keep so many idle processes on each node that have imported what the workers did: one takes the "
              "rank of a worker that died at once. 0: none, replacements start cold.  [default: one for each worker, "
              "while there is memory to spare]")  # fmt: skip
@_flag("--job", "--rdzv-id", default="",
              help="Name of the job: started again under it, an unfinished run resumes. "
              "All nodes give the same.")  # fmt: skip
@_flag("--fresh", is_flag=True, help="Start over even if this job has checkpoints.")
@_flag("--port", type=click.IntRange(0, 65535), default=0,
              help="Port of one machine's own master; 0 picks a free one.")  # fmt: skip
@_flag("--journal", type=click.Path(dir_okay=False),
              help="Keep the master's journal here instead of in a temporary folder.")  # fmt: skip
@_flag("--grace", "--shutdown-timeout", "grace_s", type=Duration(), default="25s",
              show_default=True, help="From SIGTERM (or Ctrl-C) to SIGKILL, for saving a last step. Five less "
              "than what torchrun and Kubernetes give.")  # fmt: skip
@_flag("--log-dir", default="",
              help="Keep each worker's output in LOG_DIR/ROUND/RANK/stdout.log and stderr.log. It is seen here, too, "
              "unless the next two say otherwise.")  # fmt: skip
@_flag("--redirects", "-r", help="Streams that go into files only: 1 stdout, 2 stderr, 3 both; 0:1,1:3 by local "
              "rank.")  # fmt: skip
@_flag("--tee", "-t", help="Streams that go into files and are seen here. Those of neither are only seen.")
@_flag("--node-check", is_flag=True,
              help="Measure the node first, and the network between the nodes, which takes some seconds. A bad node "
              "does not join: its launcher ends with 76 and the reason. See `dlrover-hooks check`.")  # fmt: skip
@_flag("--node-check-timeout", "node_check_timeout_s", type=Duration(), default="30s", show_default=True,
              help="A measurement, or a transfer between two nodes, that takes longer has failed.")  # fmt: skip
@_flag("--preemption", default="none", show_default=True,
              help="Who says that this node is to go: aws, gcp, azure (the cloud's metadata service) or "
              "file:PATH.")  # fmt: skip
@_flag("--requeue", is_flag=True, help="SLURM: scontrol requeue, once, when the job was preempted.")
@_flag("--standalone", is_flag=True, help="As without it: one machine, a master of its own.")
@_flag("--rdzv-backend",
              help="etcd: --rdzv-endpoint is etcd's HOST[:PORT] (2379). Each node then serves a master, one of which "
              "leads, so the job survives the loss of any node. Another value is accepted for torchrun's sake: the "
              "master is the rendezvous.")  # fmt: skip
@_flag(
    "--monitor-interval",
    type=float,
    help="Ignored; accepted for torchrun's sake. A worker's end is noticed at once.",
)
@_flag("-m", "--module", is_flag=True, help="SCRIPT is a module name, as with python -m.")
@_flag("--no-python", is_flag=True, help="SCRIPT is a program, not Python's.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(script: str, arguments: tuple[str, ...], module: bool, no_python: bool, **flags: Any) -> None:
    """Run SCRIPT with N workers per node under a master, and replace workers that die.

    Everything after SCRIPT is passed to it. The workers get the same environment as under torchrun. Each flag is
    also read from DLROVER_HOOKS_RUN_<FLAG>, and torchrun's from PET_<FLAG>.

    \b
    One machine:    dlrover-hooks run --nproc-per-node 2 --job mine train.py
    Two machines:   export DLROVER_HOOKS_TOKEN=...       (the same on both)
                    dlrover-hooks run --nnodes 2 --rdzv-endpoint node-a --job mine train.py
    What pays:      dlrover-hooks run --mode single-job --max-workers 4 --job mine train.py
    TensorFlow:     dlrover-hooks run --ps 2 --workers 2 --job mine train.py
    One to four:    dlrover-hooks run --nnodes 1:4 --rdzv-endpoint node-a --job mine train.py
    With etcd:      dlrover-hooks run --nnodes 2 --rdzv-backend etcd --rdzv-endpoint etcd-host --job mine train.py
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
    from dlrover_hooks.config.token_file import read_token
    from dlrover_hooks.launcher.processes.workers import worker_command

    with contextlib.ExitStack() as owned:
        if flags["master_addr"]:
            port = f":{flags['master_port']}" if flags["master_port"] else ""
            flags["endpoint"] = flags["master_addr"] + port
        if flags["token_file"]:
            flags["token"] = read_token(flags["token_file"])
        flags["temporary"] = ()
        if flags["slurm"]:
            _by_slurm(flags, owned)
        return _launch(worker_command(script, arguments, module=module, python=not no_python), flags)


_SAME = (
    *(
        "endpoint",
        "replace_timeout_s",
        "ps",
        "ready_s",
        "hang_timeout_s",
        "master_away_s",
        "max_restarts",
        "restart_window_s",
        "job",
        "fresh",
        "node_rank",
        "local_addr",
    ),
    *(
        "node_check",
        "node_check_timeout_s",
        "token",
        "port",
        "journal",
        "grace_s",
        "preemption",
        "requeue",
        "standby",
        "log_dir",
        "temporary",
    ),
)
"""Flags that are passed to `LaunchOptions` unchanged."""


def _scaling(flags: dict[str, Any]) -> ScalingOptions | None:
    """Raises UsageError, MissingExtra."""
    from dlrover_hooks.host import memory_limit, processors
    from dlrover_hooks.launcher.options import ScalingOptions

    given = click.get_current_context().get_parameter_source
    if flags["mode"] is None:
        for name in ("min_workers", "max_workers", "max_ps", "max_cpu", "max_memory", "plan_window", "brain"):
            if given(name) is not ParameterSource.DEFAULT:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} is for jobs whose nodes are planned", hint="add --mode")
        return None
    mode, cpus = ScalingMode(flags["mode"]), processors.cpus()
    if mode is not ScalingMode.MANUAL:
        _check_scipy()
    ps = flags["ps"] or 1
    if flags["max_ps"] is not None and flags["ps"] is None:
        raise UsageError("--max-ps is for jobs with parameter servers", hint="add --ps 1")
    limits = ResourceLimits(
        cpu=flags["max_cpu"] or cpus,
        memory=flags["max_memory"] or memory_limit.free().nbytes >> 20,
        min_workers=flags["min_workers"],
        max_workers=flags["max_workers"] or max(cpus, flags["min_workers"]),
        min_ps=ps,
        max_ps=flags["max_ps"] or max(cpus, ps),
    )
    if (mode is ScalingMode.CLUSTER) != bool(flags["brain"]):
        raise UsageError("--mode cluster and --brain need each other", hint="give both, or --mode single-job")
    return ScalingOptions(mode, limits, flags["brain"], flags["plan_window"])


def _check_scipy() -> None:
    if importlib.util.find_spec("scipy") is None:
        raise MissingExtra(
            "the plans of --mode single-job and cluster need scipy, which is not installed",
            hint="pip install 'dlrover-hooks[scaling]', or use --mode manual",
        )


def _launch(command: tuple[str, ...], flags: dict[str, Any]) -> int:
    from dlrover_hooks.launcher import node_supervisor
    from dlrover_hooks.launcher.options import LaunchOptions, Level, check
    from dlrover_hooks.launcher.processes.log_files import Streams, streams

    redirects, tee = (streams(flags[name] or "0", f"--{name}") for name in ("redirects", "tee"))
    if flags["log_dir"] and flags["redirects"] is flags["tee"] is None:
        tee = Streams(3)
    level = Level(flags["fault_level"]) if flags["fault_level"] else None
    options = LaunchOptions(
        command=command, nodes=flags["nnodes"], workers=flags["nproc"], scaling=_scaling(flags), level=level,
        redirects=redirects, tee=tee, etcd=flags["rdzv_backend"] == "etcd", **{name: flags[name] for name in _SAME},
    )  # fmt: skip
    check(options)
    return node_supervisor.Launcher(options).run()
