"""Fault drills in a worker: injects faults, traces its steps, and ends it at a given step.

Configured by variables that are read when a session begins its steps. Unset variables cost nothing:

- DLROVER_HOOKS_FAULTS: a file of faults, see `dlrover_hooks.testing.faults.fault_plan`. Each is injected once in a
  run; injected ones are recorded beside it, in FILE.RUN.struck.
- DLROVER_HOOKS_TRACE: a folder for what each step did, see `dlrover_hooks.testing.faults.step_trace`.
- DLROVER_HOOKS_LAST_STEP: at the end of this step the worker leaves the job as done and `SystemExit(0)` is raised in
  its loop; the script's code after the loop is not run.

The session's methods are wrapped; `Session` itself has no code for this.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import HooksError, UsageError
from dlrover_hooks.host.fork_guard import ForkGuard
from dlrover_hooks.testing.faults import fault_plan as faults
from dlrover_hooks.testing.faults.fault_actions import FaultContext, InjectedFaults, strike
from dlrover_hooks.testing.faults.fault_plan import Fault, Kind, Moment
from dlrover_hooks.testing.faults.step_trace import Head, Trace

if TYPE_CHECKING:
    from dlrover_hooks.session import Session

log = logging.getLogger("dlrover_hooks.drill")


class Orders(msgspec.Struct, frozen=True):
    """The variables of this module, by name."""

    faults: str = ""
    trace: str = ""
    last_step: int = 0


def arm(session: Session, variables: Mapping[str, str]) -> None:
    """Apply `variables` to `session`, which is about to begin its steps. Training thread.

    Raises:
        UsageError: the faults cannot be read, or another variable is invalid.
    """
    try:
        orders = msgspec.convert(dict(variables), Orders, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"DLROVER_HOOKS_LAST_STEP={variables.get('last_step')!r}: {error}") from None
    if orders.last_step and not (orders.faults or orders.trace):
        raise UsageError(
            f"DLROVER_HOOKS_LAST_STEP={orders.last_step} would end this run there, as done: it is a drill's",
            hint="unset it; a drill also sets DLROVER_HOOKS_FAULTS or DLROVER_HOOKS_TRACE",
        )
    restored = session._restored
    begin = restored.generation.step if restored is not None and not restored.weights_only else 0
    _overhear(Drill(session, begin, orders))


class Drill:
    """The drill of one session. Training thread only, except for the effects of faults."""

    def __init__(self, session: Session, begin: int, orders: Orders) -> None:
        self._session, self._orders, self._here = session, orders, ForkGuard()
        self._rank = session.place.rank
        self._faults: tuple[Fault, ...] = faults.read(orders.faults) if orders.faults else ()
        self._struck = InjectedFaults(f"{orders.faults}.{session.run[:8]}.struck")
        self._around = FaultContext(session.config.job, session.place.node, session.config.master or "")
        self._trace = Trace(orders.trace, self._head(begin)) if orders.trace else None
        self._boundary_at, self.now = -1, begin + 1
        """`now`: the current step."""
        self._slow: list[float] = []
        self.hooked_at = -1
        """The step whose backward is hooked."""
        self._parameters: Callable[[], Iterable[Any]] = tuple
        self.losses: list[float] = []
        self._wrap()

    def _head(self, begin: int) -> Head:
        session = self._session
        return Head(
            job=session.config.job,
            run=session.run,
            rank=session.place.rank,
            world=session.place.world_size,
            attempt=session.attempt,
            begin=begin,
            pid=self._here.pid,
            at=time.time(),
        )

    def _wrap(self) -> None:
        """Wrap the session methods that show the loop's progress."""
        session = self._session
        stepped, requested, finish = session.stepped, session.batch_requested, session.finish
        among, leave = session.frozen_among, session.leave

        def on_step() -> None:
            stepped()
            self.meet(Moment.STEPPED)

        def on_request(step: int) -> bool:
            due = requested(step)
            self.boundary(step)
            return due

        def on_finish(step: int, state: Any) -> None:
            self.boundary(step)
            finish(step, state)

        def on_parameters(parameters: Callable[[], Iterable[Any]]) -> None:
            self._parameters = parameters
            among(parameters)

        def on_leave(reason: p.Departure, step: int = 0) -> None:
            _overhear(None)
            leave(reason, step)

        session.stepped, session.batch_requested, session.finish = on_step, on_request, on_finish
        session.frozen_among, session.leave = on_parameters, on_leave

    def boundary(self, step: int) -> None:
        """Step `step` is over. Only the first call per step counts: epoch starts and micro-batches repeat it.

        Raises:
            SystemExit: it was the last one.
        """
        if step == self._boundary_at or not self._here:
            return
        self._boundary_at = self.now = step
        if self._trace is not None:
            self._trace.step(step, self._parameters, self._session._data.parts(), self.losses)
        self.losses.clear()
        self.meet(Moment.BOUNDARY)
        if self._slow:
            time.sleep(self._slow.pop())
        if 0 < self._orders.last_step <= step:
            self._end(step)
        self.now = step + 1

    def expects(self, at: Moment) -> bool:
        """True if a fault is due here at moment `at`. It may have been injected into another session already."""
        return bool(self._here) and bool(faults.due(self._faults, self.now, self._rank, at, self._mine))

    def meet(self, at: Moment) -> None:
        """Moment `at` of the current step: inject the faults that are due."""
        if not self._here:
            return
        for number in faults.due(self._faults, self.now, self._rank, at, self._mine):
            self._mine.add(number)
            fault = self._faults[number]
            if self._struck.claim(number, fault, now=self.now, rank=self._rank):
                self._strike(fault)

    @property
    def _mine(self) -> set[int]:
        """Indices of faults that were injected before, or that this process has tried to claim."""
        return _KNOWN.setdefault(self._struck.path, set())

    def _strike(self, fault: Fault) -> None:
        log.warning("job %s rank %d: fault %s strikes in step %d", self._around.job, self._rank, fault, self.now)
        if fault.kind is Kind.SLOW:
            self._slow = [fault.seconds] * (fault.steps - 1)
            time.sleep(fault.seconds)
            return
        try:
            strike(fault, self._around)
        except HooksError as error:
            log.warning("job %s rank %d: fault %s: %s", self._around.job, self._rank, fault, error)

    def _end(self, step: int) -> None:
        log.info("job %s rank %d: the last step of this drill, %d, is over", self._around.job, self._rank, step)
        self._session.leave(p.Departure.DONE, step)
        raise SystemExit(0)


