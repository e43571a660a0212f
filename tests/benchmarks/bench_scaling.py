"""How good plans are, for one job and for a cluster: `make bench-scaling`. Writes build/bench/scaling.json.

Synthetic jobs of the same form as the models, so the errors are a lower bound of those of real jobs. Each job with
parameter servers starts with one server and one worker and is scaled by its optimizer alone. `SEEDS=FIRST:LAST` or
`BENCH_ARGS="--seeds FIRST:LAST"`: one job for each seed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import numpy as np

from dlrover_hooks.master.core.job_scaling import plan_verification
from dlrover_hooks.master.core.job_scaling.plan_verification import PlanHistory, PlanOutcome
from dlrover_hooks.master.scaling import (
    JobSample,
    LocalOptimizer,
    NodeGroupResource,
    OptimizeStage,
    ResourceLimits,
    ResourcePlan,
)
from dlrover_hooks.master.scaling.allocation import Demand, JobConfiguration, allocate
from dlrover_hooks.master.scaling.speed_models import AllReduceModel, StepTime, fit_all_reduce
from tests.benchmarks import scaling_cluster
from tests.benchmarks.report import report
from tests.benchmarks.scaling_cluster import SIZES
from tests.benchmarks.scaling_jobs import SIZE, ps_job, sample, scaled
from tests.benchmarks.scaling_run import interruption

NOISE, STEPS, WINDOW_S = 0.05, 12, 30.0
CLUSTERS = 20
"""Clusters whose jobs are run by three policies."""
BARS = {
    "median_loss_vs_best_pct": 11,
    "goodput_fit_error_pct": 4,
    "decision_ms_1000_nodes": 50,
    "milp_400_jobs_s": 1.0,
    "plan_interrupt_steps": 0,
}
AT_LEAST = {"rollback_right_pct": 95}


def goodput_error(seed: int) -> float:
    """Median error in percent of the predicted throughput at 1 to 32 replicas, of one all-reduce job."""
    random = np.random.default_rng(seed)
    low = (0.02, 0.001, 0.02, 0.001, 0.005, 0.0005, 1.0)
    high = (0.1, 0.01, 0.2, 0.02, 0.05, 0.005, 4.0)
    a, b, c, d, e, f, g = (float(random.uniform(*bounds)) for bounds in zip(low, high, strict=True))
    truth, measured = AllReduceModel((a, b), (c, d), (e, f), g), []
    for number in range(STEPS):
        replicas = (1, 2, 4, 8)[number % 4]
        batch = (16.0, 32.0, 64.0)[number % 3]
        hosts = 2 if replicas > 4 or number == 5 else 1
        seconds = float(truth.seconds(replicas, hosts, batch)) * float(np.exp(NOISE * random.standard_normal()))
        measured.append(StepTime(replicas, hosts, batch, seconds))
    replicas = np.array([1, 2, 4, 8, 16, 32])
    where = replicas, np.maximum(1, replicas // 4), np.full(6, 32.0)
    really = truth.throughput(*where)
    return 100 * float(np.median(np.abs(fit_all_reduce(measured).throughput(*where) - really) / really))


def decision_ms() -> float:
    """Milliseconds of a decision by the model for a job of 1000 nodes, the median of 20."""
    limits, truth = ResourceLimits(2000, 2000 * 1024, max_workers=1900, max_ps=60), ps_job(0)
    optimizer = LocalOptimizer(limits, ps=True)
    for ps, workers in ((10, 200), (20, 400), (20, 800), (40, 800), (40, 960)):
        optimizer.observe(sample(ps, workers, float(truth.speed(ps, workers))))
    times = []
    for _ in range(20):
        began = time.perf_counter()
        optimizer.generate_opt_plan(OptimizeStage.RUNNING)
        times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times)


def rolled_back(seed: int, change: float) -> bool:
    """Whether a plan is rolled back that makes the job so much faster (negative: slower), measured with noise."""
    random = np.random.default_rng([seed, 2])
    history, now = PlanHistory(), 0.0

    def window(workers: int, speed: float) -> JobSample:
        return sample(0, workers, speed * max(1 + NOISE * float(random.standard_normal()), 1e-3))

    before = sample(0, 4, 1.0)
    for _ in range(plan_verification.RECENT):
        now += WINDOW_S
        before = window(4, 1.0)
        history = plan_verification.observed(history, before, now).history
    plan = ResourcePlan({"worker": NodeGroupResource(8, SIZE)})
    history = plan_verification.made(history, plan, before, now, reason="bench", predicted=None)
    while history.open is not None:
        now += WINDOW_S
        history = plan_verification.observed(history, window(8, 1 + change), now).history
    return history.records[-1].outcome is PlanOutcome.ROLLED_BACK


def rollback_right_pct(seeds: range) -> float:
    """Of plans that make the job 10 to 50 % slower (to be rolled back), and of plans that make it up to 50 % faster."""
    right = 0
    for seed in seeds:
        random = np.random.default_rng([seed, 3])
        right += rolled_back(seed, -float(random.uniform(0.1, 0.5)))
        right += not rolled_back(seed, float(random.uniform(0.0, 0.5)))
    return 100 * right / (2 * len(seeds))


def milp_s() -> float:
    """Seconds of one allocation of 1024 nodes of two kinds among 400 jobs of 5 tenants, the median of 5."""
    times = []
    for seed in range(5):
        random = np.random.default_rng([seed, 4])
        demands = [_demand(f"job-{number}", random) for number in range(400)]
        began = time.perf_counter()
        found = allocate(demands, {"a100": 512, "v100": 512}, {f"tenant-{n}": 300 for n in range(5)})
        times.append(time.perf_counter() - began)
        assert found.optimal
    return statistics.median(times)


def _demand(name: str, random: np.random.Generator) -> Demand:
    scaling, faster = random.uniform(0.5, 1.0), random.uniform(1.2, 3.0)
    speeds = [(kind, n, factor * n**scaling) for kind, factor in (("a100", faster), ("v100", 1.0)) for n in SIZES]
    has = (("a100", "v100")[random.integers(2)], int(random.choice(SIZES[:3]))) if random.random() < 0.7 else None
    configurations = tuple(JobConfiguration(kind, n, float(speed)) for kind, n, speed in speeds)
    tenant = f"tenant-{random.integers(5)}"
    return Demand(name, configurations, tenant, current=has, age_s=3600, restarts=int(random.integers(5)), restart_s=30)


def policies() -> dict[str, float]:
    """Of the integer program: how fair it is, and its makespan by that of two other policies."""
    program, first_come, equal = (
        [scaling_cluster.run(seed, policy) for seed in range(CLUSTERS)]
        for policy in (scaling_cluster.program, scaling_cluster.first_come, scaling_cluster.equal_shares)
    )
    over = {"first_come": first_come, "equal_shares": equal}
    found = {"jain_fairness": statistics.median(fair for _, fair in program)}
    for name, runs in over.items():
        found[f"jain_fairness_{name}"] = statistics.median(fair for _, fair in runs)
        pairs = zip(program, runs, strict=True)
        found[f"makespan_over_{name}"] = statistics.median(mine / other for (mine, _), (other, _) in pairs)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default=os.environ.get("SEEDS", "1:200"), help="FIRST:LAST")
    first, last = map(int, parser.parse_args().seeds.split(":"))
    seeds = range(first, last + 1)
    scalings = [scaled(ps_job(seed), seed, NOISE) for seed in seeds]
    losses = [loss for loss, _ in scalings]
    found = {
        "median_loss_vs_best_pct": statistics.median(losses),
        "p90_loss_vs_best_pct": float(np.percentile(losses, 90)),
        "median_plans": statistics.median(plans for _, plans in scalings),
        "goodput_fit_error_pct": statistics.median(goodput_error(seed) for seed in seeds),
        "decision_ms_1000_nodes": decision_ms(),
        "rollback_right_pct": rollback_right_pct(seeds),
        "milp_400_jobs_s": milp_s(),
        **policies(),
        **interruption(),
    }
    conditions = {"seeds": f"{first}:{last}", "noise": NOISE, "steps_for_goodput_fit": STEPS}
    return report("scaling", "Plans for jobs", conditions, found, BARS, AT_LEAST)


if __name__ == "__main__":
    raise SystemExit(main())
