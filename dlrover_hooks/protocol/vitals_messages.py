"""What nodes, worker processes and accelerators use. A field that is absent, or None, is not known there."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from dlrover_hooks.protocol.base_messages import Count, Message, Rank, Rate, Seconds, Size, Step

Percent = Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]
"""Of one core where CPU time is meant, so it may exceed 100."""
Cores = Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]
Celsius = Annotated[float, msgspec.Meta(ge=-300.0, le=1e4)]
Watts = Annotated[float, msgspec.Meta(ge=0.0, le=1e7)]
MOST_WORKERS = 1024
"""Worker processes of one node in a report."""


class AcceleratorVitals(Message, frozen=True):
    """A GPU or another accelerator, of one rank. `device` identifies it for the driver, for NVIDIA by its UUID."""

    name: str
    device: str = ""
    use_percent: Percent | None = None
    """Share of the driver's last measuring interval in which a kernel ran."""
    memory_used_bytes: Size | None = None
    """By all processes."""
    memory_total_bytes: Size | None = None
    temperature_c: Celsius | None = None
    power_w: Watts | None = None
    ecc_errors: Count | None = None
    """Uncorrected memory errors since the driver was loaded."""
    xid: Count | None = None
    """NVIDIA's number of the last critical error since the process started."""
    throttled_by: tuple[str, ...] = ()
    """Why its clock is lower than it could be."""


class Vitals(Message, frozen=True):
    """Of one worker: its own process, without its children, and its accelerator."""

    cpu_percent: Percent = 0.0
    memory_bytes: Size = 0
    accelerator: AcceleratorVitals | None = None


class StepPhase(enum.Enum):
    """A part of a step that is a rank's own work, in which it waits for no other rank."""

    DATA = "data"
    COMPUTE = "compute"
    OPTIMIZER = "optimizer"
    CHECKPOINT = "checkpoint"


class StragglerPolicy(enum.Enum):
    """What follows once a rank is slow: only the report, fewer micro-batches of each step for it, a new process for it,
    or its node leaves the job.
    """

    REPORT = "report"
    REBALANCE = "rebalance"
    RELAUNCH = "relaunch"
    EXCLUDE = "exclude"


class StepPhases(Message, frozen=True):
    """Where the steps of one window of a rank spend their time, in seconds per step.

    `data`: from the request of a batch until it is handed out. `compute`: the forward pass and this rank's own backward
    pass. `network`: the wait for the other ranks: for the buffers of rank 0 in the forward pass, and from the end of
    the own backward pass until the optimizer steps. `checkpoint`: what a save blocks. What is left of `total_s` is
    evaluation, logging and the like.

    On a GPU these are times of the GPU. So `data` is the time in which it had nothing to do until the batch was there.
    """

    step: Step
    """The last one of the window."""
    steps: Count
    window_s: Seconds
    total_s: Seconds
    data_s: Seconds
    compute_s: Seconds
    optimizer_s: Seconds
    checkpoint_s: Seconds
    network_s: Seconds | None = None
    """None: the end of the own backward pass is not known. `compute` and `optimizer` may then hold waiting."""
    forward_s: Seconds | None = None
    """The part of `compute` until the end of the forward pass; None, like the next field: its end is not known."""
    backward_s: Seconds | None = None
    """The rest of `compute`."""
    in_step: bool = True
    """False: no other rank waits for the steps of this one, so it is not compared."""
    policy: StragglerPolicy = StragglerPolicy.REPORT
    """What is to follow if this rank is slow."""
    micro_batches: Count = 0
    """Of a step, on this rank."""
    total_micro_batches: Count = 0
    """Of a step, on all ranks. 0, like the field before: not known, or ranks cannot differ in their number."""
    rebalanced: bool = False
    """The ranks share the micro-batches unevenly, because they differ in speed."""


class Straggler(Message, frozen=True):
    """A rank that the others wait for, because of its `phase`. Both times are seconds per step."""

    phase: StepPhase
    seconds: Seconds
    median_s: Seconds
    """Of all ranks of the round."""
    for_s: Seconds
    """How long it has been slow."""


class CPUVitals(Message, frozen=True):
    cores: Rank
    """Of the machine."""
    busy_cores: Cores
    """Mean over all processes of the machine, since the last report."""
    load: tuple[Cores, Cores, Cores]
    """Over 1, 5 and 15 minutes."""
    limit_cores: Cores | None = None
    """The smallest CPU quota of the control groups around the launcher."""
    throttled_percent: Percent | None = None
    """Share of the quota's periods since the last report in which processes had to wait for the next one."""


class MemoryVitals(Message, frozen=True):
    total_bytes: Size
    used_bytes: Size
    """Of the machine, without what the kernel can reclaim."""
    limit_bytes: Size | None = None
    """Of the control group around the launcher in which least is left, and what is used in it."""
    limit_used_bytes: Size | None = None
    oom_kills: Count | None = None
    """Processes that the kernel has killed in the launcher's own control group because its memory was full."""


class DiskVitals(Message, frozen=True):
    """The file system of `save_to` if that is a local folder, else of the launcher's working directory."""

    path: str
    free_bytes: Size
    total_bytes: Size
    read_bytes_per_s: Rate | None = None
    """Of its block device, mean since the last report; None for a file system without one, such as NFS or overlayfs."""
    written_bytes_per_s: Rate | None = None


class NetworkVitals(Message, frozen=True):
    """All network interfaces but loopback, and without RDMA; mean since the last report."""

    received_bytes_per_s: Rate
    sent_bytes_per_s: Rate


class WorkerProcesses(Message, frozen=True):
    """The process tree of one worker: itself, its DataLoader workers and all other descendants."""

    incarnation: str
    processes: Rank
    cpu_percent: Percent
    memory_bytes: Size
    """Resident; memory that they share counts once for each of them."""


class NodeVitals(Message, frozen=True):
    """From a node's agent, at the interval that the last reply gave; never journaled."""

    job: str
    incarnation: str
    node: str
    cpu: CPUVitals
    memory: MemoryVitals
    network: NetworkVitals
    disk: DiskVitals | None = None
    """None if the file system gave an error, or no answer."""
    workers: Annotated[tuple[WorkerProcesses, ...], msgspec.Meta(max_length=MOST_WORKERS)] = ()
    launcher: WorkerProcesses | None = None
    """The launcher itself, the keeper and idle standbys. Its `incarnation` is empty."""


class NextVitals(Message, frozen=True):
    """When the next report is due."""

    within_s: Seconds
