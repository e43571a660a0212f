"""`elastic_run`: runs a training function again in the same process when other workers are lost.

    @elastic_run
    def train():
        dist.init_process_group("gloo")
        ...                                # model, elastic_loader, AsyncCheckpointer: as in any script
    train()

When its round breaks, the function is left by an exception and called again in the same process, in the next round. The
environment then has another rank, world size and store. Python, torch, CUDA and the checkpoint memory stay as they are.
The objects that the function creates again restore themselves from the survivors' snapshots
(docs/concepts/recovery.md).
"""

from __future__ import annotations

import functools
import gc
import logging
import re
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar, overload

import msgspec
import torch.distributed as dist

from dlrover_hooks import config as settings, protocol as p, rng
from dlrover_hooks.config import Config, Place
from dlrover_hooks.elastic.process_groups import Groups
from dlrover_hooks.errors import HooksError, JobFinished, RoundEnded, UsageError
from dlrover_hooks.worker import surviving_process as regroup
from dlrover_hooks.worker.surviving_process import Membership

log = logging.getLogger("dlrover_hooks")
_SOURCE_LINE = re.compile(r"\[[^\]\s]+\.(?:cc|cpp|h|hpp):\d+\]\s*")

P = ParamSpec("P")
T = TypeVar("T")


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """One change of rounds, as passed to `on_recover` and `on_resize`.

    Times are seconds since this process noticed the fault, in chronological order.
    """

    reason: str
    """What broke the last round, or why it ended."""
    round: int
    """The number of the new round."""
    rank: int
    """Of this process in it."""
    world_size: int
    """Of the new round."""
    world_size_before: int
    """Of the last round."""
    step: int = 0
    """Training continues from here: the number of optimizer steps in the model."""
    destroyed_s: float = 0.0
    """The process groups of the last round were gone."""
    joined_s: float = 0.0
    """The new round had formed, with this process in it."""
    restored_s: float = 0.0
    """Model and data were those of `step` again."""


class RecoveryOptions(msgspec.Struct, frozen=True, kw_only=True):
    """See `elastic_run`."""

    max_recoveries: int = 5
    fault_s: float = 5.0
    rejoin_s: float = 900.0
    on_recover: Callable[[Recovery], object] | None = None
    on_resize: Callable[[Recovery], object] | None = None


@overload
def elastic_run(fn: Callable[P, T], /) -> Callable[P, T]: ...
@overload
def elastic_run(fn: None = None, /, **options: Any) -> Callable[[Callable[P, T]], Callable[P, T]]: ...
@overload
def elastic_run(fn: Callable[P, T], /, **options: Any) -> Callable[P, T]: ...


def elastic_run(fn: Callable[P, T] | None = None, /, **options: Any) -> Any:
    """Run `fn` again in the same process, in the next round, whenever its round ends before `fn` returns.

    A round ends when a member is lost (killed, hung, failed) or when new workers wait to join. An exception from `fn`
    is treated as the end of the round only if the master confirms it. Any other exception is raised unchanged, as are
    KeyboardInterrupt and SystemExit: this worker then fails, and the others continue without it. `sys.exit(0)` ends
    this worker as done.

    Args:
        fn: creates its process group, model, loader and checkpointer itself, and trains. Leave it out to use
            this as a decorator with options.
        max_recoveries: in a row without a step in between, 5 by default; then the fault is raised.
        fault_s: seconds to wait for the master's confirmation of an error that a lost peer may have caused (5).
        rejoin_s: seconds to wait for the next round (900).
        on_recover: called with a `Recovery` at the first step boundary of each round but the first.
        on_resize: called before it if the world size changed.

    If the other workers have finished the job meanwhile, this worker ends with SystemExit(0).

    Without a launcher or master that supports recovery by the process itself (plain `python`, torchrun), `fn` is called
    once without recovery.
    """
    chosen = msgspec.convert(options, RecoveryOptions) if not options else RecoveryOptions(**options)
    if fn is None:
        return lambda function: elastic_run(function, **options)
    function = fn

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        config, place = settings.load(), settings.place()
        if (reason := _why_not(config, place)) is not None:
            log.info("elastic_run: %s", reason)
            return function(*args, **kwargs)
        return RoundLoop(config, place, chosen).run(lambda: function(*args, **kwargs))

    return run


