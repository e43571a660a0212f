"""Weighted gradients and bucket order in real gloo processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CASES = Path(__file__).with_name("ddp_cases.py")
EXACT = 1e-12


def run(case: str, world: int) -> list[Any]:
    """What each rank found."""
    root = str(CASES.parents[2])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        env.pop(name, None)
    done = subprocess.run([sys.executable, str(CASES), case, str(world)], env=env, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("world", [2, 3])
def test_weighted_gradient_is_that_of_one_process(world: int) -> None:
    """DL-87, DL-88: uneven m_i, short steps and ghosts give the single-process gradient."""
    for found in run("weights", world):
        inexact = found.pop("scaled=False")
        assert all(error <= EXACT for error in found.values()), found
        if world == 3:
            assert inexact > 1e-3  # unequal micro-batches in one rank: what `loss_scale` is for


@pytest.mark.parametrize("world", [2, 3])
def test_a_weighed_loss_gives_the_gradient_of_one_process(world: int) -> None:
    """DL-87, DL-88: where gradients are averaged (FSDP2, DDP without our hook), and for means over tokens."""
    for found in run("scaled", world):
        assert len(found) == 15
        assert all(error <= EXACT for error in found.values()), found


ENDING = """
import atexit, sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from dlrover_hooks.integrations import ddp as ours

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
ddp = DistributedDataParallel(torch.nn.Linear(4, 1))
ours.weigh_gradients(ddp, lambda: 0.5)
made, add = [], ours._CALLBACKS.add
ours._CALLBACKS.add = lambda one: (made.append(one), add(one))
for _ in range(3):
    ddp(torch.ones(1, 4)).sum().backward()
print(len(made), len(ours._CALLBACKS))
threading = __import__("threading")
threading.Timer(0.2, made.clear).start()
atexit.unregister(ours._settle)
ours._settle()
print(len(made), len(ours._CALLBACKS))
"""


def test_a_script_may_end_right_behind_its_last_step(tmp_path: Path) -> None:
    """gloo's thread frees the hook's callbacks later, and needs the interpreter for it: the end waits for that, or the
    process would abort now and then.
    """
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ENDING, str(tmp_path / "store"), str(rank)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=60) for rank in ranks]
    assert [out.splitlines() for out, _ in outputs] == [["3 3", "0 0"]] * 2, outputs


def test_restart_with_replay_is_bit_equal_and_without_is_not() -> None:
    """W = 3, several buckets, parameters used in another order than defined; replay draws no random number."""
    for found in run("buckets", 3):
        assert found["not_reverse_order"]
        assert found["silent"]
        assert [found[f"replayed{k}"] for k in (1, 2, 3)] == [True] * 3
        assert [found[f"plain{k}"] for k in (1, 2, 3)] == [False] * 3


def test_what_is_not_done_is_said() -> None:
    """Replay leaves alone what would notice it; a communication hook of the user's is never replaced."""
    for found in run("skipped", 3):
        assert found.pop("fits") == [True, ""]
        words = {"unused": "never rebuilds", "static": "static_graph", "hooked": "weight", "foreign": "_foreign"}
        words["second hook"] = "already has"
        for case, word in (words | {"other": "not those of this model"}).items():
            done, reason = found[case]
            assert not done, case
            assert word in reason
