"""Preemption, seen from one worker: a signal only sets a flag, and all ranks leave at the boundary of one step.

The reporter thread sends the flag to the master, which sends it to the other ranks. Each rank's reporter promises for
its training thread (`DepartureGate`) not to pass another step boundary without the master's approval. The master then
names the step after the last one that any rank has passed (`master/core/rounds/preemption_agreement.py`). No rank can
have passed that one, so the agreement is exact, whether or not ranks run in lock-step, and needs no collective. A
preempted rank leaves alone only if there is no agreement.
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
"""Exit code of a preempted process that is to be started again (EX_TEMPFAIL of sysexits.h)."""
AGREE = 0.5
"""Share of the remaining time that may pass until a step is agreed; the rest is for saving."""
_POLL_S = 2.0


class Preempted(SystemExit):
    """Raised on the training thread by a hook at a step boundary, after saving: the process ends with exit code 75.

    `reason`: the signal or notice; `step`: where all ranks left; `mine`: this worker's own node is preempted;
    `durable`: the step is at `save_to`; `left_s`: seconds until the node ends, as far as is known.
    """

    def __init__(self, reason: str, step: int, *, mine: bool, durable: bool, left_s: float) -> None:
        super().__init__(REQUEUE)
        self.reason, self.step, self.mine, self.durable, self.left_s = reason, step, mine, durable, left_s

    def __str__(self) -> str:
        saved = "durable" if self.durable else "whole in memory"
        return f"preempted ({self.reason}): left at step {self.step}, which is {saved}; start it again to go on"


class Passage(enum.Enum):
    """What a rank may do at a step boundary: pass it, leave there, or request approval first."""

    PASS = enum.auto()
    LEAVE = enum.auto()
    ASK = enum.auto()


class DepartureGate:
    """The step boundaries that this rank has passed, and the one where it leaves. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._passed = -1
        self._promised = False
        self._step: int | None = None

    def begin(self, step: int) -> None:
        """Training begins at the step boundary of `step`."""
        with self._lock:
            self._passed = step - 1

    @property
    def passed(self) -> int:
        """The last step boundary that was passed."""
        return self._passed

    def promise(self) -> int:
        """Pass no further step boundary without approval. Returns the last one passed; the same when repeated."""
        with self._lock:
            self._promised = self._step is None
            return self._passed

    def settle(self, step: int | None) -> None:
        """All ranks leave at `step`. None: there will be no agreement, the promise ends."""
        with self._lock:
            self._promised, self._step = False, step

    def at(self, step: int) -> Passage:
        """What the training thread may do at the step boundary of `step`, which it reaches for the first time."""
        with self._lock:
            if self._step is not None and step >= self._step:
                return Passage.LEAVE
            if self._promised:
                return Passage.ASK
            self._passed = step
            return Passage.PASS


