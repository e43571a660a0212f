"""What the function of a role sees: calls and queues of the other roles, over a transport in memory."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrover_hooks.errors import CallFailed, UsageError
from dlrover_hooks.job import call_codec, worker_context
from dlrover_hooks.job.local.socket_calls import CallClient, CallServer
from dlrover_hooks.job.worker_context import RoleHandle, WorkerContext, current_worker, enter
from tests.waiting import WAIT_S, until

LONG_S = 30.0
"""Longer than any test waits for something that comes."""
SIZES = {"trainer": 1, "server": 3}


class MemoryTransport:
    """Calls the contexts of this process; arguments and results go through bytes, as between processes."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.calls = list[tuple[str, int, str]]()
        self.before: Callable[[str], None] = lambda _: None
        """Called at each call with the name of the function."""
        self.workers = {(role, rank): self._worker(role, rank) for role in SIZES for rank in range(SIZES[role])}

    def _worker(self, role: str, rank: int) -> WorkerContext:
        return WorkerContext(
            "ppo", role, rank, 1, sizes=SIZES, config={"lr": 0.1}, transport=self, over=self.over
        )  # fmt: skip

    def call(self, role: str, rank: int, function: str, arguments: list[Any], timeout_s: float) -> Any:
        self.calls.append((role, rank, function))
        self.before(function)
        given = call_codec.decode(call_codec.encode(arguments))
        try:
            answer = self.workers[role, rank].answer(function, given, timeout_s)
        except CallFailed:
            raise
        except Exception as error:
            raise CallFailed(f"{type(error).__name__}: {error}") from None
        return call_codec.decode(call_codec.encode(answer))

    def ranks(self, function: str) -> list[int]:
        """The ranks that were called for `function`, in order."""
        return [rank for _, rank, called in self.calls if called == function]

    @property
    def servers(self) -> list[WorkerContext]:
        return [self.workers["server", rank] for rank in range(SIZES["server"])]


@pytest.fixture
def transport() -> MemoryTransport:
    return MemoryTransport()


@pytest.fixture
def servers(transport: MemoryTransport) -> RoleHandle:
    """As the trainer sees them."""
    return transport.workers["trainer", 0].role("server")


# ---- the own place ---------------------------------------------------------------------------------------------------


def test_a_worker_knows_its_place(transport: MemoryTransport) -> None:
    worker = transport.workers["server", 2]
    assert (worker.job, worker.role_name, worker.rank, worker.life) == ("ppo", "server", 2, 1)
    assert (worker.workers, worker.config, worker.restarted) == (3, {"lr": 0.1}, False)
    assert repr(worker) == "WorkerContext('ppo', role='server', rank=2, life=1)"


def test_the_current_worker_is_that_of_the_process(monkeypatch: pytest.MonkeyPatch, transport: MemoryTransport) -> None:
    monkeypatch.setattr(worker_context, "_current", [])
    with pytest.raises(UsageError, match="no worker of a job of several roles") as refused:
        current_worker()
    assert "DLJobBuilder().role(NAME).run(ENTRY)" in refused.value.hint
    enter(transport.workers["server", 1])
    assert current_worker() is transport.workers["server", 1]


def test_a_role_that_there_is_not_is_named_with_those_that_there_are(transport: MemoryTransport) -> None:
    with pytest.raises(UsageError, match=r"job 'ppo' has no role 'Server': it has \['server', 'trainer'\]"):
        transport.workers["trainer", 0].role("Server")


# ---- calls -----------------------------------------------------------------------------------------------------------


def test_calls_go_to_one_worker_after_the_other(transport: MemoryTransport, servers: RoleHandle) -> None:
    for server in transport.servers:
        server.export(rank=lambda server=server: server.rank)
    assert [servers.call("rank") for _ in range(5)] == [0, 1, 2, 0, 1]
    assert servers.call("rank", rank=1) == 1
    assert servers.call("rank") == 2, "a call of a given worker is not counted"


def test_arguments_and_results_are_values(transport: MemoryTransport, servers: RoleHandle) -> None:
    transport.servers[0].export(echo=lambda *values: values)
    array = np.arange(3)
    found = servers.call("echo", (1, "a"), {"k": array}, None, rank=0)
    assert found[0] == (1, "a")
    assert found[1]["k"].tolist() == [0, 1, 2]
    assert found[2] is None
    with pytest.raises(UsageError, match="cannot be sent to another worker"):
        servers.call("echo", object(), rank=0)


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_worker_that_there_is_not_cannot_be_called(servers: RoleHandle, rank: int) -> None:
    with pytest.raises(UsageError, match=f"role 'server' has workers 0 to 2, not {rank}"):
        servers.call("rank", rank=rank)


