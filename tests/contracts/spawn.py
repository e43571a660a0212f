"""Starts `run_trials.py` in groups of processes, and reads what they reported."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from typing import Any

from tests import ranks
from tests.contracts.run_trials import FRAMEWORKS
from tests.e2e.master_process import LiveMaster

HERE = [name for name in FRAMEWORKS if importlib.util.find_spec(name if name != "fabric" else "lightning")]
"""Frameworks that are installed."""
KERAS_PYTHON = ranks.ROOT / ".venv-keras/bin/python"
"""Of Keras' backends other than torch, in an environment without it."""


def plan(name: str, job: str, given: dict[str, Any], crashes: Any, **more: Any) -> str:
    """As `run_trials.py` reads it."""
    values = {"job": f"{job}-{name.replace(' ', '-')}"} | given
    return json.dumps({"name": name, "given": values, "crashes": crashes} | more)


def spawn(
    world: int, plans: list[str], master: LiveMaster | None = None, frameworks: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """What all ranks of one group reported; nothing without a framework. A backend of Keras has a group of its own."""
    if not frameworks:
        return []
    script = [str(ranks.ROOT / "tests/contracts/run_trials.py"), ",".join(frameworks), *plans]
    if frameworks[0] in ("keras-jax", "keras-tensorflow"):  # not forked: what Keras imports there starts threads
        return ranks.run([str(KERAS_PYTHON), *script], world, master, timeout_s=500)
    command = [sys.executable, *script]
    # so that one server forks all groups of several, and those of Keras
    alike = frameworks if tuple(frameworks) == ("lightning",) else [*HERE, "keras"]
    warm = ["torch._dynamo", *(f"tests.contracts.{name}_trial" for name in alike)]
    return ranks.run(command, world, master, timeout_s=500, warm=warm)


def survived(lives: list[dict[str, Any]]) -> list[tuple[int, int, str, int]]:
    """What the model at the end was trained on: what each life did before the step that the next one resumed at."""
    seen: list[Any] = []
    for life in lives:
        if life["rank"] == 0:
            seen = [one for one in seen if one[1] < (life["restored"] or 0)]
        seen += map(tuple, life["seen"])
    return seen


def by_step(seen: list[tuple[int, int, str, int]]) -> dict[int, list[int]]:
    steps: dict[int, list[int]] = {}
    for _, step, _, one in seen:
        steps.setdefault(step, []).append(one)
    return {step: sorted(ids) for step, ids in sorted(steps.items())}
