"""Starts `run_trials.py` in groups of processes, and reads what they reported."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.e2e.master_process import LiveMaster

ROOT = Path(__file__).parents[2]


def plan(name: str, job: str, given: dict[str, Any], crashes: Any, **more: Any) -> str:
    """As `run_trials.py` reads it."""
    values = {"job": f"{job}-{name.replace(' ', '-')}"} | given
    return json.dumps({"name": name, "given": values, "crashes": crashes} | more)


def spawn(
    world: int, plans: list[str], master: LiveMaster | None = None, frameworks: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """What all ranks of one group reported."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torchrun = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}  # fmt: skip
    env = {name: value for name, value in os.environ.items() if not name.startswith("DLROVER_HOOKS_")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if master is not None:
        env |= {"DLROVER_HOOKS_MASTER": master.url, "DLROVER_HOOKS_TOKEN": master.token or ""}
    command = [sys.executable, str(ROOT / "tests/contracts/run_trials.py"), ",".join(frameworks), *plans]
    ranks = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=env | ({k: str(v) for k, v in (torchrun | {"RANK": r, "LOCAL_RANK": r}).items()} if world > 1 else {}),
        )
        for r in range(world)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=150) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, errors[-4000:]
    return [json.loads(line) for out, _ in outputs for line in out.splitlines() if line.startswith("{")]


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
