"""Measures where a worker's steps spend their time: data, forward, backward, network, optimizer, checkpoint."""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from dlrover_hooks.protocol import StepPhases
from dlrover_hooks.worker.device_timeline import DeviceEvents, DeviceTimeline

WINDOW_S = 10.0
"""Least length of a window: long enough for the mean of noisy steps, and one message in ten heartbeats."""
WINDOW_STEPS = 20
"""Least steps in a window: `TRIMMED` then leaves out one of them at least."""
TRIMMED = 0.05
"""Share of the slowest steps that a mean leaves out: a pause in one of twenty steps, such as an evaluation or a garbage
collection, does not count. One slow worker of a DataLoader with up to 19 workers does: it delays more steps."""
MOST_STEPS = 4096
"""Kept until the window is read; older ones are dropped. 16 s of steps of 4 ms."""


class _Part(enum.IntEnum):
    DATA = 0
    FORWARD = 1
    BACKWARD = 2
    NETWORK = 3
    OPTIMIZER = 4
    CHECKPOINT = 5
    OTHER = 6


_PARTS = len(_Part)


class _Flags(msgspec.Struct, frozen=True):
    """What is known of a step. `apart`: its compute holds no waiting for other ranks. `forward`: its end was seen."""

    apart: bool
    forward: bool


class _Timed(msgspec.Struct, frozen=True):
    """Seconds of one step, in the order of `_Part`. If the end of its forward pass was not seen, BACKWARD has both."""

    seconds: list[float]
    seen: _Flags


