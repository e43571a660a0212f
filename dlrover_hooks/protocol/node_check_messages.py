"""The check of nodes before they train: what each measured, transfers between pairs of nodes, and the verdicts."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from dlrover_hooks.protocol.base_messages import Count, Message, Port, Seconds, World
from dlrover_hooks.protocol.checkpoint_messages import Secret

Speed = Annotated[float, msgspec.Meta(ge=0.0, le=1e18)]
"""FLOP/s of compute; otherwise bytes per second."""
ShortText = Annotated[str, msgspec.Meta(max_length=500)]
LISTED_NODES = 64
"""Most nodes that a report to one of them lists. Such a reply is then small, whatever the number of nodes."""


class MeasureKind(enum.Enum):
    """What a node measures by itself."""

    COMPUTE = "compute"
    """Matrix products."""
    MEMORY = "memory"
    """Copies within the memory of a device; each byte that is copied counts once."""
    DISK_WRITE = "disk write"
    """Until it is durable (fsync)."""
    DISK_READ = "disk read"
    LOOPBACK = "loopback network"
    """A TCP transfer of this node with itself."""


class Measure(Message, frozen=True):
    """One measurement. `what`: the device or folder. `model`: only devices of one model are compared with each other.

    `failed`: why there is no `speed`.
    """

    kind: MeasureKind
    what: ShortText
    model: ShortText = ""
    speed: Speed | None = None
    failed: ShortText = ""


class JoinCheck(Message, frozen=True):
    """`node` has measured itself and takes part in the next check of `job`. Creates the job if it is unknown.

    The check begins when `most` nodes are there; when `least` are and none has come for `last_call_s`; or `gather_s`
    after the first. If the job trains already, it begins at once.
    """

    job: str
    incarnation: str
    node: str
    host: str
    port: Port
    """Where other nodes reach its listener for transfers."""
    secret: Secret
    """The node that connects must know it; the master tells it to the node's peers only."""
    least: World
    most: World
    gather_s: Seconds
    last_call_s: Seconds
    transfer_s: Seconds
    """A transfer that takes longer has failed."""
    measures: Annotated[tuple[Measure, ...], msgspec.Meta(max_length=256)] = ()


class CheckJoined(Message, frozen=True):
    """`number`: of the check; counts up for each job."""

    number: Count


class CheckPeer(Message, frozen=True):
    """The other node of a pair."""

    node: str
    incarnation: str
    host: str
    port: Port
    secret: Secret


class NodeVerdict(enum.Enum):
    """The result of a check for one node."""

    OK = "ok"
    SLOW = "slow"
    """It works, but far slower than the other nodes."""
    UNCLEAR = "unclear"
    """Its transfers failed, and no other node shows which end is at fault."""
    BAD = "bad"


class NodeReport(Message, frozen=True):
    """`network`: the greatest speed of its transfers with other nodes. `round_trip_s`: the shortest."""

    node: str
    verdict: NodeVerdict
    reason: str = ""
    measures: tuple[Measure, ...] = ()
    network: Speed | None = None
    round_trip_s: Seconds | None = None


class KeptOut(Message, frozen=True):
    """A node that its last check found bad, and that has not joined the job since."""

    node: str
    reason: str


class CheckReport(Message, frozen=True):
    """The last check of a job that is over. `number` 0: there was none.

    `nodes`: by verdict, the worst first. A report to one node lists the first `LISTED_NODES` and that node, and
    `measures` of that node only; `unlisted` counts the others by verdict.
    """

    number: Count = 0
    wanted: Count = 0
    """Nodes that were waited for."""
    rounds: Count = 0
    """Rounds of transfers between pairs."""
    nodes: tuple[NodeReport, ...] = ()
    unlisted: dict[str, Count] = {}  # noqa: RUF012 - msgspec copies it for each struct
    kept_out: tuple[KeptOut, ...] = ()
    """At most `LISTED_NODES`, by name."""
    gathering: tuple[str, ...] = ()
    """Nodes that wait for the next check to begin; at most `LISTED_NODES`, by name."""
    running: Count = 0
    """Number of the check that runs now; 0: none."""


class AwaitCheck(Message, frozen=True):
    """Long-poll for the next task of `incarnation` in its check, after `step`, or its report."""

    job: str
    incarnation: str
    after: Count = 0
    timeout_s: Seconds = 20.0


class CheckStep(Message, frozen=True):
    """A transfer with `peer` that ends within `within_s`, or the check's `report`. `step` 0: send the request again.

    `dials_first`: the receiver dials its peer before the peer dials it.
    """

    step: Count = 0
    round: Count = 0
    peer: CheckPeer | None = None
    dials_first: bool = False
    within_s: Seconds = 0.0
    report: CheckReport | None = None


class ReportTransfer(Message, frozen=True):
    """How this node's dial in `step` ended: `failed` says why there is no `speed`. Ignored if the step is over.

    The transfer succeeded if both nodes of the pair report a speed.
    """

    job: str
    incarnation: str
    step: Count
    speed: Speed | None = None
    round_trip_s: Seconds | None = None
    failed: ShortText = ""


class ShowCheck(Message, frozen=True):
    """The last check of a job, with all its nodes."""

    job: str


def speed_text(kind: MeasureKind | None, speed: float) -> str:
    """`speed` with a unit. `kind` None: a transfer between two nodes."""
    unit = "FLOP/s" if kind is MeasureKind.COMPUTE else "B/s"
    for prefix in ("", "k", "M", "G", "T"):
        if speed < 999.5:  # else three digits would be rounded to 1e+03
            return f"{speed:.3g} {prefix}{unit}"
        speed /= 1000
    return f"{speed:.3g} P{unit}"
