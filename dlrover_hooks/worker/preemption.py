"""Preemption, seen from one worker: a signal only sets a flag, and all ranks leave at the boundary of one step.

The reporter thread sends the flag to the master, which sends it to the other ranks. Each rank's reporter promises for
its training thread (`DepartureGate`) not to pass another step boundary without the master's approval; the master names
the step after the last one that any rank has passed (`master/core/rounds/departure.py`). No rank can have passed that
one, so the agreement is exact, in lock-step and out of it, and no collective is used. Only where no agreement comes a
preempted rank leaves alone.
"""

from __future__ import annotations

import enum
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import MasterAway, MasterError

if TYPE_CHECKING:
    from dlrover_hooks.client import Caller

REQUEUE = p.REQUEUE
"""Exit code: preempted, start me again (EX_TEMPFAIL of sysexits.h)."""
AGREE = 0.5
"""This share of the time that is left may pass until a step is agreed; the rest is for saving."""
_POLL_S = 2.0


class Preempted(SystemExit):
    """Raised in the training thread, by a hook at a quiet point, when everything is saved: the process ends with 75.

    `reason`: what came; `step`: where all left; `mine`: this worker's own node goes; `durable`: the step is at
    `save_to`; `left_s`: seconds until the node goes, as far as is known.
    """

    def __init__(self, reason: str, step: int, *, mine: bool, durable: bool, left_s: float) -> None:
        super().__init__(REQUEUE)
        self.reason, self.step, self.mine, self.durable, self.left_s = reason, step, mine, durable, left_s

    def __str__(self) -> str:
        saved = "durable" if self.durable else "whole in memory"
        return f"preempted ({self.reason}): left at step {self.step}, which is {saved}; start it again to go on"


class Passage(enum.Enum):
    """What a rank may do at a quiet point: pass it, leave there, or ask first."""

    PASS = enum.auto()
    LEAVE = enum.auto()
    ASK = enum.auto()


class DepartureGate:
    """The quiet points that this rank has passed, and the one where it leaves. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._passed = -1
        self._promised = False
        self._step: int | None = None

    def begin(self, step: int) -> None:
        """Training begins at the quiet point of `step`."""
        with self._lock:
            self._passed = step - 1

    @property
    def passed(self) -> int:
        """The last quiet point that was passed."""
        return self._passed

    def promise(self) -> int:
        """From here on no quiet point is passed unasked. Returns the last one that was; the same when called again."""
        with self._lock:
            self._promised = self._step is None
            return self._passed

    def settle(self, step: int | None) -> None:
        """All leave at `step`. None: there will be no agreement, the promise is over."""
        with self._lock:
            self._promised, self._step = False, step

    def at(self, step: int) -> Passage:
        """The training thread is at the quiet point of `step`, for the first time."""
        with self._lock:
            if self._step is not None and step >= self._step:
                return Passage.LEAVE
            if self._promised:
                return Passage.ASK
            self._passed = step
            return Passage.PASS


class Preemption:
    """One worker's part. `flag` may be called by a signal handler, `speak` by the courier thread, `leaves_at` by the
    training thread.

    Args:
        grace_s: seconds from the signal until this process is killed.
    """

    def __init__(self, job: str, incarnation: str, node: str, grace_s: float) -> None:
        self.gate = DepartureGate()
        self.reason = ""
        self.mine = False
        """This worker itself was told to go, or its node."""
        self._job, self._incarnation, self._node, self._grace_s = job, incarnation, node, grace_s
        self._deadline: float | None = None
        self._agree_by = 0.0
        self.alone = False
        """There was no agreement."""
        self._told = self._summoned = self._held = False
        self._answered: tuple[int, bool] | None = None
        self._pause = threading.Event()

    @property
    def left_s(self) -> float:
        """Until the process is killed, or the first node goes. 0 if nobody is preempted."""
        return max(0.0, self._deadline - time.monotonic()) if self._deadline is not None else 0.0

    def flag(self, reason: str) -> None:
        """This worker is to go. Sets plain attributes only."""
        if not self.mine:
            self.mine, self.reason = True, self.reason or reason
            self._bound(self._grace_s)

    def inherit(self, before: Preemption) -> None:
        """Begin where the round before ended: if it broke ahead of an agreement, this worker still is to go."""
        self.gate.begin(before.gate.passed + 1)
        if before.mine:
            self.mine, self.reason = True, self.reason or before.reason
            self._deadline, self._agree_by = before._deadline, before._agree_by

    @property
    def overdue(self) -> bool:
        """It is to go, and too little time is left to wait for others."""
        return self.mine and time.monotonic() > self._agree_by

    def summon(self, summoned: bool) -> None:
        """What the last heartbeat said. A round that broke summons nobody, and so does the next one."""
        if summoned and not self._summoned and self._deadline is None:
            self._agree_by = time.monotonic() + AGREE * self._grace_s
        self._summoned = summoned

    def speak(self, call: Callable[[p.Message, str], p.Message | None]) -> None:
        """Tell the master what is new; `call` answers None if it is away: then this is tried again."""
        while (word := self.word()) is not None:
            reply = call(word, "preempt")
            if reply is None:
                return
            self.hear(word, reply)

    def word(self) -> p.Preempt | p.Hold | None:
        """What the master has to be told next. A `Hold` is a promise, kept from now on, heard or not."""
        if self.mine and not self._told:
            return p.Preempt(self._job, self._incarnation, self._node, self.left_s, self.reason)
        if (self._summoned or self._told) and not (self._held or self.alone):
            return p.Hold(self._job, self._incarnation, self.gate.promise())
        return None

    def hear(self, word: p.Preempt | p.Hold, reply: p.Message) -> None:
        """The master's answer to `word`."""
        if isinstance(word, p.Preempt):
            self._told = True
        else:
            self._held = True
        self._hear(reply)

    def leaves_at(self, step: int, caller: Caller) -> bool:
        """Does this rank leave at the quiet point of `step`? Waits for the agreement, if there is one to be awaited.

        Asked again for the same step, inside the step that follows it, the answer stays.
        """
        if self._answered is None or step > self._answered[0]:
            self._answered = step, self._leaves_at(step, caller)
        return self._answered == (step, True)

    def _leaves_at(self, step: int, caller: Caller) -> bool:
        while (passage := self.gate.at(step)) is Passage.ASK:
            if time.monotonic() > self._agree_by:
                self._give_up()
            else:
                self._ask(caller)
        unheard = self.mine and self.overdue and not self._held
        return passage is Passage.LEAVE or self.alone or unheard

    def stay(self) -> None:
        """This rank was to leave, and does not: it is not asked again in this round."""
        self.gate.settle(None)
        if self._answered is not None:
            self._answered = self._answered[0], False

    def _ask(self, caller: Caller) -> None:
        request = p.AwaitParting(self._job, self._incarnation, timeout_s=_POLL_S)
        try:
            reply = caller.call(request, channel="parting", timeout_s=2 * _POLL_S, again=False)
        except MasterAway:
            self._pause.wait(0.1)
        except MasterError:  # the round went on without this rank
            self._give_up()
        else:
            self._hear(reply)

    def _hear(self, reply: p.Message | None) -> None:
        if not isinstance(reply, p.Parting) or reply.again:
            return
        if reply.round == 0:
            self._give_up()
            return
        self.reason = self.reason or reply.reason
        self.mine = self.mine or self._node in reply.nodes
        self._told = self._told or self.mine
        if reply.left_s:
            self._bound(reply.left_s)
        if reply.step is not None:
            self.gate.settle(reply.step)

    def _give_up(self) -> None:
        """No agreement: whoever is to go goes alone."""
        self.gate.settle(None)
        self.alone, self._summoned, self._held = self.mine, False, False

    def _bound(self, left_s: float) -> None:
        now = time.monotonic()
        if self._deadline is None or now + left_s < self._deadline:
            self._deadline, self._agree_by = now + left_s, now + AGREE * left_s