class StepClock:
    """Each call ends a part of the step. The training thread makes them, and the backward pass calls
    `backward_ended`, in whichever thread it runs; `window` is called by one other thread.

    A step of one micro-batch makes up to ten calls, each further micro-batch some more. Each call of a Python function
    adds 2 us to the step, because the CPU's caches hold the step's own data by then. Therefore, most methods add up the
    time themselves.

    Args:
        now: seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._last = now, now()
        self._seconds, self._stepped, self._ends = [0.0] * _PARTS, False, 0
        self._apart, self._fetched, self._optimizes, self._begun, self._in_step = False, False, False, False, True
        self._forward = self._skipped = False
        self._steps: deque[_Timed] = deque(maxlen=MOST_STEPS)
        self._device: DeviceTimeline[_Flags] | None = None
        self._window_from: float | None = None
        self._micro_batches: Callable[[], tuple[int, int, bool]] = lambda: (0, 0, False)

    def count_micro_batches(self, counted: Callable[[], tuple[int, int, bool]]) -> None:
        """`counted` returns `micro_batches`, `total_micro_batches` and `rebalanced` of `StepPhases`, at each window."""
        self._micro_batches = counted

    def measure_on_device(self, events: DeviceEvents) -> None:
        """From now on the parts of a step are measured on a device that runs asynchronously to Python. Once."""
        if self._device is None:
            self._device = DeviceTimeline(events, _PARTS)

    def boundary(self) -> None:
        """The next batch is requested. After a step, that step is over."""
        now = self._now()
        within = self._fetched and not self._stepped  # a micro-batch is over; otherwise a step, or an epoch began
        self._skipped |= within and self._ends > 0
        part = _Part.BACKWARD if within else _Part.OTHER
        self._seconds[part] += now - self._last
        self._last = now
        if self._device is not None:
            self._device.mark(part)
        if not self._stepped:
            return
        seen = _Flags(self._apart and self._ends == 1, self._forward)
        complete = self._begun and self._fetched and self._optimizes  # there are adapters that do not make these calls
        complete = complete and not self._skipped  # a step that GradScaler left out, and the next one, end together
        if self._device is not None:
            self._device.end_step(seen, complete)
            self._steps.extend(_Timed(*one) for one in self._device.measured())
        elif complete:
            self._steps.append(_Timed(self._seconds, seen))
        self._stepped, self._ends, self._apart, self._fetched, self._optimizes = False, 0, False, False, False
        self._forward = self._skipped = False
        self._begun = True  # the first step may compile, or load libraries
        self._seconds = [0.0] * _PARTS

    def saved(self) -> None:
        """What is saved at this boundary is copied, or its copy has begun."""
        now = self._now()
        self._seconds[_Part.CHECKPOINT] += now - self._last
        self._last = now
        if self._device is not None:
            self._device.mark(_Part.CHECKPOINT)

    def fetched(self, in_step: bool = True) -> None:
        """A batch is handed out. `in_step`: see `StepPhases`."""
        now = self._now()
        self._seconds[_Part.DATA] += now - self._last
        self._last = now
        self._fetched, self._in_step = True, in_step
        if self._device is not None:
            self._device.mark(_Part.DATA)

    def forward_ended(self) -> None:
        """A forward pass of a micro-batch is over. Ignored outside of a step, such as in an evaluation."""
        if self._stepped or not self._fetched:
            return
        now = self._now()
        self._seconds[_Part.FORWARD] += now - self._last
        self._last, self._forward = now, True
        if self._device is not None:
            self._device.mark(_Part.FORWARD)

    def waits(self) -> None:
        """The forward pass begins to wait for other ranks. Ignored outside of a step, like the end of that wait."""
        self._within_forward(_Part.FORWARD)

    def waited(self) -> None:
        """The forward pass no longer waits for other ranks."""
        self._within_forward(_Part.NETWORK)

    def _within_forward(self, part: _Part) -> None:
        if self._stepped or not self._fetched:
            return
        now = self._now()
        self._seconds[part] += now - self._last
        self._last = now
        if self._device is not None:
            self._device.mark(part)

    def backward_ended(self) -> None:
        """This rank's gradients are all computed, and the last of them is about to be reduced."""
        now = self._now()
        self._seconds[_Part.BACKWARD] += now - self._last
        self._last = now
        self._ends += 1
        if self._device is not None:
            self._device.mark(_Part.BACKWARD)

    def optimizing(self, *_: object) -> None:
        """The optimizer begins its step: all gradients are reduced. May be its pre-hook; ignores the arguments."""
        now = self._now()
        part = _Part.NETWORK if self._ends else _Part.BACKWARD
        self._seconds[part] += now - self._last
        self._last = now
        self._apart, self._optimizes = self._ends == 1, True
        if self._device is not None:
            self._device.mark(part)

    def stepped(self) -> None:
        """The optimizer has made its step."""
        now = self._now()
        self._seconds[_Part.OPTIMIZER] += now - self._last
        self._last, self._stepped = now, True
        if self._device is not None:
            self._device.mark(_Part.OPTIMIZER)

    def window(self, step: int, now: float) -> StepPhases | None:
        """The window since the last one, once it is long enough. `step`: the last one made. `now`: monotonic."""
        if self._window_from is None:
            self._window_from = now
        if now - self._window_from < WINDOW_S or len(self._steps) < WINDOW_STEPS:
            return None
        taken = [self._steps.popleft() for _ in range(len(self._steps))]
        began, self._window_from = self._window_from, now
        mine, total, uneven = self._micro_batches()
        window = summary(taken, step, now - began, in_step=self._in_step)
        return msgspec.structs.replace(window, micro_batches=mine, total_micro_batches=total, rebalanced=uneven)


def summary(taken: list[_Timed], step: int, window_s: float, *, in_step: bool) -> StepPhases:
    """The means over the steps of a window, without the slowest. `taken`: at least one; `in_step`: see `StepPhases`."""
    parts = list(zip(*(one.seconds for one in taken), strict=True))
    apart, split = all(one.seen.apart for one in taken), all(one.seen.forward for one in taken)
    forward, network = _mean(parts[_Part.FORWARD]), _mean(parts[_Part.NETWORK])
    compute = _mean(map(sum, zip(parts[_Part.FORWARD], parts[_Part.BACKWARD], strict=True)))
    compute = compute if apart else compute + network
    return StepPhases(
        step=step,
        steps=len(taken),
        window_s=window_s,
        total_s=_mean(sum(one.seconds) for one in taken),
        data_s=_mean(parts[_Part.DATA]),
        compute_s=compute,
        optimizer_s=_mean(parts[_Part.OPTIMIZER]),
        checkpoint_s=sum(parts[_Part.CHECKPOINT]) / len(taken),  # few steps save: they count
        network_s=network if apart else None,
        in_step=in_step,
        forward_s=forward if split else None,
        backward_s=max(0.0, compute - forward) if split else None,
    )


def _mean(seconds: Iterable[float]) -> float:
    ordered = sorted(seconds)
    kept = ordered[: len(ordered) - max(1, int(TRIMMED * len(ordered)))] or ordered
    return max(0.0, sum(kept) / len(kept))