_KNOWN: dict[str, set[int]] = {}
"""By the file of injected faults of a run: the faults that this process has tried to claim, to avoid a second try."""


# ---- torch ----------------------------------------------------------------------------------------------------------


_drill: Drill | None = None
"""The drill that the hooks below report to. The hooks are installed once and stay."""
_hooked = False


def _overhear(drill: Drill | None) -> None:
    """Report forwards, backwards and losses to `drill` (None: to none), if torch is loaded."""
    global _drill, _hooked
    _drill = drill
    if _hooked or (torch := sys.modules.get("torch")) is None:
        return
    _hooked = True
    torch.nn.modules.module.register_module_forward_pre_hook(_before_forward)
    torch.nn.modules.module.register_module_forward_hook(_after_forward)
    plain = torch.Tensor.backward

    def backward(self: Any, *args: Any, **more: Any) -> None:
        if _drill is not None and self.numel() == 1:
            _drill.losses.append(self.item())
        plain(self, *args, **more)

    torch.Tensor.backward = backward


def _trains(module: Any) -> bool:
    return module.training and sys.modules["torch"].is_grad_enabled()


def _before_forward(module: Any, args: Any) -> None:
    if _drill is not None and _trains(module) and _drill.expects(Moment.FORWARD):
        _drill.meet(Moment.FORWARD)


def _after_forward(module: Any, args: Any, output: Any) -> None:
    """Hook the output of the first module that completes: backward reaches it last, while gradients are reduced."""
    if _drill is None or not _trains(module) or not _drill.expects(Moment.BACKWARD):
        return
    drill = _drill
    if drill.hooked_at != drill.now and getattr(output, "requires_grad", False):
        drill.hooked_at = drill.now
        output.register_hook(lambda _: drill.meet(Moment.BACKWARD))