def affordable(nbytes: int, bytes_per_s: float, left_s: float) -> bool:
    """Can `nbytes` become durable in `left_s`? `bytes_per_s`: as measured, 0 if not known, then it is tried.

    A quarter and two seconds are kept for the MANIFEST, slower ranks, and the way out.
    """
    spare_s = left_s - 2.0
    return spare_s > 0 and (bytes_per_s <= 0 or 1.25 * nbytes / bytes_per_s <= spare_s)


class Signals:
    """Our handlers for `names`, from `take` to `give_back`; main thread only, elsewhere nothing is done.

    A handler that was there before is called, too: what it raises is its own. In a forked child SIGTERM is as if we
    were not there (`Process.terminate` must work), and the others do nothing: SLURM sends them to all of a step.
    """

    def __init__(self, names: Iterable[str], flag: Callable[[str], object]) -> None:
        self.numbers = [signal.Signals[name] for name in names]
        self.flag = flag
        """Told of each that comes; to be replaced while they are in place."""
        self._pid = 0
        self._before: dict[int, Any] = {}

    def add(self, number: signal.Signals) -> None:
        """One more, from the next `take` on; none if signals were turned off."""
        if self.numbers and number not in self.numbers:
            self.numbers.append(number)

    def owns(self, handler: object) -> bool:
        """Is it ours?"""
        return handler == self._handle

    def take(self) -> None:
        """Put them in place; again where somebody else has put theirs over them meanwhile."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._pid = os.getpid()
        for number in self.numbers:
            if not self.owns(before := signal.signal(number, self._handle)):
                self._before[number] = _living(before, number)

    def give_back(self) -> None:
        """Put back what was there, unless somebody else has put theirs over ours. Idempotent."""
        if self._pid == os.getpid() and threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, _settable(handler))
        self._pid = 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number)
        if self._pid == os.getpid():
            self.flag(signal.Signals(number).name)
        elif self._pid and number != signal.SIGTERM:
            return
        elif before in (None, signal.SIG_DFL):  # a forked child, or somebody put ours back after our end
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(signal.Signals(number))
        if callable(before):
            before(number, frame)


def _living(handler: Any, number: int) -> Any:
    """`handler`, or what was before it if it is one of ours that has ended and that somebody put back."""
    while isinstance(owner := getattr(handler, "__self__", None), Signals) and owner._pid == 0:
        handler = owner._before.get(number)
    return handler


def _settable(handler: Any) -> Any:
    """None: it was not set from Python, and cannot be set again."""
    return signal.SIG_DFL if handler is None else handler
