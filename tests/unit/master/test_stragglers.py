"""The verdict on a rank that is slower than the others."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest

from dlrover_hooks.master.core import heartbeats, job_registry, stragglers
from dlrover_hooks.master.core.events import EndSlow, Reshare
from dlrover_hooks.master.core.heartbeats import LivenessLease, Nodes
from dlrover_hooks.protocol import StepPhase, StepPhases, StragglerPolicy
from dlrover_hooks.worker.step_clock import WINDOW_STEPS, StepClock
from tests.e2e.job_script import attach, join
from tests.simulated_gpu import SimulatedClock, SimulatedGpu

Extra = Callable[[int, int, StepPhase | None], float]
"""Additional seconds of (rank, step, phase); phase None: between the step and the next batch."""


class SimulatedJob:
    """Synchronous training in simulated time: real clocks of its ranks, and the real core of its master.

    Each rank's phases take their seconds with noise, and the gradients are there once the last rank is ready. On
    `gpus` Python only loads the data, and queues the rest.
    """

    def __init__(
        self, ranks: int, seed: int, extra: Extra, noise: float = 0.2, *, apart: bool = True, gpus: bool = False
    ) -> None:
        self.random, self.extra, self.noise, self.ranks, self.apart = random.Random(seed), extra, noise, ranks, apart
        self.state, self.nodes = job_registry.Master(), Nodes()
        job_registry.apply(self.state, join(count=ranks, low=ranks, high=ranks, lives="w"), 0.0)
        for rank in range(ranks):
            job_registry.apply(self.state, attach(f"w{rank}"), 0.0)
        self.times = [SimulatedClock() for _ in range(ranks)]
        self.clocks = [StepClock(now) for now in self.times]
        self.gpus = [SimulatedGpu(now) for now in self.times] if gpus else []
        for clock, gpu in zip(self.clocks, self.gpus, strict=False):
            clock.measure_on_device(gpu)
        self.said: list[str] = []
        self.ends: list[EndSlow | Reshare] = []
        self.policy = StragglerPolicy.REPORT
        self.step, self.beaten_at = 0, 0.0

    def work(self, rank: int, phase: StepPhase | None, seconds: float) -> None:
        taken = seconds * self.random.lognormvariate(0.0, self.noise) + self.extra(rank, self.step, phase)
        if self.gpus and phase in (StepPhase.COMPUTE, StepPhase.OPTIMIZER):
            self.gpus[rank].launch(taken)
        else:
            self.times[rank].now += taken

    def run(self, steps: int) -> list[str]:
        """Make steps of about 0.2 s, with a heartbeat of each rank every second; what is logged."""
        for _ in range(steps):
            self.step += 1
            for rank, clock in enumerate(self.clocks):
                self.work(rank, None, 0.005)
                clock.boundary()
                self.work(rank, StepPhase.CHECKPOINT, 0.001)
                clock.saved()
                self.work(rank, StepPhase.DATA, 0.03)
                clock.fetched()
                self.work(rank, StepPhase.COMPUTE, 0.12)
                if self.apart:
                    clock.backward_ended()
            ready = [gpu.free_at for gpu in self.gpus] or [time.now for time in self.times]
            reduced = max(ready) + 0.01
            for rank, clock in enumerate(self.clocks):
                if self.gpus:
                    self.gpus[rank].wait_until(reduced)
                else:
                    self.times[rank].now = reduced
                clock.optimizing()
                self.work(rank, StepPhase.OPTIMIZER, 0.02)
                clock.stepped()
            if reduced - self.beaten_at >= 1.0:
                self.beaten_at = reduced
                self.beat()
        return self.said

    def beat(self) -> None:
        for rank in self.random.sample(range(self.ranks), self.ranks):
            phases = self.clocks[rank].window(self.step, self.beaten_at)
            phases = msgspec.structs.replace(phases, policy=self.policy) if phases is not None else None
            name = f"w{rank}"
            for _ in range(2):  # the runtime counts a heartbeat when it is received, and when it is answered
                heartbeats.beat(self.nodes, ("job", name), self.beaten_at, step=self.step, phases=phases)
                found = stragglers.found(self.nodes, self.state.jobs["job"], name, self.beaten_at)
                self.said += found.lines
                self.ends += [found.acts] if found.acts is not None else []

    def pulse(self, rank: int) -> LivenessLease:
        return self.nodes.pulses["job", f"w{rank}"]


def healthy(rank: int, step: int, phase: StepPhase | None) -> float:
    """Evaluations on one rank or on all, slow saves on one rank, a pause within a step now and then."""
    if phase is None and step % 50 == 0:
        return 5.0 if rank == 0 or step % 100 == 0 else 0.0
    if phase is StepPhase.CHECKPOINT and step % 150 == 0:
        return 8.0 if rank == 1 else 0.2
    if phase is StepPhase.COMPUTE and (step + 7 * rank) % 61 == 0:
        return 1.5
    return 0.0


@pytest.mark.deep
def test_of_healthy_jobs_no_rank_is_reported_or_replaced() -> None:
    """200 jobs of all policies, with noisy steps, evaluations and slow saves."""
    for seed in range(200):
        kind = {"apart": seed % 3 > 0, "gpus": seed % 4 == 3}
        job = SimulatedJob(2 + seed % 4, seed, healthy, noise=0.1 + 0.1 * (seed % 5), **kind)
        job.policy = tuple(StragglerPolicy)[seed % 3]
        assert job.run(400) == job.ends == [], f"seed {seed}"


@pytest.mark.parametrize("gpus", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize(("phase", "seconds"), [("data", 0.1), ("compute", 0.12), ("optimizer", 0.06)])
def test_a_slow_rank_is_named_within_the_windows(ranks: int, phase: str, seconds: float, gpus: bool) -> None:
    slow, which = ranks - 1, StepPhase(phase)
    behind_s = 0.12 if gpus and which is StepPhase.DATA else 0.0  # while the GPU works, Python loads the next batch
    job = SimulatedJob(
        ranks, ranks, lambda rank, _, at: (seconds + behind_s) * (rank == slow and at is which), noise=0.1, gpus=gpus
    )
    said = job.run(5 * 60)
    assert len(said) == 1, said
    assert said[0].startswith(f"rank {slow} (")
    assert f" is slow: its {phase} takes " in said[0]
    assert f"the median of all {ranks} ranks is " in said[0]
    found = job.pulse(slow).straggler
    assert found is not None
    assert found.phase is which
    assert found.seconds - found.median_s == pytest.approx(seconds, rel=0.3)
    assert all(job.pulse(rank).straggler is None for rank in range(ranks) if rank != slow)
    job.extra = healthy
    assert len(job.run(6 * 60)) == 2
    assert " is no longer slow, after " in job.said[1]
    assert job.pulse(slow).straggler is None


def test_slow_data_is_found_without_the_end_of_the_backward_pass() -> None:
    """Then the compute of the others holds their wait for it, and nobody is named for that."""
    job = SimulatedJob(3, 1, lambda rank, _, at: 0.1 * (rank == 1 and at is StepPhase.DATA), apart=False)
    assert [" ".join(text.split()[:1] + text.split()[3:7]) for text in job.run(240)] == ["rank is slow: its data"]
    job = SimulatedJob(3, 1, lambda rank, _, at: 0.1 * (rank == 1 and at is StepPhase.COMPUTE), apart=False)
    assert job.run(240) == []


def test_of_two_ranks_none_is_named_if_it_is_not_known_who_waits() -> None:
    """The fast one may wait for the slow one's device where it gets its batch."""
    assert stragglers.slow_ranks([window(0.01, None), window(0.05, None)]) == {}
    assert list(stragglers.slow_ranks([window(0.01, None), window(0.05, None), window(0.01, None)])) == [1]


