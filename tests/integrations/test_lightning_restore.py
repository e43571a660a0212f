"""A run broken off at any step and resumed is the undisturbed run, bit for bit.

Real processes, real gloo groups, real Lightning: see restore_trial.py, which does the work and prints what it found.
"""

import sys
from pathlib import Path

import pytest

from tests import ranks

TRIAL = Path(__file__).with_name("restore_trial.py")
WARM = ("torch._dynamo", "dlrover_hooks.integrations.lightning")


@pytest.mark.deep
@pytest.mark.parametrize(
    ("world", "accumulations", "places"),
    [(1, "3", 8), (3, "2", 6), (1, "1,2,3", 40), (2, "1,2,3", 20), (3, "1,3", 15)],
)
def test_restore_from_every_step_is_bit_equal(
    world: int, accumulations: str, places: int, job: str, request: pytest.FixtureRequest
) -> None:
    """With validation, dropout, batch norm, a scheduler, accumulation 1 to 3, at W = 1, 2 and 3, in so many places."""
    master = request.getfixturevalue("live_master") if world > 1 else None
    found = ranks.run([sys.executable, str(TRIAL), job, accumulations], world, master, timeout_s=280, warm=WARM)
    crashes = {(trial["accumulate"], *trial["crash"]) for trial in found}
    assert len(crashes) >= places
    assert {trial["rank"] for trial in found} == set(range(world))
    broken = [
        trial for trial in found if not all(trial[part] for part in ("weights", "optimizer", "schedule", "events"))
    ]
    assert not broken, broken[:3]
    for trial in found:
        hook, step = trial["crash"]
        at_quiet_point = hook == "batch_start"
        assert trial["restored"] == (step if at_quiet_point else step - 1), trial
