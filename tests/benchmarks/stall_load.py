"""Jobs without a fault whose pauses vary, in virtual time: does a learned limit ever restart a rank? Part of
`make bench-health`.

Each job is an hour of 2 to 8 ranks with the policy `restart-rank`: the real `StallWatch` of each rank, the real
heartbeats and the real verdict of the master, a look each second. Steps vary by a lognormal factor; one in a hundred
takes up to ten times as long. The first step may take half an hour. Evaluations take up to half an hour on all ranks.
Every other time only rank 0 works, as it may evaluate or write a checkpoint, for up to nine minutes, and the others
wait in a barrier: after ten, NCCL's own timeout would end the job. A rank that works is active in nine of ten seconds,
one that waits in none (gloo) or in all (NCCL).
"""

from __future__ import annotations

import random
from typing import NamedTuple

from dlrover_hooks.master.core import heartbeats, job_registry, stalls
from dlrover_hooks.master.core.heartbeats import Nodes
from dlrover_hooks.protocol import Stall, StallPolicy
from dlrover_hooks.worker.stall_watch import StallWatch
from tests.e2e.job_script import attach, join

HOUR_S = 3600
_BARRIER = "barrier"


class Calm(NamedTuple):
    """What a job without a fault led to."""

    restarts: int
    reports: int
    """Verdicts that were logged, each at a pause longer than all before."""


class _Phase(NamedTuple):
    """What all ranks do until `until`: `alone`, only rank 0 works, and the others wait for it."""

    until: float
    alone: bool = False
    step: bool = False


def calm(jobs: int, seed: int) -> Calm:
    """The sum over `jobs` jobs."""
    found = [_job(random.Random(f"{seed}/{number}")) for number in range(jobs)]
    return Calm(sum(one.restarts for one in found), sum(one.reports for one in found))


def _phases(chance: random.Random) -> list[_Phase]:
    """A job's hour."""
    step_s, every = 10 ** chance.uniform(-1.3, 1.3), chance.choice([50, 200, 1000])
    now = chance.uniform(1, 1800)
    phases = [_Phase(now, step=True)]
    while now < HOUR_S:
        count = len(phases)
        if count % every == 0:
            alone = chance.random() < 0.5
            now += chance.uniform(1, 540 if alone else 1800)
            phases.append(_Phase(now, alone=alone))
        rare = chance.uniform(2, 10) if chance.random() < 0.01 else 1.0
        now += step_s * chance.lognormvariate(0, 0.3) * rare
        phases.append(_Phase(now, step=True))
    return phases


def _job(chance: random.Random) -> Calm:
    ranks, spins = chance.randint(2, 8), chance.random() < 0.5
    state, nodes = job_registry.Master(), Nodes()
    job_registry.apply(state, join(count=ranks, low=ranks, high=ranks), 0.0)
    for rank in range(ranks):
        job_registry.apply(state, attach(f"w{rank}"), 0.0)
    job, watches = state.jobs["job"], [StallWatch() for _ in range(ranks)]
    restarts, reports, step, phases = 0, 0, 0, iter(_phases(chance))
    phase = next(phases)
    for now in range(HOUR_S):
        while phase.until <= now:
            step += phase.step
            phase = next(phases)
        for rank in reversed(range(ranks)):
            waits = phase.alone and rank > 0
            active = spins if waits else chance.random() < 0.9
            stall = None
            if watches[rank].look(step, now, active=active):
                where = _BARRIER if waits else ""
                stall = Stall(watches[rank].idle_s, "train.py:9, in main", where, StallPolicy.RANK, watches[rank].busy)
            heartbeats.beat(nodes, ("job", f"w{rank}"), now, step=step, stall=stall)
        verdict = stalls.found(nodes, job, "w0")
        reports += verdict is not None
        restarts += verdict is not None and verdict.ends is not None
    return Calm(restarts, reports)
