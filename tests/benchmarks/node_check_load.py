"""A node check of simulated nodes, event by event through the master's pure core: what it finds, and what it costs."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from dlrover_hooks import protocol as p
from dlrover_hooks.master.core import job_registry, views
from dlrover_hooks.master.core.effects import Deadline
from dlrover_hooks.master.core.events import Tick
from dlrover_hooks.master.core.heartbeats import Nodes
from dlrover_hooks.master.core.job_registry import Master
from tests.benchmarks.report import Figures

FLOPS, BANDWIDTH, DISK, NETWORK = 5e13, 2e10, 1e9, 3e9
TRANSFER_S = 30.0


class NodeFaults(msgspec.Struct, frozen=True):
    """What is wrong with a simulated node."""

    device: bool = False
    """A device fails its own measurement."""
    cut: bool = False
    """None of its transfers succeeds."""
    silent: bool = False
    """It is killed during its first transfer."""
    compute: float = 1.0
    network: float = 1.0
    """Factors of its speeds."""

    @property
    def verdict(self) -> p.NodeVerdict:
        """What the check has to find."""
        if self.device or self.cut or self.silent:
            return p.NodeVerdict.BAD
        return p.NodeVerdict.SLOW if min(self.compute, self.network) < 0.5 else p.NodeVerdict.OK


KINDS = (
    NodeFaults(device=True),
    NodeFaults(cut=True),
    NodeFaults(silent=True),
    NodeFaults(compute=0.3),
    NodeFaults(network=0.2),
)


class SimulatedCheck:
    """All nodes of one check, in virtual time, and the master's state. Speeds vary by some 5 %."""

    def __init__(self, faults: Mapping[str, NodeFaults], seed: int) -> None:
        self.faults, self.chance, self.state, self.now = faults, random.Random(seed), Master(), 1000.0
        self.deadline, self.events = float("inf"), 0

    def run(self) -> p.CheckReport:
        """The report with all nodes, once the check is over."""
        names = list(self.faults)
        self.chance.shuffle(names)
        for name in names:
            self.apply(self.join(name))
        steps = dict.fromkeys(names, 0)
        while (task := self.ask(names[0], steps[names[0]])) is None or task.report is None:
            self.now += 1.0
            for name in names:
                if (found := self.ask(name, steps[name])) is not None and found.peer is not None:
                    steps[name] = found.step
                    self.transfer(name, found)
            if self.now >= self.deadline:
                self.deadline = float("inf")
                self.apply(Tick("check"))
        return views.query(self.state, Nodes(), p.ShowCheck("check"))  # pyright: ignore[reportReturnType]

    def apply(self, event: p.Message) -> None:
        self.events += 1
        outcome = job_registry.apply(self.state, event, self.now)
        for effect in outcome.effects:
            if isinstance(effect, Deadline):
                self.deadline = effect.at

    def ask(self, name: str, after: int) -> Any:
        return views.query(self.state, Nodes(), p.AwaitCheck("check", f"life of {name}", after))

    def join(self, name: str) -> p.JoinCheck:
        faults, count = self.faults[name], len(self.faults)
        compute = p.Measure(p.MeasureKind.COMPUTE, "cuda:0", "GPU", self.about(FLOPS * faults.compute))
        if faults.device:
            compute = p.Measure(p.MeasureKind.COMPUTE, "cuda:0", "GPU", failed="the product is wrong")
        rest = [
            p.Measure(p.MeasureKind.MEMORY, "host", speed=self.about(BANDWIDTH)),
            p.Measure(p.MeasureKind.DISK_WRITE, "/tmp", speed=self.about(DISK)),
        ]
        return p.JoinCheck(
            "check", f"life of {name}", name, "10.0.0.1", 4711, p.Secret(name), count, count, 600.0, 2.0, TRANSFER_S,
            (compute, *rest),
        )  # fmt: skip

    def transfer(self, name: str, task: p.CheckStep) -> None:
        assert task.peer is not None
        mine, theirs = self.faults[name], self.faults[task.peer.node]
        if mine.silent:
            return
        works = not (mine.cut or theirs.cut or theirs.silent)
        self.apply(
            p.ReportTransfer(
                "check",
                f"life of {name}",
                task.step,
                speed=self.about(NETWORK * min(mine.network, theirs.network)) if works else None,
                round_trip_s=1e-4 if works else None,
                failed="" if works else f"{task.peer.node}: connection reset",
            )
        )

    def about(self, speed: float) -> float:
        return speed * self.chance.lognormvariate(0.0, 0.05)


def node_names(count: int) -> list[str]:
    """`node-0000` and so on."""
    return [f"node-{number:04d}" for number in range(count)]


def with_faults(count: int, faulty: int, seed: int) -> dict[str, NodeFaults]:
    """`count` nodes, `faulty` of them with a fault of each of `KINDS` in turn."""
    chance = random.Random(seed)
    faults = dict.fromkeys(node_names(count), NodeFaults())
    faults |= dict(zip(chance.sample(list(faults), faulty), itertools.cycle(KINDS), strict=False))
    return faults


def measure(rounds: int = 5, nodes: int = 1000, faulty: int = 50) -> Figures:
    """`check_1000_nodes_s`: seconds of CPU of the whole check, without time for measurements and transfers.

    The greatest of `rounds` seeds. The cost of the simulation is in it. Raises AssertionError for a wrong verdict.
    """
    spent: list[float] = []
    for seed in range(rounds):
        faults = with_faults(nodes, faulty, seed)
        began = time.process_time()
        report = SimulatedCheck(faults, seed).run()
        spent.append(time.process_time() - began)
        wrong = {one.node for one in report.nodes if one.verdict is not faults[one.node].verdict}
        assert not wrong, (seed, wrong)
    return {"check_1000_nodes_s": max(spent), "check_1000_nodes_rounds": float(rounds)}
