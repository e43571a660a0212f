"""Weighted gradients and bucket order in real gloo processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import ranks
from tests.deep import deep

CASES = Path(__file__).with_name("ddp_cases.py")
WARM = ("torch._dynamo", "torch.distributed.fsdp", "dlrover_hooks.pytorch.ddp_exactness")
EXACT = 1e-12


def run(case: str, world: int) -> list[Any]:
    """What each rank found."""
    one = ranks.started([sys.executable, str(CASES), case, str(world)], 1, warm=WARM)
    ((said, errors),) = ranks.ended(one, 200)
    assert one[0].returncode == 0, errors[-3000:]
    return json.loads(said.splitlines()[-1])


@pytest.mark.requirement("DL-87", "DL-88")
@pytest.mark.parametrize("world", [2, 3])
def test_weighted_gradient_is_that_of_one_process(world: int) -> None:
    """Uneven m_i, short steps and ghosts give the single-process gradient."""
    for found in run("weights", world):
        inexact = found.pop("scaled=False")
        assert all(error <= EXACT for error in found.values()), found
        if world == 3:
            assert inexact > 1e-3  # unequal micro-batches in one rank: what `loss_scale` is for


@pytest.mark.parametrize("world", [2, deep(3)])
def test_a_weighed_loss_gives_the_gradient_of_one_process(world: int) -> None:
    """Where gradients are averaged (FSDP2, DDP without our hook), and for means over tokens."""
    for found in run("scaled", world):
        assert len(found) == 15
        assert all(error <= EXACT for error in found.values()), found


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


@pytest.mark.parametrize("world", [2, 3])
def test_the_hook_comes_with_the_first_uneven_step_and_changes_no_bit(world: int) -> None:
    """Until a rank's weight is another one DDP averages by itself; ranks with the hook and without make one step."""
    for rank, found in enumerate(run("lazily", world)):
        assert found["equal"] == [True] * 6
        assert found["hooked"] == ([0, 0, 0, 0, 1, 1, 1] if rank == 0 else [0] * 7)
        assert "_foreign behind the elastic loader's" in found["twice"]


def test_each_synchronised_backward_notes_its_random_state_before_peers_can_complete_the_step() -> None:
    """Under `elastic_run`: once per step, without a communication hook unless weights or unused parameters need one."""
    for found in run("binding", 2):
        for name in ("bare", "unused"):
            once, steps = ["note", "tell 2"], [found[f"{name} {number}"] for number in range(4)]
            assert steps == [once, [], once, once], name
            assert found[f"{name} hooks"] == 1
