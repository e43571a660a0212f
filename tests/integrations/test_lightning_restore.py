"""A run broken off at any step and resumed is the undisturbed run, bit for bit (DL-58, DL-81, DL-90, ED-71).

Real processes, real gloo groups, real Lightning: see restore_trial.py, which does the work and prints what it found.
"""

import json
import os
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

TRIAL = Path(__file__).with_name("restore_trial.py")


@pytest.fixture
def prefix():
    """A name for this test's jobs; whatever keeper a failed trial left behind is ended."""
    name = f"restore-{uuid.uuid4().hex[:8]}"
    yield name
    for process in psutil.process_iter(["cmdline"]):
        if any(name in part for part in process.info["cmdline"] or ()):
            process.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _environment(rank: int, world: int, port: int, master: dict[str, str]) -> dict[str, str]:
    ours = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TRIAL.parents[2])}
    if world == 1:
        return os.environ | ours
    torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}  # fmt: skip
    return os.environ | ours | master | {name: str(value) for name, value in torchrun.items()}


def run_trial(prefix: str, world: int, accumulate: str, master: dict[str, str]) -> list[dict]:
    """Run one trial with `world` ranks; returns the comparisons of every rank."""
    port = _free_port()
    command = [sys.executable, str(TRIAL), prefix, accumulate]
    ranks = [
        subprocess.Popen(command, env=_environment(rank, world, port, master), stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, text=True)
        for rank in range(world)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=280) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, errors[-3000:]
    return [json.loads(line) for out, _ in outputs for line in out.splitlines() if line.startswith("{")]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_restore_from_every_step_is_bit_equal(world: int, prefix: str, request: pytest.FixtureRequest) -> None:
    """With validation, dropout, batch norm, a scheduler, accumulation 1 to 3, at W = 1, 2 and 3 (DL-81, DL-90)."""
    master: dict[str, str] = {}
    if world > 1:
        live = request.getfixturevalue("live_master")
        master = {"DLROVER_HOOKS_MASTER": live.url, "DLROVER_HOOKS_TOKEN": live.token}
    found = run_trial(prefix, world, "1,2,3", master)
    crashes = {(trial["accumulate"], *trial["crash"]) for trial in found}
    assert len(crashes) >= {1: 40, 2: 20, 3: 15}[world]
    assert {trial["rank"] for trial in found} == set(range(world))
    broken = [
        trial for trial in found if not all(trial[part] for part in ("weights", "optimizer", "schedule", "events"))
    ]
    assert not broken, broken[:3]
    for trial in found:
        hook, step = trial["crash"]
        at_quiet_point = hook == "batch_start"
        assert trial["restored"] == (step if at_quiet_point else step - 1), trial
