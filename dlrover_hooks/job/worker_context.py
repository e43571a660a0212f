"""What the function of a role sees: its place in the job, and the workers of other roles.

worker = current_worker()
answers = worker.role("rollout").shard("generate", prompts)     # each rollout worker answers its part
worker.serve(generate=generate)                                 # the other side; until the job is over
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from dlrover_hooks.errors import CallFailed, UsageError

CALL_S = 300.0
"""Default timeout of a call, a restart of the called worker included."""
_WAIT_S = 20.0
"""A blocking operation on a queue is split into calls of this length, so that a dead worker is noticed."""


class CallTransport(Protocol):
    """How calls reach a worker. Any thread."""

    def call(self, role: str, rank: int, function: str, arguments: list[Any], timeout_s: float) -> Any:
        """The result; sent again after a restart of the worker, so the function may run more than once.

        Raises CallFailed: the function raised, or there was no answer within `timeout_s`.
        """
        ...


class RoleHandle:
    """The workers of a role. Calls go to the current process of a worker: if it dies, to the one that follows it.

    A call whose process dies before its answer is sent again, so a function may run twice for one call: let it depend
    on its arguments only, or let it recognise a request that it has seen.
    """

    def __init__(self, name: str, workers: int, transport: CallTransport) -> None:
        self.name, self.workers = name, workers
        self._transport, self._next = transport, 0

    def call(self, function: str, *arguments: Any, rank: int | None = None, timeout_s: float = CALL_S) -> Any:
        """The result of one worker: of `rank`, or of one after the other.

        Raises:
            CallFailed: the function raised there, or there was no answer in time.
        """
        if rank is None:
            rank, self._next = self._next % self.workers, self._next + 1
        if not 0 <= rank < self.workers:
            raise UsageError(f"role {self.name!r} has workers 0 to {self.workers - 1}, not {rank}")
        return self._transport.call(self.name, rank, function, list(arguments), timeout_s)

    def broadcast(self, function: str, *arguments: Any, timeout_s: float = CALL_S) -> list[Any]:
        """The results of all workers, by rank. Raises CallFailed."""
        return self._all([(function, list(arguments))] * self.workers, timeout_s)

    def shard(self, function: str, items: Sequence[Any], *arguments: Any, timeout_s: float = CALL_S) -> list[Any]:
        """`function(part, *arguments)` of each worker with an equal part of `items`; the results, joined in order.

        The function returns one result for each item. Raises CallFailed.
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
        """The queue `name` of worker `rank`, see `WorkerContext.queue`."""
        return RemoteQueue(self, name, rank)

    def _all(self, calls: list[tuple[str, list[Any]]], timeout_s: float) -> list[Any]:
        with ThreadPoolExecutor(max(1, len(calls)), thread_name_prefix="dlrover-hooks-call") as pool:
            running = [
                pool.submit(self._transport.call, self.name, rank, function, arguments, timeout_s)
                for rank, (function, arguments) in enumerate(calls)
            ]
            return [one.result() for one in running]


class RemoteQueue:
    """A bounded queue in a worker of another role. It is lost with that worker's process, and begins empty again.

    A `put` whose answer is lost with the process is sent again. A `get` takes an item out before it is answered: if
    the caller dies then, the item is lost with it.
    """

    def __init__(self, role: RoleHandle, name: str, rank: int) -> None:
        self._role, self._name, self._rank = role, name, rank

    def put(self, item: Any, timeout_s: float = CALL_S) -> None:
        """Wait for room and put `item` in. Raises CallFailed if there is no room in time."""
        self._until("queue_put", timeout_s, item)

    def get(self, timeout_s: float = CALL_S) -> Any:
        """Wait for an item and take it out. Raises CallFailed if there is none in time."""
        return self._until("queue_get", timeout_s)

    def __len__(self) -> int:
        return int(self._role.call("queue_size", self._name, rank=self._rank))

    def _until(self, function: str, timeout_s: float, *arguments: Any) -> Any:
        deadline = time.monotonic() + timeout_s
        while True:
            left = max(0.0, deadline - time.monotonic())
            wait_s = min(left, _WAIT_S)
            done, value = self._role.call(
                function, self._name, wait_s, *arguments, rank=self._rank, timeout_s=left + _WAIT_S
            )
            if done:
                return value
            if time.monotonic() >= deadline:
                break
        what = "room" if function == "queue_put" else "item"
        raise CallFailed(f"no {what} in queue {self._name!r} of {self._role.name} {self._rank} within {timeout_s:g} s")


