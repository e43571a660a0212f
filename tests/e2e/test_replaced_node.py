"""Sessions on several nodes, a real master: a node that was lost with its keeper comes back out of its peer."""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlrover_hooks.checkpoint.ipc import keeper_messages
from dlrover_hooks.checkpoint.ipc.keeper_connection import KeeperLink
from dlrover_hooks.checkpoint.memory.segment import SharedSegment
from dlrover_hooks.errors import Corrupt
from dlrover_hooks.protocol import Held
from tests.e2e.life_process import LifeProcess
from tests.e2e.master_process import LiveMaster
from tests.waiting import until


class Worker(LifeProcess):
    """On a node of its own."""

    def __init__(self, house: House, node: str, rank: int, **given: Any) -> None:
        self.node, self.house = node, house
        given = {"job": house.job, "master": house.master.url, "token": house.master.token, "replicas": 1} | given
        super().__init__(**given | {"node": node, "rank": rank, "world_size": given.get("world_size", 2)})

    def lose(self) -> None:
        """The whole node: SIGKILL of the worker and of the keeper."""
        os.kill(self.house.keeper(self.node)[0], signal.SIGKILL)
        self.kill()


class House:
    """One job's workers at one master; leaves no process behind."""

    def __init__(self, master: LiveMaster) -> None:
        self.job, self.master = f"replaced-{uuid.uuid4().hex[:8]}", master
        self._stack = contextlib.ExitStack()

    def workers(self, *nodes: str, **given: Any) -> list[Worker]:
        made = [Worker(self, node, rank, world_size=len(nodes), **given) for rank, node in enumerate(nodes)]
        for worker in made:
            self._stack.callback(worker.kill)
        return made

    def keeper(self, node: str) -> tuple[int, tuple[Held, ...]]:
        """Its pid, and what it holds."""
        link = KeeperLink.connect(self.job, node, notify=lambda _: None, start=False)
        try:
            answer = link.call(lambda ref: keeper_messages.Inventory(ref=ref))[0]
            return answer.pid, answer.held
        finally:
            link.close()

    def replicated(self, node: str, step: int, home: str) -> None:
        def there() -> bool:
            return any((one.home, one.generation.step) == (home, step) for one in self.keeper(node)[1])

        until(there, f"step {step} of node {home} on node {node}")

    def flip(self, node: str, step: int) -> None:
        """One bit in each replica of that step there."""
        pid, held = self.keeper(node)
        segments: dict[int, SharedSegment] = {}
        for name in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{name}"
            with contextlib.suppress(OSError, ValueError, Corrupt):  # the latter: it is just being made
                if os.readlink(path).startswith("/memfd:dlrover-hooks-seat-"):
                    segments.setdefault(os.stat(path).st_ino, SharedSegment.attach(os.open(path, os.O_RDWR)))
        ranks = {one.rank for one in held if one.home}
        for shared in segments.values():
            for slot in shared.slots():
                if slot.generation is not None and slot.generation.step == step and slot.rank in ranks:
                    shared.view(slot.index, slot.image_bytes)[-5] ^= 8
            shared.close()

    def close(self) -> None:
        self._stack.close()
        for node in "abcd":
            with contextlib.suppress(Exception):
                os.kill(self.keeper_now(node), signal.SIGKILL)

    def keeper_now(self, node: str) -> int:
        link = KeeperLink.connect(self.job, node, notify=lambda _: None, start=False, deadline_s=0.0)
        with contextlib.closing(link):
            return link.call(lambda ref: keeper_messages.Inventory(ref=ref))[0].pid


@pytest.fixture
def house(live_master: LiveMaster, runtime: Path) -> Iterator[House]:
    made = House(live_master)
    yield made
    made.close()


def trained(house: House, workers: list[Worker], steps: int) -> list[dict[str, Any]]:
    """Each step whole in memory, and replicated by each node to the other."""
    told = [worker.hear() for worker in workers]
    for _ in range(steps):
        for worker in workers:
            told[workers.index(worker)] = worker.tell("step")
        for worker in workers:
            worker.tell("whole")
    names = [worker.node for worker in workers]
    for node, home in zip(names, names[1:] + names[:1], strict=True):
        house.replicated(node, told[0]["at"], home)
    return told


@pytest.mark.deep
def test_a_replaced_node_goes_on_where_it_was_lost(house: House) -> None:
    """No storage at all: node c takes b's place, rank 1, with its weights, data and random state, bit for bit."""
    a, b = house.workers("a", "b")
    before = trained(house, [a, b], 3)
    wanted = b.tell("draw")["answer"]
    b.lose()
    a.kill()
    first, second = house.workers("a", "c")
    for worker, old in ((first, before[0]), (second, before[1])):
        found = worker.hear()
        assert (found["source"], found["at"], found["place"]) == ("peer", 3, 3)
        assert (found["w"], found["own_rng"]) == (old["w"], True)
    assert second.tell("draw")["answer"] == wanted
    for _ in range(2):
        first.tell("step")
        second.tell("step")
        first.tell("whole")
    house.replicated("a", 5, "c")


@pytest.mark.deep
def test_a_damaged_replica_is_named_and_the_step_before_it_serves(house: House) -> None:
    a, b = house.workers("a", "b")
    trained(house, [a, b], 3)
    b.lose()
    a.kill()
    house.flip("a", 3)
    first, second = house.workers("a", "c")
    for worker in (first, second):
        found = worker.hear()
        assert (found["source"], found["at"], found["place"]) == ("peer", 2, 2)
    second.process.kill()
    log = second.process.communicate()[1]
    assert "step 3" in log
    assert "rank 1, of node b: chunk 0 from the keeper of node a" in log


@pytest.mark.deep
def test_a_smaller_world_restores_what_only_a_replica_holds(house: House) -> None:
    """Node b is not replaced: a goes on alone, from memory, since it holds all images."""
    a, b = house.workers("a", "b")
    before = trained(house, [a, b], 2)
    b.lose()
    a.kill()
    (alone,) = house.workers("a")
    found = alone.hear()
    assert (found["source"], found["at"], found["w"]) == ("memory", 2, before[0]["w"])


@pytest.mark.deep
def test_a_larger_world_fetches_for_a_node_that_holds_nothing(house: House) -> None:
    a, b = house.workers("a", "b")
    before = trained(house, [a, b], 2)
    a.kill()
    b.kill()
    for worker in house.workers("a", "b", "c"):
        found = worker.hear()
        assert (found["source"], found["at"], found["w"]) == ("peer", 2, before[0]["w"])


@pytest.mark.deep
def test_without_replicas_nothing_listens_and_nothing_is_held(house: House) -> None:
    a, b = house.workers("a", "b", replicas=0)
    for worker in (a, b):
        worker.hear()
    for _ in range(2):
        a.tell("step")
        b.tell("step")
        a.tell("whole")
    for node in "ab":
        pid, held = house.keeper(node)
        assert {one.home for one in held} == {""}
        sockets = Path(f"/proc/{pid}/net/tcp").read_text()
        inodes = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
        listening = [line.split()[9] for line in sockets.splitlines()[1:] if line.split()[3] == "0A"]
        assert not any(f"socket:[{inode}]" in inodes for inode in listening)