def test_what_a_function_raises_fails_the_call(transport: MemoryTransport, servers: RoleHandle) -> None:
    def fail() -> None:
        raise ValueError("no such prompt")

    for server in transport.servers:
        server.export(fail=fail if server.rank == 1 else lambda: "fine")
    with pytest.raises(CallFailed, match="ValueError: no such prompt"):
        servers.call("fail", rank=1)
    with pytest.raises(CallFailed, match="ValueError: no such prompt"):
        servers.broadcast("fail")


def test_a_broadcast_is_answered_by_all_workers_in_the_order_of_ranks(
    transport: MemoryTransport, servers: RoleHandle
) -> None:
    """They work at the same time: each waits for the others."""
    together = threading.Barrier(3)

    def work(server: WorkerContext, factor: int) -> int:
        together.wait(LONG_S)
        return factor * server.rank

    for server in transport.servers:
        server.export(work=lambda factor, server=server: work(server, factor))
    assert servers.broadcast("work", 10) == [0, 10, 20]
    assert sorted(transport.ranks("work")) == [0, 1, 2]


@pytest.mark.parametrize("call", ["broadcast", "shard"])
def test_the_first_failure_is_raised_while_other_workers_still_work(
    transport: MemoryTransport, servers: RoleHandle, call: str
) -> None:
    over, ended = threading.Event(), threading.Event()

    def work(server: WorkerContext) -> None:
        if server.rank == 1:
            raise ValueError("no such prompt")
        over.wait(LONG_S)
        ended.set()

    for server in transport.servers:
        server.export(work=lambda *_, server=server: work(server))
    with pytest.raises(CallFailed, match="ValueError: no such prompt"):
        servers.shard("work", [1, 2, 3]) if call == "shard" else servers.broadcast("work")
    assert not ended.is_set()
    over.set()
    assert ended.wait(LONG_S)


