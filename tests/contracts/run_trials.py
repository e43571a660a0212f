"""One process of the adapter contract: runs trials one after the other, and prints a JSON line for each life.

Usage: run_trials.py FRAMEWORKS PLAN...; PLAN is a JSON object {"name": ..., "given": {...}, "crashes": [1, 2, null]}:
the lives of one job, each in the same process but with everything made new. "environ" in it is set meanwhile.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import msgspec

from tests.contracts.report import Given, Trial
from tests.pace import pace

FRAMEWORKS = ("torch", "accelerate", "fabric", "lightning", "transformers")
"""Those of torch. `keras-BACKEND` besides, for each of Keras' backends."""


def trial_of(framework: str) -> Trial:
    """The trial of one framework; it is imported here and nowhere else."""
    framework, _, backend = framework.partition("-")
    if backend:
        os.environ["KERAS_BACKEND"] = backend
    return importlib.import_module(f"tests.contracts.{framework}_trial").train


def run(framework: str, plan: dict[str, Any]) -> None:
    """All lives of one job. A crash of "every" means: in every step, one after the other, until the job is done."""
    place = {"rank": int(os.environ.get("RANK", "0")), "world": int(os.environ.get("WORLD_SIZE", "1"))}
    values = plan["given"] | place | {"job": f"{plan['given']['job']}-{framework}"}
    given, lives = msgspec.convert(values, Given), plan["crashes"]
    crashes = iter(lives) if lives != "every" else iter(range(1, 60))
    for crash in crashes:
        report = trial_of(framework)(given, crash)
        line = {"framework": framework, "plan": plan["name"], "rank": given.rank, "crash": crash}
        print(json.dumps(line | msgspec.to_builtins(report)), flush=True)
        if lives == "every" and not report.crashed:
            break


def main() -> None:
    warnings.filterwarnings("ignore")
    with contextlib.ExitStack() as end:
        if not set(sys.argv[1].split(",")) & {"keras-jax", "keras-tensorflow"}:
            end.callback(_with_torch())
        _run_all()


def _with_torch() -> Callable[[], object]:
    """Returns what ends it."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
        pace()
    return lambda: dist.destroy_process_group() if dist.is_initialized() else None


def _run_all() -> None:
    for framework in sys.argv[1].split(","):
        for plan in map(json.loads, sys.argv[2:]):
            os.environ.update(plan.get("environ", {}))
            run(framework, plan)
            for name in plan.get("environ", {}):
                del os.environ[name]


if __name__ == "__main__":
    main()
