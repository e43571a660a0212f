"""The failure detector of jobs of several roles. That of launchers and ranks: `test_agents`."""

from __future__ import annotations

import asyncio

import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.master.clock import Uptime
from dlrover_hooks.master.core import views
from dlrover_hooks.master.core.events import Lost
from dlrover_hooks.master.core.heartbeats import Nodes
from dlrover_hooks.master.failure_detector import Liveness
from tests.unit.master.role_world import REWARD, RoleWorld, actor


class Detector:
    """The failure detector over the state of a `RoleWorld`, with the time in its hands."""

    def __init__(self, world: RoleWorld) -> None:
        self.world, self.now = world, 0.0
        self.nodes, self.lost = Nodes(), list[str]()
        self.liveness = Liveness(
            self.nodes, lambda: world.state, self.inform, Uptime(lambda: self.now, 1e6), lambda: world.now
        )

    def inform(self, event: p.Message) -> None:
        assert isinstance(event, Lost)
        self.lost.append(event.incarnation)
        self.world.send(event)

    def beat(self, incarnation: str) -> None:
        request = p.Heartbeat("job", incarnation)
        assert isinstance(views.query(self.world.state, self.nodes, request), p.Beat)
        self.liveness.beat(request)

    def pass_time(self, after_s: float) -> None:
        self.now += after_s
        self.liveness._judge()

    @property
    def tracked(self) -> set[str]:
        return {incarnation for _, incarnation in self.nodes.pulses}


@pytest.mark.parametrize("watches", [False, True])
def test_a_registered_worker_that_sends_no_heartbeats_is_declared_dead(watches: bool) -> None:
    """Its sockets stay open if it was stopped between its first watch and its first heartbeat."""

    async def scenario() -> Detector:
        detector = Detector(world := RoleWorld(actor(), up=False))
        detector.nodes.open_lease_s = detector.nodes.lease_s  # as masters of roles have it
        detector.liveness.start()
        for rank in range(2):
            world.register(rank)
            detector.liveness.heard_of(p.RegisterWorker("job", f"actor:{rank}:1", "actor", rank, 1, "n"))
            if watches:
                detector.liveness.waits(p.Watch("job", f"actor:{rank}:1"), 20.0)
        assert detector.tracked == {"actor:0:1", "actor:1:1"}
        for _ in range(4):
            detector.beat("actor:1:1")
            detector.pass_time(4.0)
        detector.liveness.close()
        return detector

    detector = asyncio.run(scenario())
    assert detector.lost == ["actor:0:1"]
    assert detector.world.lives["actor"] == [2, 1]
    assert [(one.text, one.rank) for one in detector.world.show().events if one.kind == "lost"] == [("silent", 0)]


def test_a_master_that_was_restarted_expects_the_registered_workers() -> None:
    """Those that died meanwhile are found, and those of the past are not expected."""

    async def scenario() -> Detector:
        world = RoleWorld(actor(), REWARD)
        world.end(0)
        world.register(0)
        world.done(0, "reward")
        detector = Detector(world)
        detector.liveness.start()
        assert detector.tracked == {"actor:0:2", "actor:1:1"}
        detector.pass_time(5.0)
        detector.beat("actor:1:1")
        detector.pass_time(6.0)
        detector.liveness.close()
        return detector

    detector = asyncio.run(scenario())
    assert detector.lost == ["actor:0:2"]
    assert detector.world.used("worker", "actor") == 2


def test_silence_of_a_replaced_worker_or_after_the_end_does_not_matter() -> None:
    async def scenario(over: bool) -> Detector:
        detector = Detector(world := RoleWorld(actor()))
        detector.liveness.start()
        if over:
            world.stop()
        else:
            world.restart()
        detector.pass_time(100.0)
        detector.liveness.close()
        return detector

    for over in (False, True):
        detector = asyncio.run(scenario(over))
        assert detector.lost == []
        assert detector.world.used("worker", "actor") == 0


def test_who_waits_for_roles_is_not_tracked() -> None:
    """A SubMaster is its platform's to watch."""

    async def scenario() -> Detector:
        detector = Detector(RoleWorld(up=False))
        detector.liveness.start()
        request = p.AwaitRoles("job", "sub-master")
        detector.liveness.waits(request, 20.0)
        detector.liveness.waited(request, answered=False)
        detector.liveness.close()
        return detector

    assert asyncio.run(scenario()).tracked == set()
