"""`current_worker` tells the function of a role which worker it runs in, and lets it call workers of other roles.

worker = current_worker()
answers = worker.role("rollout").shard("generate", prompts)     # each rollout worker answers its part
worker.serve(generate=generate)                                 # in a rollout worker: blocks until the job is over
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from dlrover_hooks.errors import CallFailed, UsageError
from dlrover_hooks.host.background_thread import BackgroundThread

CALL_S = 300.0
"""Default timeout of a call in seconds, including a restart of the called worker."""
_WAIT_S = 20.0
"""A blocking operation on a queue is split into calls of at most this many seconds, to notice a dead worker."""
_MOST_WAITING, _ASK_AGAIN_S = 8, 0.1
"""At most this many operations on queues wait in a worker at a time, because each occupies a thread that serves calls.
The callers of others are told to ask again after this many seconds."""
_EARLY_S = 0.5
"""A call of a function that is not exported fails this long before its caller's timeout, so that the caller learns the
reason."""


class CallTransport(Protocol):
    """Sends calls to workers. Any thread."""

    def call(self, role: str, rank: int, function: str, arguments: list[Any], timeout_s: float) -> Any:
        """Call a function of a worker and return its result.

        The call is sent again after a restart of the worker, so the function may run more than once.

        Raises CallFailed: the function raised, or there was no answer within `timeout_s` seconds.
        """
        ...


class RoleHandle:
    """The workers of a role, for calls from other workers.

    A call goes to the current process of a worker. If that process dies before it answers, the call is sent to the
    next process, so a function may run twice for one call. Let its result depend on the arguments only, or let it
    recognise repeated requests. Any thread.
    """

    def __init__(self, name: str, workers: int, transport: CallTransport) -> None:
        self.name, self.workers = name, workers
        self._transport, self._next = transport, 0

    def call(self, function: str, *arguments: Any, rank: int | None = None, timeout_s: float = CALL_S) -> Any:
        """Call a function of one worker and return its result.

        Args:
            function: the name under which the worker exports it.
            arguments: see `dlrover_hooks.job.call_codec` for the types that can be sent.
            rank: which worker; None: the next one in turn.
            timeout_s: seconds, including a restart of the worker.

        Raises:
            CallFailed: the function raised, or there was no answer in time.
            UsageError: there is no such rank, or an argument cannot be sent.
        """
        if rank is None:
            rank, self._next = self._next % self.workers, self._next + 1
        if not 0 <= rank < self.workers:
            raise UsageError(f"role {self.name!r} has workers 0 to {self.workers - 1}, not {rank}")
        return self._transport.call(self.name, rank, function, list(arguments), timeout_s)

    def broadcast(self, function: str, *arguments: Any, timeout_s: float = CALL_S) -> list[Any]:
        """Call a function of all workers in parallel and return the results by rank.

        Raises as `call` does, as soon as the first call fails. The other calls are abandoned: their functions may still
        run, and their results are ignored.
        """
        return self._all([(function, list(arguments))] * self.workers, timeout_s)

    def shard(self, function: str, items: Sequence[Any], *arguments: Any, timeout_s: float = CALL_S) -> list[Any]:
        """Call `function(part, *arguments)` of each worker with a part of `items` and return the joined results.

        Parts are consecutive, and their sizes differ by at most 1. The function must return one result for each item.
        Raises as `broadcast` does, and CallFailed for a wrong number of results.
        """
        size, more = divmod(len(items), self.workers)
        bounds = [rank * size + min(rank, more) for rank in range(self.workers + 1)]
        parts = [items[bounds[rank] : bounds[rank + 1]] for rank in range(self.workers)]
        results = self._all([(function, [part, *arguments]) for part in parts if len(part)], timeout_s)
        joined = [one for result in results for one in result]
        if len(joined) != len(items):
            raise CallFailed(f"{self.name}.{function} returned {len(joined)} results for {len(items)} items")
        return joined

    def queue(self, name: str, rank: int = 0) -> RemoteQueue:
        """The queue that worker `rank` opened with `WorkerContext.queue(name)`."""
        return RemoteQueue(self, name, rank)

    def _all(self, calls: list[tuple[str, list[Any]]], timeout_s: float) -> list[Any]:
        if len(calls) == 1:
            function, arguments = calls[0]
            return [self._transport.call(self.name, 0, function, arguments, timeout_s)]
        ends: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()

        def end(rank: int, function: str, arguments: list[Any]) -> None:
            try:
                ends.put((rank, self._transport.call(self.name, rank, function, arguments, timeout_s), None))
            except BaseException as error:  # raised by `_all` on the calling thread
                ends.put((rank, None, error))

        for rank, (function, arguments) in enumerate(calls):
            run = partial(end, rank, function, arguments)
            BackgroundThread("dlrover-hooks-call", run, where=f"{function} of {self.name} {rank}").start()
        results: list[Any] = [None] * len(calls)
        for _ in calls:
            rank, results[rank], error = ends.get()
            if error is not None:
                raise error
        return results


class RemoteQueue:
    """A bounded queue in a worker of another role. If that worker's process ends, its items are lost.

    If the process dies before it answers a `put`, the item is sent again to the next process. A `get` removes the item
    before it answers: if the caller dies at that moment, the item is lost.
    """

    def __init__(self, role: RoleHandle, name: str, rank: int) -> None:
        self._role, self._name, self._rank = role, name, rank

    def put(self, item: Any, timeout_s: float = CALL_S) -> None:
        """Wait for room and append `item`. Raises CallFailed if there is no room within `timeout_s` seconds."""
        self._until("queue_put", timeout_s, item)

    def get(self, timeout_s: float = CALL_S) -> Any:
        """Wait for an item, remove and return it. Raises CallFailed if there is none within `timeout_s` seconds."""
        return self._until("queue_get", timeout_s)

    def __len__(self) -> int:
        return int(self._until("queue_size", _WAIT_S))

    def _until(self, function: str, timeout_s: float, *arguments: Any) -> Any:
        deadline = time.monotonic() + timeout_s
        while True:
            left = max(0.0, deadline - time.monotonic())
            done, value = self._role.call(
                function, self._name, min(left, _WAIT_S), *arguments, rank=self._rank, timeout_s=left + _WAIT_S
            )
            if done:
                return value
            if (left := deadline - time.monotonic()) <= 0:
                break
            threading.Event().wait(min(value, left))
        what = {"queue_put": "room in", "queue_get": "item in", "queue_size": "such"}[function]
        raise CallFailed(f"no {what} queue {self._name!r} of {self._role.name} {self._rank} within {timeout_s:g} s")


class WorkerContext:
    """The worker that runs in this process. Any thread.

    Attributes:
        job: name of the job.
        role_name: name of its role.
        rank: rank in the role. RANK of a process group may differ from it after a recovery.
        workers: number of workers of the role.
        life: number of this process; larger than that of any earlier process with this rank.
        config: settings of the job, see `DLJobBuilder.config`.
    """

    def __init__(
        self,
        job: str,
        role: str,
        rank: int,
        life: int,
        *,
        sizes: dict[str, int],
        config: dict[str, Any],
        transport: CallTransport,
        over: threading.Event,
    ) -> None:
        self.job, self.role_name, self.rank, self.life = job, role, rank, life
        self.workers, self.config = sizes[role], config
        self.first = life == 1
        self._sizes, self._transport, self._over = sizes, transport, over
        self._functions: dict[str, Callable[..., Any]] = {
            "queue_put": self._queue_put, "queue_get": self._queue_get, "queue_size": self._queue_size,
        }  # fmt: skip
        self._queues = dict[str, queue.Queue[Any]]()
        self._may_wait = threading.BoundedSemaphore(_MOST_WAITING)
        self._serves = False
        """`serve` was called, so no more functions will be exported."""
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"WorkerContext({self.job!r}, role={self.role_name!r}, rank={self.rank}, life={self.life})"

    @property
    def restarted(self) -> bool:
        """Whether this rank had an earlier life since the job was submitted."""
        return not self.first

    def role(self, name: str) -> RoleHandle:
        """The workers of a role. Raises UsageError if the job has no such role."""
        if name not in self._sizes:
            raise UsageError(f"job {self.job!r} has no role {name!r}: it has {sorted(self._sizes)}")
        return RoleHandle(name, self._sizes[name], self._transport)

    def export(self, **functions: Callable[..., Any]) -> None:
        """Let other workers call these functions by name. Calls run on other threads, several at the same time.

        Raises UsageError for the names that queues use: `queue_put`, `queue_get` and `queue_size`.
        """
        if reserved := _OF_QUEUES & functions.keys():
            raise UsageError(f"export(): {sorted(reserved)} are functions of the queues", hint="Give another name.")
        with self._changed:
            self._functions.update(functions)
            self._changed.notify_all()

    def serve(self, **functions: Callable[..., Any]) -> None:
        """`export` the functions, then block until the job is over. Raises as `export` does.

        Calls of functions that are not exported wait for an `export` until `serve` is called, and fail afterwards.
        """
        self.export(**functions)
        with self._changed:
            self._serves = True
            self._changed.notify_all()
        self._over.wait()

    def queue(self, name: str, size: int = 64) -> queue.Queue[Any]:
        """Open a queue of at most `size` items in this worker, or return the one that it opened with this name.

        Other workers use it by `role(...).queue(name)`. Raises UsageError for a size below 1.
        """
        if size < 1:
            raise UsageError(f"queue({name!r}, size={size}): a queue holds 1 item at least")
        with self._changed:
            found = self._queues.setdefault(name, queue.Queue(size))
            self._changed.notify_all()
            return found

    # ---- calls of other workers -------------------------------------------------------------------------------------

    def answer(self, function: str, arguments: list[Any], within_s: float) -> Any:
        """Run a call of another worker. `within_s`: how many seconds the caller still waits for the answer.

        Raises CallFailed if the function is not exported in time, and what the function raises.
        """
        with self._changed:
            wait_s = within_s - min(_EARLY_S, within_s / 10)
            self._changed.wait_for(lambda: function in self._functions or self._serves, wait_s)
            if function not in self._functions:
                late = "" if self._serves else f" within {round(within_s, 1):g} s"
                raise CallFailed(
                    f"worker {self.rank} of role {self.role_name!r} has exported no function {function!r}{late}, only "
                    f"{sorted(set(self._functions) - _OF_QUEUES)}",
                    hint=f"Call current_worker().serve({function}=...) or export() there.",
                )
            found = self._functions[function]
        return found(*arguments)

    def _queue_put(self, name: str, wait_s: float, item: Any) -> tuple[bool, Any]:
        return self._on_queue(name, wait_s, lambda found, left_s: found.put(item, timeout=left_s))

    def _queue_get(self, name: str, wait_s: float) -> tuple[bool, Any]:
        return self._on_queue(name, wait_s, lambda found, left_s: found.get(timeout=left_s))

    def _queue_size(self, name: str, wait_s: float) -> tuple[bool, Any]:
        return self._on_queue(name, wait_s, lambda found, _: found.qsize())

    def _on_queue(
        self, name: str, wait_s: float, operation: Callable[[queue.Queue[Any], float], Any]
    ) -> tuple[bool, Any]:
        """True and the result of an operation; or False, and after how many seconds the caller may ask again.

        It is False if the queue is not open, or has no room or item, within `wait_s` seconds, and at once if too many
        operations wait already.
        """
        deadline = time.monotonic() + wait_s
        with contextlib.suppress(queue.Full, queue.Empty):
            if (found := self._queues.get(name)) is not None:
                return True, operation(found, 0.0)
        if wait_s <= 0 or not self._may_wait.acquire(blocking=False):
            return False, _ASK_AGAIN_S
        try:
            with self._changed:
                self._changed.wait_for(lambda: name in self._queues, wait_s)
                found = self._queues.get(name)
            if found is not None:
                return True, operation(found, max(0.0, deadline - time.monotonic()))
        except (queue.Full, queue.Empty):
            pass
        finally:
            self._may_wait.release()
        return False, 0.0


_OF_QUEUES = {"queue_put", "queue_get", "queue_size"}
_current: list[WorkerContext] = []


def current_worker() -> WorkerContext:
    """The worker that runs in this process. Raises UsageError outside a job of several roles."""
    if not _current:
        raise UsageError(
            "current_worker(): this process is no worker of a job of several roles",
            hint="Call it only in a function that a job runs: DLJobBuilder().role(NAME).run(ENTRY).",
        )
    return _current[-1]


def enter(context: WorkerContext) -> None:
    """Set what `current_worker` returns."""
    _current.append(context)
