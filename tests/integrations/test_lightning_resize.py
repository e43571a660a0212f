"""A Lightning run goes on at other world sizes and with another global batch (DL-58, DL-87, DL-88, ED-25).

Real processes, real gloo groups: see resize_trial.py.
"""

import json
import os
import socket
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

TRIAL = Path(__file__).with_name("resize_trial.py")
SAMPLES, EPOCHS = 43, 3
PHASES = ((1, 12, 1), (3, 12, 3), (2, 12, 6), (1, 8, -1))
"""World size, global batch, and the step at which it breaks off. An epoch has 4 steps of 12."""


@pytest.fixture
def job() -> Iterator[str]:
    name = f"resize-{uuid.uuid4().hex[:8]}"
    yield name
    for process in psutil.process_iter(["cmdline"]):
        if any(name in part for part in process.info["cmdline"] or ()):
            process.kill()


def phase(job: str, world: int, global_batch: int, crash: int, master: dict[str, str]) -> list[dict]:
    """What all ranks of one part of the run said."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ours = os.environ | master | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TRIAL.parents[2])}
    torchrun = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}  # fmt: skip
    common = ours | {name: str(value) for name, value in torchrun.items()}
    command = [sys.executable, str(TRIAL), job, str(global_batch), str(crash)]
    ranks = [
        subprocess.Popen(command, env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, text=True)
        for rank in range(world)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, errors[-3000:]
    return [json.loads(line) for out, _ in outputs for line in out.splitlines() if line.startswith("{")]


@pytest.mark.timeout(150)
def test_every_sample_once_through_resizes_in_mid_epoch(job: str, request: pytest.FixtureRequest) -> None:
    live = request.getfixturevalue("live_master")
    master = {"DLROVER_HOOKS_MASTER": live.url, "DLROVER_HOOKS_TOKEN": live.token}
    said = [phase(job, *each, master) for each in PHASES]
    begins = [max(line.get("restored", 0) for line in lines) for lines in said]
    assert begins[1:] == [crash for _, _, crash in PHASES[:-1]]
    visits: Counter[tuple[int, int]] = Counter()
    validated: set[tuple[int, int]] = set()
    for lines, end in zip(said, [*begins[1:], 10**9], strict=True):
        for line in lines:
            if "ids" in line and line["step"] < end and not line["ghost"]:
                visits.update((line["epoch"], index) for index in line["ids"])
            elif "validated" in line and line["step"] <= end:
                validated.add((line["validated"], line["step"]))
    assert visits == Counter((epoch, index) for epoch in range(EPOCHS) for index in range(SAMPLES))
    assert sorted(validated) == [(0, 4), (1, 9), (2, 15)]
