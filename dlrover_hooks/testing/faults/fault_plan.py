"""The fault plan: which fault hits which process, and when. Also its file format. Injects nothing itself.

    # one fault in a line: words and key=value; what follows # is a comment
    step=20 rank=1 kill
    step=30 rank=0 at=boundary stop seconds=3
    step=40 kill of=master

`at` is a moment of optimizer step `step`: `forward`, `backward` (mid-step, the default), `stepped` (the optimizer has
stepped, the step is not over yet), `boundary` (the step boundary: the step is over, the next one has not begun).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from random import Random

import msgspec

from dlrover_hooks.errors import UsageError


class Kind(str, Enum):
    """The kind of fault. `seconds` 0 means forever for STOP and HANG, and at once for CUT and CUT_PEERS."""

    KILL = "kill"
    """SIGKILL."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT after `seconds`: connections stay open, but the process does not respond."""
    EXCEPTION = "exception"
    """`InjectedFault` is raised on the training thread."""
    SLOW = "slow"
    """Each of `steps` steps takes `seconds` longer."""
    HANG = "hang"
    """A C call holds the interpreter's lock for `seconds`: no Python thread runs, and no heartbeats are sent."""
    SEGFAULT = "segfault"
    """SIGSEGV, by reading address 0."""
    CUT = "cut"
    """The connections to the master end, and new ones for `seconds`."""
    CUT_PEERS = "cut-peers"
    """As CUT, for all other TCP connections of the process, such as the process group's."""


class Moment(str, Enum):
    """Moments of an optimizer step, in order."""

    FORWARD = "forward"
    """Before the forward of a module that trains."""
    BACKWARD = "backward"
    """In the backward, while gradients are reduced."""
    STEPPED = "stepped"
    """The optimizer has stepped; the step is not over."""
    BOUNDARY = "boundary"
    """The step boundary: the step is entirely over."""


class Target(str, Enum):
    """The target process. The worker given by `rank` injects faults into the other targets, on its own node."""

    WORKER = "worker"
    MASTER = "master"
    KEEPER = "keeper"
    LAUNCHER = "launcher"
    """The launcher of that node. Everything it started ends with it, and it must be started again."""


_ORDER = {moment: number for number, moment in enumerate(Moment)}
_FROM_OUTSIDE = (Kind.KILL, Kind.STOP)


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault. It is injected once in a run, across restarts and rolled back steps too."""

    step: int
    """The optimizer step in which it is injected, from 1."""
    kind: Kind
    rank: int = 0
    """The global rank that it hits, or that injects it into its node's master, keeper or launcher."""
    at: Moment = Moment.BACKWARD
    of: Target = Target.WORKER
    seconds: float = 0.0
    """How long it lasts, see `Kind`."""
    steps: int = 1
    """How many steps SLOW slows down."""

    def __str__(self) -> str:
        """Formats the fault as a line of the file."""
        rest = {"at": self.at.value, "of": self.of.value, "seconds": f"{self.seconds:g}", "steps": str(self.steps)}
        usual = {"at": "backward", "of": "worker", "seconds": "0", "steps": "1"}
        more = [f"{name}={value}" for name, value in rest.items() if value != usual[name]]
        return " ".join([f"step={self.step} rank={self.rank} {self.kind.value}", *more])


def due(faults: Sequence[Fault], step: int, rank: int, at: Moment, struck: Collection[int]) -> list[int]:
    """The indices of the faults to inject into `rank` now.

    A missed moment is made up for at the next one: in a script without a forward, or if a step is not trained again
    after a restart.

    Args:
        struck: indices of faults that were injected already.
    """
    return [
        number
        for number, fault in enumerate(faults)
        if fault.rank == rank and (fault.step, _ORDER[fault.at]) <= (step, _ORDER[at]) and number not in struck
    ]