class WorkerContext:
    """This worker of a role.

    Attributes:
        job, role, rank: where it is. `rank` is of the role; RANK of a process group may differ after a recovery.
        workers: of the role.
        life: the number of this process; larger than that of the process before it with this rank.
        config: of the job.
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
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"WorkerContext({self.job!r}, role={self.role_name!r}, rank={self.rank}, life={self.life})"

    @property
    def restarted(self) -> bool:
        """Another process had this rank before."""
        return not self.first

    def role(self, name: str) -> RoleHandle:
        """The workers of a role. Raises UsageError."""
        if name not in self._sizes:
            raise UsageError(f"job {self.job!r} has no role {name!r}: it has {sorted(self._sizes)}")
        return RoleHandle(name, self._sizes[name], self._transport)

    def export(self, **functions: Callable[..., Any]) -> None:
        """Other roles may call these functions from now on, each call on a thread of its own."""
        if reserved := _OF_QUEUES & functions.keys():
            raise UsageError(f"export(): {sorted(reserved)} are functions of the queues", hint="Give another name.")
        with self._changed:
            self._functions.update(functions)
            self._changed.notify_all()

    def serve(self, **functions: Callable[..., Any]) -> None:
        """`export`, then wait until the job is over; this process is then ended."""
        self.export(**functions)
        self._over.wait()

    def queue(self, name: str, size: int = 64) -> queue.Queue[Any]:
        """A bounded queue in this worker, which other roles reach by `role(...).queue(name)`."""
        if size < 1:
            raise UsageError(f"queue({name!r}, size={size}): a queue holds 1 item at least")
        with self._changed:
            found = self._queues.setdefault(name, queue.Queue(size))
            self._changed.notify_all()
            return found

    # ---- calls of other workers -------------------------------------------------------------------------------------

    def answer(self, function: str, arguments: list[Any], within_s: float) -> Any:
        """Carry out a call of another worker. `within_s`: wait so long for a function that is not exported yet.

        Raises CallFailed, and what the function raises.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: function in self._functions, within_s):
                raise CallFailed(
                    f"worker {self.rank} of role {self.role_name!r} has exported no function {function!r} within "
                    f"{within_s:g} s, only {sorted(set(self._functions) - _OF_QUEUES)}",
                    hint=f"Call current_worker().serve({function}=...) or export() there.",
                )
            found = self._functions[function]
        return found(*arguments)

    def _queue_put(self, name: str, wait_s: float, item: Any) -> tuple[bool, None]:
        found = self._queue(name, wait_s)
        try:
            if found is not None:
                found.put(item, timeout=wait_s)
        except queue.Full:
            return False, None
        return found is not None, None

    def _queue_get(self, name: str, wait_s: float) -> tuple[bool, Any]:
        found = self._queue(name, wait_s)
        try:
            return (True, found.get(timeout=wait_s)) if found is not None else (False, None)
        except queue.Empty:
            return False, None

    def _queue_size(self, name: str) -> int:
        found = self._queue(name, _WAIT_S)
        if found is None:
            raise CallFailed(f"worker {self.rank} of role {self.role_name!r} has no queue {name!r}")
        return found.qsize()

    def _queue(self, name: str, within_s: float) -> queue.Queue[Any] | None:
        """None: it is not made `within_s`."""
        with self._changed:
            self._changed.wait_for(lambda: name in self._queues, within_s)
            return self._queues.get(name)


_OF_QUEUES = {"queue_put", "queue_get", "queue_size"}
_current: list[WorkerContext] = []


def current_worker() -> WorkerContext:
    """This process's place in its job. Raises UsageError outside of a job of several roles."""
    if not _current:
        raise UsageError(
            "current_worker(): this process is no worker of a job of several roles",
            hint="It is known in functions that a job runs: DLJobBuilder().role(NAME).run(ENTRY).",
        )
    return _current[-1]


def enter(context: WorkerContext) -> None:
    """Set what `current_worker` returns."""
    _current.append(context)
