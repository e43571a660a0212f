"""The checked options of `dlrover-hooks run`: numbers of nodes and workers, and what happens after a failure."""

from __future__ import annotations

import enum
import re
import sys

import msgspec

from dlrover_hooks.errors import UsageError
from dlrover_hooks.launcher.processes.log_files import Streams
from dlrover_hooks.protocol import ResourceLimits, ScalingMode, ScalingPace

MIN_HANG_S = 2.0
"""Two heartbeats."""


class Level(enum.Enum):
    """What happens to the world when a worker or a node is lost."""

    HOT = "hot"
    """Its size never changes: lost workers are replaced; the others wait for that, up to a deadline."""
    SHRINK = "shrink"
    """It goes on with the remaining workers, and never grows again."""
    ELASTIC = "elastic"
    """It goes on with the remaining workers, and grows when workers are added."""


class Bounds(msgspec.Struct, frozen=True):
    """MIN:MAX, both included."""

    least: int = 1
    most: int = 1

    @property
    def fixed(self) -> bool:
        """Both bounds are the same."""
        return self.least == self.most

    def __str__(self) -> str:
        return str(self.least) if self.fixed else f"{self.least}:{self.most}"


class ScalingOptions(msgspec.Struct, frozen=True):
    """How the master plans the nodes of the job. Each node is an agent on this machine, with `workers` of its own."""

    mode: ScalingMode
    limits: ResourceLimits
    brain: str = ""
    """In Cluster Mode: the Brain's address."""
    window_s: float = 30.0
    """A sample is taken, and a plan may be made, so often. The other times of `pace` follow from it."""

    @property
    def pace(self) -> ScalingPace:
        """The proportions are those of the defaults of `ScalingPace`."""
        return ScalingPace(window_s=self.window_s, settle_s=2 * self.window_s, cool_down_s=10 * self.window_s)


class LaunchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command line's options. `command` is run once per worker."""

    command: tuple[str, ...]
    ps: int | None = None
    """Parameter servers; the command is then run once, as the chief, and `workers` are TensorFlow's."""
    ready_s: float = 120.0
    """A new task of such a job must be ready within so many seconds."""
    nodes: Bounds = Bounds()
    workers: Bounds = Bounds()
    """Per node."""
    scaling: ScalingOptions | None = None
    """The master plans how many nodes there are, from one up to the limits."""
    level: Level | None = None
    replace_timeout_s: float = 600.0
    hang_timeout_s: float = 60.0
    master_away_s: float = 120.0
    max_restarts: int = 10
    """Failures of the job within `restart_window_s` that are followed by a restart."""
    restart_window_s: float = 3600.0
    job: str = ""
    fresh: bool = False
    endpoint: str = ""
    """The master's address: HOST:PORT, served by the first node, or the URL of a master that runs already."""
    etcd: bool = False
    """`endpoint` is the address of etcd: each node serves a master, and one of these leads."""
    node_rank: int | None = None
    local_addr: str = ""
    token: str | None = None
    port: int = 0
    journal: str | None = None
    grace_s: float = 25.0
    node_check: bool = False
    """The node is checked before its agent joins."""
    node_check_timeout_s: float = 30.0
    preemption: str = "none"
    """The source of interruption notices, see `interruption_notices.source`."""
    requeue: bool = False
    """SLURM: requeue the job after a preemption."""
    standby: int | None = None
    """Number of idle processes per node that have imported everything, if given; see `standbys`."""
    log_dir: str = ""
    """Folder for the workers' output files; see `log_files.Logs` for the next two."""
    redirects: Streams = Streams()
    tee: Streams = Streams()
    preload: str = ""
    """Where workers write what they have imported, if launchers of other nodes on this machine share it."""
    temporary: tuple[str, ...] = ()
    """Files to be removed even if the launcher is killed."""

    @property
    def fault_level(self) -> Level:
        """The given level; by default as in torchrun: a fixed number is kept, a range is elastic."""
        if self.level is not None:
            return self.level
        return Level.HOT if self.nodes.fixed and self.workers.fixed else Level.ELASTIC

    @property
    def standbys(self) -> int:
        """By default one for each worker of this node, since any number of them may have to be replaced.

        Of a parameter server job two: a lost parameter server stops all others, a second loss meanwhile is rare.
        """
        if self.standby is not None:
            return self.standby
        if self.ps is not None:
            return 2
        return self.workers.most if self.python else 0

    @property
    def python(self) -> bool:
        """The command is a Python script, run by this interpreter."""
        return tuple(self.command[:2]) == (sys.executable, "-u")

    @property
    def min_workers(self) -> int:
        """Of the job."""
        return self.nodes.least * self.workers.least

    @property
    def max_workers(self) -> int:
        """Of the job."""
        return self.nodes.most * self.workers.most

    @property
    def several_nodes(self) -> bool:
        """Other agents may take part, or the master is not this launcher's own."""
        return self.nodes.most > 1 or bool(self.endpoint)