def test_abandoned_calls_do_not_keep_the_process() -> None:
    program = """
import threading
from dlrover_hooks.job.worker_context import RoleHandle

class Transport:
    def call(self, role, rank, function, arguments, timeout_s):
        if rank == 1:
            raise ValueError("no such prompt")
        threading.Event().wait()

RoleHandle("server", 3, Transport()).broadcast("work")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "ValueError: no such prompt")


@pytest.mark.parametrize(
    ("count", "parts"), [(0, {}), (1, {0: [0]}), (2, {0: [0], 1: [1]}), (3, {0: [0], 1: [1], 2: [2]}),
                         (5, {0: [0, 1], 1: [2, 3], 2: [4]}), (7, {0: [0, 1, 2], 1: [3, 4], 2: [5, 6]})],
)  # fmt: skip
def test_a_shard_gives_each_worker_an_equal_part(
    transport: MemoryTransport, servers: RoleHandle, count: int, parts: dict[int, list[int]]
) -> None:
    """A worker without a part is not called. The results are in the order of the items."""
    seen = dict[int, list[int]]()
    for server in transport.servers:

        def double(items: list[int], more: int, rank: int = server.rank) -> list[int]:
            seen[rank] = items
            return [2 * one + more for one in items]

        server.export(double=double)
    assert servers.shard("double", list(range(count)), 100) == [100 + 2 * one for one in range(count)]
    assert seen == parts
    assert sorted(transport.ranks("double")) == sorted(parts)


def test_a_shard_of_an_array_gives_parts_of_it(transport: MemoryTransport, servers: RoleHandle) -> None:
    for server in transport.servers:
        server.export(total=lambda rows: rows.sum(axis=1))
    rows: Any = np.arange(8).reshape(4, 2)
    assert servers.shard("total", rows) == rows.sum(axis=1).tolist()


def test_a_shard_needs_a_result_for_each_item(transport: MemoryTransport, servers: RoleHandle) -> None:
    for server in transport.servers:
        server.export(first=lambda items: items[:1])
    with pytest.raises(CallFailed, match=r"server\.first returned 3 results for 5 items"):
        servers.shard("first", list(range(5)))


# ---- the other side --------------------------------------------------------------------------------------------------


def test_an_answer_waits_for_an_export(transport: MemoryTransport) -> None:
    server = transport.servers[0]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.answer, "late", [2], LONG_S)
        server.export(other=lambda: None)
        assert not waiting.done()
        server.export(late=lambda value: value + 1)
        assert waiting.result(LONG_S) == 3


def test_a_function_that_is_never_exported_is_named_with_those_that_are(transport: MemoryTransport) -> None:
    server = transport.servers[1]
    server.export(score=len, generate=len)
    with pytest.raises(CallFailed) as failed:
        server.answer("gnerate", [], 0.0)
    assert failed.value.message == (
        "worker 1 of role 'server' has exported no function 'gnerate' within 0 s, only ['generate', 'score']"
    )
    assert "current_worker().serve(gnerate=...)" in failed.value.hint


def test_a_call_does_not_wait_for_a_function_once_the_worker_serves(transport: MemoryTransport) -> None:
    server = transport.servers[0]
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(server.answer, "gnerate", [], LONG_S)
        serving = pool.submit(server.serve, generate=len)
        with pytest.raises(CallFailed, match=r"has exported no function 'gnerate', only \['generate'\]"):
            waiting.result(LONG_S)
        transport.over.set()
        serving.result(LONG_S)


def test_a_call_of_no_function_fails_before_its_caller_gives_up(transport: MemoryTransport, tmp_path: Path) -> None:
    """So that the caller gets the reason, and not a TimeoutError."""
    server = CallServer(str(tmp_path / "socket"), transport.servers[0].answer)
    says = "has exported no function 'generate' within 3 s"
    with (
        contextlib.closing(server),
        contextlib.closing(CallClient(server.path)) as client,
        pytest.raises(CallFailed, match=says),
    ):
        client.call("generate", timeout_s=3.0)


def test_a_function_that_is_exported_again_replaces_the_other_one(transport: MemoryTransport) -> None:
    server = transport.servers[0]
    server.export(name=lambda: "old")
    server.export(name=lambda: "new")
    assert server.answer("name", [], 0.0) == "new"


def test_serving_ends_with_the_job(transport: MemoryTransport, servers: RoleHandle) -> None:
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(lambda: transport.servers[0].serve(ping=lambda: "pong"))
        assert servers.call("ping", rank=0, timeout_s=LONG_S) == "pong"
        assert not serving.done()
        transport.over.set()
        assert serving.result(LONG_S) is None


# ---- queues ----------------------------------------------------------------------------------------------------------


def test_a_queue_is_filled_and_emptied_from_both_sides_in_order(
    transport: MemoryTransport, servers: RoleHandle
) -> None:
    own = transport.servers[1].queue("prompts", 4)
    remote = servers.queue("prompts", rank=1)
    remote.put({"id": 1})
    own.put((2, "two"))
    remote.put(np.arange(2))
    assert len(remote) == own.qsize() == 3
    assert own.get_nowait() == {"id": 1}
    assert remote.get() == (2, "two")
    assert remote.get().tolist() == [0, 1]
    assert len(remote) == 0


def test_a_name_is_one_queue_of_one_worker(transport: MemoryTransport, servers: RoleHandle) -> None:
    first, second = transport.servers[0], transport.servers[1]
    assert first.queue("prompts") is first.queue("prompts")
    assert first.queue("answers") is not first.queue("prompts")
    second.queue("prompts")
    servers.queue("prompts").put(1)
    assert (first.queue("prompts").qsize(), second.queue("prompts").qsize()) == (1, 0)


def test_a_queue_without_room_for_an_item_is_refused(transport: MemoryTransport) -> None:
    for size in (0, -1):
        with pytest.raises(UsageError, match="a queue holds 1 item at least"):
            transport.servers[0].queue("prompts", size)


def test_a_put_into_a_full_queue_fails_after_its_timeout(transport: MemoryTransport, servers: RoleHandle) -> None:
    own = transport.servers[0].queue("prompts", 2)
    remote = servers.queue("prompts")
    remote.put(1)
    remote.put(2)
    with pytest.raises(CallFailed, match=r"no room in queue 'prompts' of server 0 within 0\.05 s"):
        remote.put(3, timeout_s=0.05)
    assert (own.get_nowait(), own.get_nowait(), own.empty()) == (1, 2, True)


def test_a_get_from_an_empty_queue_fails_after_its_timeout(transport: MemoryTransport, servers: RoleHandle) -> None:
    transport.servers[0].queue("prompts")
    with pytest.raises(CallFailed, match=r"no item in queue 'prompts' of server 0 within 0\.05 s"):
        servers.queue("prompts").get(timeout_s=0.05)


def test_a_put_waits_for_room(transport: MemoryTransport, servers: RoleHandle) -> None:
    own = transport.servers[0].queue("prompts", 1)
    own.put("first")
    called = threading.Event()
    transport.before = lambda function: called.set() if function == "queue_put" else None
    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(servers.queue("prompts").put, "second", LONG_S)
        assert called.wait(LONG_S)
        assert not putting.done()
        assert own.get_nowait() == "first"
        assert putting.result(LONG_S) is None
    assert own.get_nowait() == "second"


def test_a_get_waits_for_an_item(transport: MemoryTransport, servers: RoleHandle) -> None:
    own = transport.servers[0].queue("prompts")
    called = threading.Event()
    transport.before = lambda _: called.set()
    with ThreadPoolExecutor(1) as pool:
        getting = pool.submit(servers.queue("prompts").get, LONG_S)
        assert called.wait(LONG_S)
        assert not getting.done()
        own.put("item")
        assert getting.result(LONG_S) == "item"


def test_a_long_wait_is_split_into_calls(
    transport: MemoryTransport, servers: RoleHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a process that is gone is noticed, and the one that follows it is asked."""
    monkeypatch.setattr(worker_context, "_WAIT_S", 0.01)
    own = transport.servers[0].queue("prompts")

    def third(function: str) -> None:
        if len(transport.ranks(function)) == 3:
            own.put("item")

    transport.before = third
    assert servers.queue("prompts").get(timeout_s=LONG_S) == "item"
    assert transport.ranks("queue_get") == [0, 0, 0]


