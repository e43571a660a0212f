"""Keras in several processes on the torch backend: a step has the same samples and the same gradient at any world size.

The runs are in keras_cases.py. Each rank of a world is a process of its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import ranks
from tests.e2e.master_process import LiveMaster
from tests.integrations.keras_lives import WARM

CASES = Path(__file__).with_name("keras_cases.py")
EXACT = ("step", "trace", "model", "optimizer", "rate", "history", "epochs")
Life = Callable[..., list[dict[str, Any]]]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]


@pytest.fixture
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Life]:
    """One life of a job, in processes of its own; returns the reports of the ranks."""
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    master = LiveMaster(tmp_path)

    def run(world: int, name: str, crash: int | None = None, **given: Any) -> list[dict[str, Any]]:
        plan = json.dumps({"job": f"{job}-{name}", "crashes": [crash], **given})
        found = ranks.run([sys.executable, str(CASES), plan], world, master, timeout_s=120, warm=WARM)
        assert [one["rank"] for one in found] == list(range(world))
        return found

    try:
        with ranks.named_job("keras") as job:
            yield run
    finally:
        master.close()


def differ(one: dict[str, Any], other: dict[str, Any], names: tuple[str, ...] = EXACT) -> list[str]:
    return [name for name in names if one[name] != other[name]]


def near(one: Any, other: Any) -> bool:
    return one == pytest.approx(other, rel=1e-5, abs=1e-6)


@pytest.mark.deep  # the adapter contract has this proof for each framework
@pytest.mark.parametrize("data", ["arrays", "dataset", "weighted", "drawn"])
def test_broken_off_at_the_same_world_size_it_is_the_undisturbed_run(life: Life, data: str) -> None:
    """Bit for bit, with random layers and moving averages; and all ranks have the same model and history."""
    calm = life(2, "calm", data=data)
    broken = [life(2, "broken", crash, data=data) for crash in (5, 12, None)]
    assert [[one["restored"] for one in found] for found in broken] == [[None] * 2, [4] * 2, [11] * 2]
    for one in (calm[1], *broken[-1]):
        assert differ(one, calm[0]) == []


@pytest.mark.deep
@pytest.mark.parametrize("data", ["arrays", "numbered"])
def test_from_two_to_one_to_three_it_is_the_run_of_one(life: Life, data: str) -> None:
    """The same samples in each step, weighted equally also in the short last one; weights within 1e-6 (float32)."""
    (single,) = life(1, "single", plain=True, data=data)
    resized = [life(world, "resized", crash, plain=True, data=data) for world, crash in ((2, 5), (1, 11), (3, None))]
    assert [found[0]["restored"] for found in resized] == [None, 4, 10]
    for last in resized[-1]:
        assert last["trace"] == single["trace"]
        assert near(last["weights"], single["weights"])
        assert near(last["history"]["loss"], single["history"]["loss"])
        assert near(last["history"]["accuracy"], single["history"]["accuracy"])
    assert [len(row) for row in single["trace"]] == [8, 8, 8, 8, 8, 5] * 3


@pytest.mark.deep
@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_without_samples_takes_part_with_weight_0(life: Life, world: int) -> None:
    """Batches of 11 of 45 samples: the last one of an epoch has one sample, which one of the ranks trains on. The same
    samples in each step, weighted equally, and the metrics of all.
    """
    (single,) = life(1, "single", plain=True, batch=11, epochs=1)
    assert [len(row) for row in single["trace"][:5]] == [11, 11, 11, 11, 1]
    for one in life(world, "several", plain=True, batch=11, epochs=1):
        assert one["trace"] == single["trace"]
        assert near(one["weights"], single["weights"])
        assert near(one["history"]["loss"], single["history"]["loss"])
        assert near(one["history"]["accuracy"], single["history"]["accuracy"])