def bounds(text: str, flag: str) -> Bounds:
    """Parses `"4"` or `"2:4"`. Raises UsageError."""
    match = re.fullmatch(r"\s*(\d+)\s*(?::\s*(\d+)\s*)?", text)
    if match is None:
        raise UsageError(f"{flag} {text}: not a number", hint=f"give a number ({flag} 4) or a range ({flag} 2:4)")
    least = int(match[1])
    most = int(match[2] or match[1])
    if not 1 <= least <= most:
        raise UsageError(f"{flag} {text}: expected 1 <= MIN <= MAX", hint=f"such as {flag} 4 or {flag} 2:4")
    return Bounds(least, most)


def check(options: LaunchOptions) -> None:
    """Raises UsageError for options that exclude each other."""
    ranged = not (options.nodes.fixed and options.workers.fixed)
    if options.level is Level.HOT and ranged:
        raise UsageError(
            f"--fault-level hot keeps the number of workers, but --nnodes {options.nodes} --nproc-per-node "
            f"{options.workers} leaves it open",
            hint="give one number to each, or --fault-level shrink or elastic",
        )
    if options.level in (Level.SHRINK, Level.ELASTIC) and not ranged:
        raise UsageError(
            f"--fault-level {options.level.value} needs to know how few are enough",
            hint=f"give a range: --nnodes 1:{options.nodes.most} for nodes, --nproc-per-node 1:{options.workers.most} "
            "for the workers of a node, or both",
        )
    if options.hang_timeout_s < MIN_HANG_S:
        raise UsageError(
            f"--hang-timeout {options.hang_timeout_s:g}s: workers send a heartbeat once a second, "
            "a healthy one would be killed",
            hint=f"give {MIN_HANG_S:g}s or more",
        )
    if options.standby and not options.python:
        raise UsageError("--standby needs a Python script: there is nothing to import ahead", hint="leave it out")
    if (options.redirects, options.tee) != (Streams(), Streams()) and not options.log_dir:
        raise UsageError("--redirects and --tee need a folder for their files", hint="add --log-dir DIR")
    if options.etcd and not options.endpoint:
        raise UsageError("--rdzv-backend etcd needs the address of etcd", hint="add --rdzv-endpoint HOST:2379")
    if options.etcd and options.journal is not None:
        raise UsageError("--rdzv-backend etcd keeps the journal in etcd", hint="leave out --journal")
    if options.ps is not None:
        _check_tasks(options)
    if options.scaling is not None:
        _check_scaling(options)
    if options.nodes.most > 1 and not options.endpoint:
        raise UsageError(
            f"--nnodes {options.nodes}: the nodes need one address to meet at",
            hint="give all of them --rdzv-endpoint HOST:8780, where HOST is the first node: it serves the master "
            "there. Or run `python -m dlrover_hooks.master` anywhere and give --rdzv-endpoint http://HOST:8780. "
            "Under SLURM --slurm finds the address",
        )


def _check_scaling(options: LaunchOptions) -> None:
    mode = f"--mode {options.scaling.mode.value}" if options.scaling is not None else ""
    if options.nodes.most > 1 or options.endpoint or not options.workers.fixed:
        raise UsageError(
            f"{mode}: the master plans how many nodes there are, on this machine",
            hint="leave out --nnodes and --rdzv-endpoint, and give --nproc-per-node one number; --min-workers and "
            "--max-workers bound the nodes",
        )
    if options.ps is not None and options.workers.most != 1:
        raise UsageError(
            f"{mode} with --ps: the master plans how many workers there are",
            hint="leave out --workers; --min-workers and --max-workers bound them",
        )
    if options.level is not None or options.node_check or options.requeue or options.preemption != "none":
        raise UsageError(
            f"{mode} does not work with --fault-level, --node-check, --requeue and --preemption", hint="leave them out"
        )


def _check_tasks(options: LaunchOptions) -> None:
    if options.nodes.most > 1:
        raise UsageError(
            "--ps starts all tasks on one machine",
            hint="for several machines start each process with TF_CONFIG and DLROVER_HOOKS_MASTER set",
        )
    if not options.workers.fixed or options.level is not None:
        raise UsageError(
            "--ps keeps the number of workers until it is changed",
            hint="give one number; dlrover-hooks scale --workers N changes it while the job runs",
        )
    if options.node_check:
        raise UsageError("--node-check does not work with --ps", hint="run dlrover-hooks check before")
    if options.log_dir:
        raise UsageError("--log-dir does not work with --ps", hint="redirect the output of the launcher")