def test_a_queue_that_is_not_there_yet_is_waited_for_as_long_as_the_caller_says(
    transport: MemoryTransport, servers: RoleHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker may be restarted, and import for longer than one call lasts."""
    monkeypatch.setattr(worker_context, "_WAIT_S", 0.01)

    def third(function: str) -> None:
        if len(transport.ranks(function)) == 3:
            transport.servers[0].queue("prompts")

    transport.before = third
    servers.queue("prompts").put("item", timeout_s=LONG_S)
    assert transport.servers[0].queue("prompts").get_nowait() == "item"


def test_a_queue_that_there_is_not_is_named(servers: RoleHandle) -> None:
    with pytest.raises(CallFailed, match="queue 'promts'"):
        servers.queue("promts").get(timeout_s=0.05)


def test_what_is_there_at_once_needs_no_time(transport: MemoryTransport, servers: RoleHandle) -> None:
    own = transport.servers[0].queue("prompts", 1)
    own.put("item")
    assert servers.queue("prompts").get(timeout_s=0.0) == "item"
    with pytest.raises(CallFailed, match="no item"):
        servers.queue("prompts").get(timeout_s=0.0)


@pytest.mark.parametrize("name", ["queue_put", "queue_get", "queue_size"])
def test_a_function_with_a_name_of_queues_does_not_break_them(
    transport: MemoryTransport, servers: RoleHandle, name: str
) -> None:
    """It is refused, or it is another function than that of the queues."""
    server = transport.servers[0]
    server.queue("prompts")
    with contextlib.suppress(UsageError):
        server.export(**{name: lambda *_: 7})
    remote = servers.queue("prompts")
    remote.put("item", timeout_s=0.5)
    assert len(remote) == 1
    assert remote.get(timeout_s=0.5) == "item"


def test_only_few_operations_on_queues_wait_at_a_time(transport: MemoryTransport, servers: RoleHandle) -> None:
    """Each occupies a thread that serves calls. The caller of another one is told to ask again."""
    server = transport.servers[0]
    numbers = server.queue("numbers")

    def busy() -> bool:
        return server.answer("queue_get", ["numbers", 0.01], LONG_S) == (False, 0.1)

    with ThreadPoolExecutor(8) as pool:
        for name in ("numbers", "not open yet"):
            waiting = [pool.submit(servers.queue(name).get, LONG_S) for _ in range(8)]
            until(busy, "8 operations wait")
            for function, *arguments in (("queue_get", LONG_S), ("queue_size", LONG_S), ("queue_put", LONG_S, 1)):
                assert server.answer(function, ["other", *arguments], LONG_S) == (False, 0.1)
            assert server.answer("queue_size", ["numbers", LONG_S], LONG_S) == (True, 0), "it need not wait"
            if name == "numbers":
                for number in range(8):
                    assert server.answer("queue_put", ["numbers", LONG_S, number], LONG_S) == (True, None)
            else:
                opened = server.queue(name)
                for number in range(8):
                    opened.put(number)
            assert sorted(one.result(LONG_S) for one in waiting) == list(range(8))
    assert numbers.empty()
    assert not busy()


def test_callers_that_must_ask_again_are_all_served(transport: MemoryTransport, servers: RoleHandle) -> None:
    own, remote = transport.servers[0].queue("numbers"), servers.queue("numbers")
    with ThreadPoolExecutor(20) as pool:
        waiting = [pool.submit(remote.get, LONG_S) for _ in range(20)]
        until(lambda: len(transport.ranks("queue_get")) > 20, "some have asked again")
        for number in range(20):
            own.put(number)
        assert sorted(one.result(LONG_S) for one in waiting) == list(range(20))


def test_the_size_of_a_queue_that_there_is_not_is_an_error(
    servers: RoleHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_context, "_WAIT_S", 0.05)
    with pytest.raises(CallFailed, match=r"no such queue 'promts' of server 0 within 0\.05 s"):
        len(servers.queue("promts"))