class Preemption:
    """One worker's part in a preemption.

    Threads: a signal handler may call `flag`, the reporter thread calls `speak`, the training thread `leaves_at`.

    Args:
        grace_s: seconds from the signal until this process is killed.
    """

    def __init__(self, job: str, incarnation: str, node: str, grace_s: float) -> None:
        self.gate = DepartureGate()
        self.reason = ""
        self.mine = False
        """This worker or its node is preempted."""
        self._job, self._incarnation, self._node, self._grace_s = job, incarnation, node, grace_s
        self._deadline: float | None = None
        self._agree_by = 0.0
        self.alone = False
        """There was no agreement: this rank leaves by itself."""
        self._told = self._summoned = self._held = False
        self._answered: tuple[int, bool] | None = None
        self._pause = threading.Event()

    @property
    def left_s(self) -> float:
        """Seconds until the process is killed, or the first node ends. 0 if no rank is preempted."""
        return max(0.0, self._deadline - time.monotonic()) if self._deadline is not None else 0.0

    def flag(self, reason: str) -> None:
        """This worker is preempted. Only sets plain attributes."""
        if not self.mine:
            self.mine, self.reason = True, self.reason or reason
            self._bound(self._grace_s)

    def inherit(self, before: Preemption) -> None:
        """Take over from the previous round: if it broke before an agreement, this worker is still preempted."""
        self.gate.begin(before.gate.passed + 1)
        if before.mine:
            self.mine, self.reason = True, self.reason or before.reason
            self._deadline, self._agree_by = before._deadline, before._agree_by

    @property
    def overdue(self) -> bool:
        """This worker is preempted, and too little time is left to wait for others."""
        return self.mine and time.monotonic() > self._agree_by

    def summon(self, summoned: bool) -> None:
        """Record the flag in the last heartbeat's reply. It is False in a broken round and in the next one."""
        if summoned and not self._summoned and self._deadline is None:
            self._agree_by = time.monotonic() + AGREE * self._grace_s
        self._summoned = summoned

    def speak(self, call: Callable[[p.Message, str], p.Message | None]) -> None:
        """Send pending messages to the master. `call` returns None if the master is away; the next call tries again."""
        while (word := self.word()) is not None:
            reply = call(word, "preempt")
            if reply is None:
                return
            self.hear(word, reply)

    def word(self) -> p.Preempt | p.Hold | None:
        """The next message for the master. A `Hold` is a promise, binding from now on whether or not it arrives."""
        if self.mine and not self._told:
            return p.Preempt(self._job, self._incarnation, self._node, self.left_s, self.reason)
        if (self._summoned or self._told) and not (self._held or self.alone):
            return p.Hold(self._job, self._incarnation, self.gate.promise())
        return None

    def hear(self, word: p.Preempt | p.Hold, reply: p.Message) -> None:
        """Process the master's reply to `word`."""
        if isinstance(word, p.Preempt):
            self._told = True
        else:
            self._held = True
        self._hear(reply)

    def leaves_at(self, step: int, caller: Caller) -> bool:
        """Whether this rank leaves at the step boundary of `step`. Waits for a pending agreement.

        Repeated calls for the same step, within the step that follows it, return the same answer.
        """
        if self._answered is None or step > self._answered[0]:
            while (passage := self.gate.at(step)) is Passage.ASK:
                if time.monotonic() > self._agree_by:
                    self._give_up()
                else:
                    self._ask(caller)
            unheard = self.mine and self.overdue and not self._held
            self._answered = step, passage is Passage.LEAVE or self.alone or unheard
        return self._answered == (step, True)

    def stay(self) -> None:
        """This rank was to leave, but stays: no further promise in this round."""
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
            if self._deadline is None:  # the reply to this rank's promise, which contains the time, may arrive later
                self._bound(self._grace_s)
            self.gate.settle(reply.step)

    def _give_up(self) -> None:
        """No agreement: a preempted rank leaves alone."""
        self.gate.settle(None)
        self.alone, self._summoned, self._held = self.mine, False, False

    def _bound(self, left_s: float) -> None:
        now = time.monotonic()
        if self._deadline is None or now + left_s < self._deadline:
            self._deadline, self._agree_by = now + left_s, now + AGREE * left_s


def affordable(nbytes: int, bytes_per_s: float, left_s: float) -> bool:
    """Whether `nbytes` can become durable in `left_s`. `bytes_per_s`: measured; 0 if unknown, then True.

    A quarter of the writing time and two seconds are reserved for the MANIFEST, slower ranks, and shutting down.
    """
    spare_s = left_s - 2.0
    return spare_s > 0 and (bytes_per_s <= 0 or 1.25 * nbytes / bytes_per_s <= spare_s)


class Signals:
    """Signal handlers for `names`, installed from `take` to `give_back`. Main thread only; does nothing on others.

    A handler installed before is called, too, and may raise. In a forked child SIGTERM acts as if these handlers were
    not installed (`Process.terminate` must work). The other signals do nothing there: SLURM sends them to every process
    of a step.
    """

    def __init__(self, names: Iterable[str], flag: Callable[[str], object]) -> None:
        self.numbers = [signal.Signals[name] for name in names]
        self.flag = flag
        """Called with each signal's name; may be replaced while the handlers are installed."""
        self._pid = 0
        self._before: dict[int, Any] = {}

    def add(self, number: signal.Signals) -> None:
        """Add one, from the next `take` on; not if signals were turned off."""
        if self.numbers and number not in self.numbers:
            self.numbers.append(number)

    def owns(self, handler: object) -> bool:
        """Whether `handler` is this object's."""
        return handler == self._handle

    def take(self) -> None:
        """Install the handlers; also over those that other code has installed meanwhile."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._pid = os.getpid()
        for number in self.numbers:
            if not self.owns(before := signal.signal(number, self._handle)):
                self._before[number] = _living(before, number)

    def give_back(self) -> None:
        """Restore the earlier handlers, except where other code has replaced this one's. Idempotent."""
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
        elif before in (None, signal.SIG_DFL):  # a forked child, or other code restored this handler after `give_back`
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(signal.Signals(number))
        if callable(before):
            before(number, frame)


def _living(handler: Any, number: int) -> Any:
    """`handler`; if it is a `Signals` handler that has ended and was restored by other code, the one before it."""
    while isinstance(owner := getattr(handler, "__self__", None), Signals) and owner._pid == 0:
        handler = owner._before.get(number)
    return handler


def _settable(handler: Any) -> Any:
    """The default action for None: such a handler was not set from Python and cannot be restored."""
    return signal.SIG_DFL if handler is None else handler