def parse(text: str, where: str = "faults") -> tuple[Fault, ...]:
    """The faults of a file's text. Raises UsageError that names the line."""
    lines = ((number, line.split("#")[0].split()) for number, line in enumerate(text.splitlines(), 1))
    return tuple(_parsed(words, f"{where}:{number}") for number, words in lines if words)


def _parsed(words: list[str], where: str) -> Fault:
    bare = [word for word in words if "=" not in word]
    values: dict[str, str] = dict(word.split("=", 1) for word in words if "=" in word)  # pyright: ignore[reportAssignmentType]
    try:
        if len(bare) != 1:
            raise msgspec.ValidationError(f"one word without = says what happens, here are {len(bare)}")
        fault = msgspec.convert(values | {"kind": bare[0]}, Fault, strict=False)
        if fault.of is not Target.WORKER and fault.kind not in _FROM_OUTSIDE:
            raise msgspec.ValidationError(f"of={fault.of.value}: another process can be killed or stopped only")
        if fault.step < 1 or fault.rank < 0 or fault.seconds < 0 or fault.steps < 1:
            raise msgspec.ValidationError("step and steps count from 1, rank and seconds from 0")
    except msgspec.ValidationError as error:
        kinds = ", ".join(kind.value for kind in Kind)
        hint = f"such as `step=20 rank=1 kill`, with one of: {kinds}"
        raise UsageError(f"{where}: {' '.join(words)!r}: {error}", hint=hint) from None
    return fault


def read(path: str | os.PathLike[str]) -> tuple[Fault, ...]:
    """The faults in a file. Raises UsageError if it cannot be read, or a line is invalid."""
    try:
        with open(path, encoding="utf-8") as file:
            return parse(file.read(), os.fspath(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the faults in {os.fspath(path)} cannot be read: {error}") from error


def written(faults: Iterable[Fault], comment: str = "") -> str:
    """The text of a file with `faults`."""
    return "".join([f"# {comment}\n"] * bool(comment) + [f"{fault}\n" for fault in faults])


MENU: tuple[tuple[Kind, Target], ...] = (
    *((kind, Target.WORKER) for kind in Kind),
    (Kind.KILL, Target.MASTER),
    (Kind.KILL, Target.KEEPER),
)
"""The faults that `random` chooses from."""
_SECONDS = {Kind.STOP: 1.5, Kind.HANG: 1.5, Kind.SLOW: 0.2, Kind.CUT: 1.0}


def random(
    seed: int | str, *, steps: int, world: int, count: int = 0, menu: Sequence[tuple[Kind, Target]] = MENU
) -> tuple[Fault, ...]:
    """Random faults: the same for the same arguments, in every process and version.

    Args:
        steps: length of the run. It is split into as many spans as there are faults; each is in its span's first half.
        count: number of faults from `menu`, taken in random order; 0: each once.

    Raises:
        UsageError: the run has too few steps for so many faults.
    """
    chance = Random(f"faults {seed}")
    wanted = [*menu] * -(-(count or len(menu)) // len(menu))
    chance.shuffle(wanted)
    wanted = wanted[: count or len(menu)]
    first, span = 3, (steps - 4) / max(len(wanted), 1)
    if span < 1:
        raise UsageError(f"{len(wanted)} faults in {steps} steps", hint=f"{len(wanted) + 4} steps are enough")
    return tuple(
        _drawn(chance, kind, of, int(first + span * (place + chance.random() / 2)), world)
        for place, (kind, of) in enumerate(wanted)
    )


def _drawn(chance: Random, kind: Kind, of: Target, step: int, world: int) -> Fault:
    seconds = round(_SECONDS.get(kind, 0.0) * chance.uniform(0.5, 1.5), 2)
    steps = chance.randrange(2, 5) if kind is Kind.SLOW else 1
    at = chance.choice(list(Moment))
    return Fault(step=step, kind=kind, rank=chance.randrange(world), at=at, of=of, seconds=seconds, steps=steps)