def _why_not(config: Config, place: Place) -> str | None:
    """Why this process cannot recover in process; None if it can."""
    if config.disable:
        return "DLROVER_HOOKS_DISABLE is set"
    if regroup.current() is not None:
        return "it is active already"
    if config.master is None or not (place.incarnation or place.max_workers):
        return "no launcher of ours has started this process: it ends with its round"
    return None


class RoundLoop:
    """One call of the decorated function: runs it once per round until it returns or fails."""

    def __init__(self, config: Config, place: Place, options: RecoveryOptions) -> None:
        self._options = options
        self._newcomer = not place.incarnation
        if self._newcomer:
            place = msgspec.structs.replace(place, incarnation=uuid.uuid4().hex)
        self._membership = Membership(config, place, lambda: self._groups.cut(), self._boundary)
        self._groups = Groups(self._check)
        self._hook = sys.excepthook
        self._in_a_row = 0
        self._random: dict[str, Any] | None = None
        """RNG state before the first call. If nothing is restored, later calls start from the same state."""
        self._world_size = place.world_size
        self._exits = False
        """True once the script has ended its process with exit code 0."""
        self._news: Recovery | None = None
        """The change of rounds in progress, if any."""
        self._noticed_at, self._restored_at_step = 0.0, -1

    def run(self, function: Callable[[], T]) -> T:
        """See `elastic_run`."""
        deactivate = regroup.activate(self._membership)
        gc.freeze()  # otherwise each recovery's collection would scan all imported modules, which takes a second
        try:
            if self._newcomer:
                self._world_size = self._membership.join(self._options.rejoin_s).world_size
            self._membership.watch()
            while True:
                done, result = self._live(function)
                if done:
                    _TRAINED.add(self._membership.config.job)
                    return result
                self._regroup()
        except JobFinished as over:  # a new worker joins a job that is already finished
            if self._membership.config.job in _TRAINED:
                raise UsageError(
                    f"{over.message}: this process has trained it itself, in a call before",
                    hint="a launch is one job: train it in one call (of `fit`, of the function under elastic_run), or "
                    "start a launch for each",
                ) from over
            log.warning("%s", over.message)
            raise SystemExit(0) from over
        finally:
            deactivate()
            gc.unfreeze()
            self._groups.stop()
            if not self._exits:
                self._membership.close()

    def _live(self, function: Callable[[], T]) -> tuple[bool, Any]:
        """(True, the function's result), or (False, None) if the round is over and the function may be called again."""
        self._groups, self._hook = Groups(self._check), sys.excepthook
        if self._membership.broken:
            self._groups.cut()
        if self._random is None:
            self._random = rng.capture()
        else:
            rng.restore(self._random)
        with self._groups.watched():
            try:
                return True, function()
            except SystemExit as end:
                self._exit(end)
                raise
            except KeyboardInterrupt:
                self._fail()
                raise
            except Exception as error:
                self._noticed_at = self._membership.left_at or time.monotonic()
                reason = self._judge(error)
                if reason is None:
                    self._fail()
                    raise
                log.debug("the round ended by", exc_info=error)
                self._end_life(error)
                self._news = Recovery(
                    reason=reason, round=0, rank=0, world_size=0, world_size_before=self._world_size,
                    destroyed_s=self._passed(),
                )  # fmt: skip
        return False, None

    def _judge(self, error: Exception) -> str | None:
        """The reason why the round is over; None if it is not, so that `error` is the user's."""
        membership = self._membership
        if membership.ended or membership.unsupported:
            return None
        if not membership.attached and not self._may_be_a_peers(error):  # may break before attaching
            return None
        if not isinstance(error, RoundEnded) or not membership.crowded:
            within_s = self._options.fault_s if self._may_be_a_peers(error) else 0.0
            if not membership.hears_break(within_s):
                return None
        self._in_a_row += 1
        if self._in_a_row > self._options.max_recoveries:
            log.error("%d recoveries in a row, and no step in between: giving up", self._options.max_recoveries)
            return None
        return _told(error)

    def _may_be_a_peers(self, error: BaseException) -> bool:
        """True if a lost peer may have caused `error`.

        torch raises RuntimeError when a connection ends; frameworks raise their own errors with that as the cause.
        """
        chain = list(_chain(error))
        if any(isinstance(one, HooksError | dist.DistError) for one in chain):
            return True
        return any(isinstance(one, RuntimeError | OSError) for one in chain) and not self._groups.connections.intact()

    def _fail(self) -> None:
        """Report to the master that this worker fails, before the error is shown."""
        if (session := self._membership.session) is not None:
            session.leave(p.Departure.FAILED)

    def _exit(self, end: SystemExit) -> None:
        """The script ends its process: with exit code 0 it is done, and its launcher will report that.

        The rank assignment is kept until then, because the other workers may not have reached their ends yet. With any
        other code this worker fails.
        """
        if end.code not in (None, 0):
            return self._fail()
        self._exits = True
        if (session := self._membership.session) is not None:
            session.parting.signals.give_back()

    def _end_life(self, error: BaseException) -> None:
        """Keep what the next call of the function needs, and release everything else that this call has created."""
        self._groups.cut()
        self._membership.end_life()
        self._groups.destroy()
        sys.excepthook = self._hook  # torch has installed its own hook, and would wrap it again in each round
        for forget in _BETWEEN_LIVES:
            forget()
        _clear(error)

    def _regroup(self) -> None:
        membership, news = self._membership, self._news
        assert news is not None
        if membership.holds_memory:  # reference cycles keep the model alive, and its memory is needed for the next one
            gc.collect()
        seated = membership.join(self._options.rejoin_s)
        membership.survives = True
        self._news = msgspec.structs.replace(
            news, round=seated.round, rank=seated.ranks[0], world_size=seated.world_size, joined_s=self._passed()
        )
        self._world_size, self._restored_at_step = seated.world_size, -1

    def _passed(self) -> float:
        return time.monotonic() - self._noticed_at

    # ---- step boundaries --------------------------------------------------------------------------------------------

    def _check(self) -> None:
        self._membership.check(step_ends=False)

    def _boundary(self, step: int) -> None:
        """Called by the adapter at each step boundary; `step` is the number of steps in the model."""
        news = self._news
        if news is None:
            self._in_a_row = 0
        elif self._restored_at_step < 0:
            self._restored_at_step = step
            self._news = news = msgspec.structs.replace(news, step=step, restored_s=self._passed())
            self._tell(news)
        elif step > self._restored_at_step:
            self._news, self._in_a_row = None, 0
            self._say(news)

    def _tell(self, news: Recovery) -> None:
        if self._options.on_resize is not None and news.world_size != news.world_size_before:
            self._options.on_resize(news)
        if self._options.on_recover is not None:
            self._options.on_recover(news)

    def _say(self, news: Recovery) -> None:
        log.warning(
            "job %s: recovered in round %d as rank %d of %d (before: %d workers) from step %d: destroyed after %.3f s, "
            "joined %.3f s, restored %.3f s, next step %.3f s; because %s",
            self._membership.config.job, news.round, news.rank, news.world_size, news.world_size_before, news.step,
            news.destroyed_s, news.joined_s, news.restored_s, self._passed(), news.reason,
        )  # fmt: skip


_TRAINED = set[str]()
"""Jobs that this process has trained to completion."""
_BETWEEN_LIVES: list[Callable[[], object]] = []


def between_lives(forget: Callable[[], None]) -> Callable[[], None]:
    """Register `forget` to be called between rounds, for frameworks that cache the rank and group in this process."""
    _BETWEEN_LIVES.append(forget)
    return forget


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _told(error: BaseException) -> str:
    """Type and first sentence, without the place in gloo's or torch's sources."""
    first_line = _SOURCE_LINE.sub("", str(error).partition("\n")[0])
    return ": ".join(filter(None, (type(error).__name__, first_line.partition(". ")[0][:200])))


def _clear(error: BaseException) -> None:
    """Clear the frames of `error`: they hold the model, the loaders' iterators and the process group."""
    for one in _chain(error):
        if one.__traceback__ is not None:
            traceback.clear_frames(one.__traceback__)