def test_ranks_that_wait_for_nobody_are_not_compared() -> None:
    """Such as those that train on leased data, each at its own speed."""
    alone = msgspec.structs.replace(window(0.05, None), in_step=False)
    assert stragglers.slow_ranks([window(0.01, None), window(0.01, None), alone]) == {}


def window(data: float, network: float | None) -> StepPhases:
    return StepPhases(100, 50, 10.0, 0.2, data, 0.1, 0.01, 0.0, network)


def test_a_rank_that_the_others_do_not_wait_for_is_not_slow() -> None:
    """A wait for another rank in its forward pass is no work of its own."""
    fast, slow = window(0.01, 0.09), window(0.05, 0.05)
    assert list(stragglers.slow_ranks([fast, slow])) == [1]
    assert stragglers.slow_ranks([fast, window(0.05, 0.09)]) == {}


def test_a_small_part_of_the_step_does_not_count() -> None:
    assert stragglers.slow_ranks([window(0.001, 0.05), window(0.015, 0.0)]) == {}


def test_less_than_the_factor_does_not_count() -> None:
    assert stragglers.slow_ranks([window(0.1, 0.1), window(0.14, 0.0)]) == {}
    assert list(stragglers.slow_ranks([window(0.1, 0.1), window(0.16, 0.0)])) == [1]


def test_ranks_that_all_differ_are_not_slow() -> None:
    spread = [window(0.02 * rank, 0.1 if rank < 7 else 0.0) for rank in range(1, 8)]
    assert stragglers.slow_ranks(spread) == {}
    alike = [window(0.08, 0.1)] * 6
    assert list(stragglers.slow_ranks([*alike, spread[6]])) == [6]


def test_a_window_has_enough_steps_and_leaves_out_the_slowest() -> None:
    now = SimulatedClock()
    clock = StepClock(now)
    assert clock.window(0, 0.0) is None
    for step in range(WINDOW_STEPS + 2):  # the first one does not count
        assert step > WINDOW_STEPS or clock.window(step, 100.0) is None
        clock.boundary()
        clock.saved()
        now.now += 0.5
        clock.fetched()
        now.now += 7.0 if step in (0, 3) else 1.0
        clock.backward_ended()
        now.now += 0.25
        clock.optimizing()
        now.now += 0.125
        clock.stepped()
    clock.boundary()
    assert clock.window(21, 9.0) is None
    assert clock.window(21, 11.0) == StepPhases(21, 21, 11.0, 1.875, 0.5, 1.0, 0.125, 0.0, 0.25)
    assert clock.window(21, 30.0) is None, "no steps since"


def test_an_adapter_without_phases_reports_none() -> None:
    clock = StepClock(SimulatedClock())
    for _ in range(2 * WINDOW_STEPS):
        clock.boundary()
        clock.saved()
        clock.stepped()
    clock.window(0, 0.0)
    assert clock.window(0, 100.0) is None
