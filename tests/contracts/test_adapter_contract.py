"""The promises of data and checkpoint, the same for every adapter.

The trials run in as few processes as can be: one alone, then two, three and one again for the job that is resized.
What they did is judged here. A new framework: its `<framework>_trial.py`, and its name in `FRAMEWORKS`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.contracts.report import EVALUATED
from tests.contracts.spawn import HERE, by_step, plan, spawn, survived
from tests.deep import deep
from tests.e2e.master_process import LiveMaster
from tests.ranks import named_job

pytestmark = [pytest.mark.timeout(1200), pytest.mark.deep]  # the first test of a fixture waits for all trials
Lives = Callable[[str, str], list[dict[str, Any]]]

ALONE: dict[str, dict[str, Any]] = {
    "accumulate": {"accumulate": 2},
    "short window": {"accumulate": 3, "samples": 21},
    "leave": {"leave": 7},
}
LOADERS: dict[str, Any] = {"second": 31, "own": True, "accumulate": 2}
LEASED: dict[str, Any] = {"leased": True, "samples": 23, "epochs": 2}
LENDING = [name for name in HERE if name not in ("lightning", "transformers")]
"""The loops of the others refuse a ShardDataset, see test_lightning.py and test_transformers_refusals.py."""
SEVERAL = [name for name in HERE if name != "transformers"]
"""A Trainer has one training dataset."""
KERAS = ["keras-torch", "keras-jax", "keras-tensorflow"]
KERAS_ALONE = ("accumulate", "short window")
"""Keras' `fit` has one training set, and reads it to its end. Leased shards are in test_keras_leased.py."""
EVERY = [*HERE, "keras-torch", deep("keras-jax"), deep("keras-tensorflow")]
RESIZING = [*HERE, "keras-torch"]
BROKEN_OFF = [
    *((framework, name) for framework in HERE for name in ALONE),
    *((framework, "loaders") for framework in SEVERAL),
    *(("keras-torch", name) for name in KERAS_ALONE),
    *(deep(framework, name) for framework in KERAS[1:] for name in KERAS_ALONE),
]
TOGETHER: dict[str, Any] = {"noise": False, "samples": 31, "second": 17, "mute": True}
"""The second one ends the epoch with a step of one sample, beside a full step of the first."""
RESIZED: dict[str, Any] = {"noise": False, "epochs": 3, "samples": 23}
G = 8  # N = 4 micro-batches: two each for two ranks; two, one and one for three
STEPS = 9
RESIZES = ((2, 2, 2), (3, 1, 5), (1, 4, None))
"""(world size, what accumulate_grad_batches the user would write there, crash)."""


@pytest.fixture(scope="module")
def job() -> Iterator[str]:
    """A name for all jobs; whatever keeper they left behind is ended."""
    with named_job("contract") as name:
        yield name


@pytest.fixture(scope="module")
def alone(job: str) -> Lives:
    """Reports of a framework's lives in one process, by plan."""
    plans = [plan(f"{name} calm", job, given, [None]) for name, given in ALONE.items()]
    plans += [plan(name, job, given, "every") for name, given in ALONE.items()]
    plans += [plan("single", job, RESIZED | {"accumulate": 4}, [None])]
    plans += [plan("disabled", job, {"accumulate": 1}, [None], environ={"DLROVER_HOOKS_DISABLE": "1"})]
    of_keras = [f"{name}{calm}" for name in KERAS_ALONE for calm in ("", " calm")] + ["single", "disabled"]
    found = spawn(1, plans, frameworks=HERE)
    several = [plan("loaders calm", job, LOADERS, [None]), plan("loaders", job, LOADERS, "every")]
    several += [plan("together one", job, TOGETHER | {"accumulate": 4}, [None])]
    found += spawn(1, several, frameworks=SEVERAL)
    found += spawn(1, [plan("leased", job, LEASED, "every")], frameworks=LENDING)

    def lives(framework: str, name: str) -> list[dict[str, Any]]:
        if framework in KERAS and all(one["framework"] != framework for one in found):
            found.extend(
                spawn(1, [one for one in plans if json.loads(one)["name"] in of_keras], frameworks=[framework])
            )
        return [one for one in found if (one["framework"], one["plan"]) == (framework, name)]

    return lives


@pytest.fixture(scope="module")
def resized(job: str, tmp_path_factory: pytest.TempPathFactory) -> Lives:
    """Reports of every rank of a job that ran with two, then three workers, then one."""
    master = LiveMaster(tmp_path_factory.mktemp("master"))
    found: list[dict[str, Any]] = []
    try:
        for world, accumulate, crash in RESIZES:
            given_of_resized = RESIZED | {"accumulate": accumulate, "shared": {"global_batch_size": G}}
            rows = spawn(world, [plan("resized", job, given_of_resized, [crash])], master, HERE)
            if world == 2:
                given = TOGETHER | {"accumulate": 2, "shared": {"global_batch_size": G}}
                last = sorted(SEVERAL, key=lambda name: name == "accelerate")  # its end ends the process group
                rows += spawn(world, [plan("together two", job, given, [None])], master, last)
            rows += spawn(world, [plan("leased on", job, LEASED, [crash])], master, LENDING)
            rows += spawn(world, [plan("resized", job, given_of_resized, [crash])], master, ["keras-torch"])
            found += [row | {"world": world} for row in rows]
    finally:
        master.close()
    return lambda framework, name: [one for one in found if (one["framework"], one["plan"]) == (framework, name)]


@pytest.mark.parametrize(("framework", "name"), BROKEN_OFF)
def test_broken_off_in_every_step_it_is_the_undisturbed_run(framework: str, name: str, alone: Lives) -> None:
    """Bit for bit: weights, moments, learning rate, and every sample in its step; mid-epoch and at epoch ends."""
    (calm,), lives = alone(framework, f"{name} calm"), alone(framework, name)
    assert [life["restored"] for life in lives] == [None, *range(1, calm["step"])]
    assert survived(lives) == [tuple(one) for one in calm["seen"]]
    last = lives[-1]
    assert [key for key in ("step", "weights", "moments", "lr") if last[key] != calm[key]] == []


@pytest.mark.parametrize("framework", EVERY)
def test_no_sample_is_lost_or_trained_twice(framework: str, alone: Lives) -> None:
    """Over all lives, each id once in an epoch, the short last window included."""
    for name in ("accumulate", "short window"):
        samples = ALONE[name].get("samples", 23)
        visits = Counter((epoch, one) for epoch, _, _, one in survived(alone(framework, name)))
        assert visits == Counter((epoch, one) for epoch in range(2) for one in range(samples))


@pytest.mark.parametrize("framework", LENDING)
def test_leased_samples_are_trained_once_whatever_the_breaks(framework: str, alone: Lives) -> None:
    """Broken off in every step; what was trained since the cut is lent out again, nothing else."""
    lives = alone(framework, "leased")
    assert [life["restored"] for life in lives] == [None, *range(1, len(lives))]
    assert len(lives) > 23
    visits = Counter((epoch, one) for epoch, _, _, one in survived(lives))
    assert visits == Counter((epoch, one) for epoch in range(2) for one in range(23))


@pytest.mark.parametrize("framework", LENDING)
def test_leased_samples_are_trained_once_by_two_three_and_one(framework: str, resized: Lives) -> None:
    """In step under DDP; a rank without data repeats a batch with weight 0."""
    lives = resized(framework, "leased on")
    assert {(life["world"], life["restored"]) for life in lives} == {(2, None), (3, 2), (1, 5)}
    visits = Counter((epoch, one) for epoch, _, _, one in survived(lives))
    assert visits == Counter((epoch, one) for epoch in range(2) for one in range(23))


@pytest.mark.parametrize("framework", HERE)
def test_an_epoch_that_was_left_is_over(framework: str, alone: Lives) -> None:
    """`break` and `limit_train_batches`: the next epoch begins in its own order, after a restart too."""
    seen = survived(alone(framework, "leave"))
    visits = Counter((epoch, one) for epoch, _, _, one in seen)
    assert set(visits.values()) == {1}
    assert Counter(epoch for epoch, _ in visits) == {0: 14, 1: 14}


@pytest.mark.parametrize("framework", SEVERAL)
def test_several_loaders_have_one_cursor_each_in_one_cut(framework: str, alone: Lives) -> None:
    """The longer one is left in mid-epoch with the shorter; neither loses its place over a restart."""
    seen = survived(alone(framework, "loaders"))
    visits = Counter((epoch, loader, one) for epoch, _, loader, one in seen)
    assert set(visits.values()) == {1}
    assert Counter(loader for _, loader, _ in visits) == {"train": 46, "second": 48}


@pytest.mark.parametrize("framework", SEVERAL)
def test_a_loader_that_keeps_its_own_state_is_not_wrapped(framework: str, alone: Lives) -> None:
    """And its state belongs to the step, not to the batch that was fetched meanwhile: no number twice, none missing."""
    lives = alone(framework, "loaders")
    assert all(life["untouched"] for life in lives)
    own: list[int] = []
    for life in lives:
        own = own[: 2 * (life["restored"] or 0)] + life["own"]
    assert own == list(range(len(own)))
    assert len(own) == 24


@pytest.mark.parametrize("framework", EVERY)
def test_evaluation_loaders_are_left_alone(framework: str, alone: Lives) -> None:
    names = ["accumulate calm"] + ["leave calm"] * (framework in HERE) + ["loaders calm"] * (framework in SEVERAL)
    for name in names:
        (calm,) = alone(framework, name)
        assert calm["untouched"]
        assert calm["evaluated"] == [list(range(EVALUATED))] * 2


@pytest.mark.parametrize("framework", EVERY)
def test_disabled_it_does_nothing(framework: str, alone: Lives) -> None:
    """DLROVER_HOOKS_DISABLE=1: no seat, no cut, the framework's own loop."""
    (life,) = alone(framework, "disabled")
    assert not life["active"]
    visits = Counter((epoch, one) for epoch, _, _, one in life["seen"])
    assert visits == Counter((epoch, one) for epoch in range(2) for one in range(23))


@pytest.mark.parametrize("framework", RESIZING)
def test_resized_from_two_to_three_to_one_it_is_the_single_run(framework: str, alone: Lives, resized: Lives) -> None:
    """N = 4 micro-batches on 2, 3 and 1 ranks: the same samples in each step, each id once in an epoch, and weights
    within 1e-12 of one process (float64), short windows included.
    """
    (single,), lives = alone(framework, "single"), resized(framework, "resized")
    assert {(life["world"], life["restored"]) for life in lives} == {(2, None), (3, 2), (1, 5)}
    seen = survived(lives)
    assert by_step(seen) == by_step([tuple(one) for one in single["seen"]])
    assert set(Counter((epoch, one) for epoch, _, _, one in seen).values()) == {1}
    last = lives[-1]
    assert last["step"] == single["step"] == STEPS
    assert last["lr"] == single["lr"]
    assert max(abs(a - b) for a, b in zip(last["weights"], single["weights"], strict=True)) < 1e-12


@pytest.mark.parametrize("framework", SEVERAL)
def test_a_short_step_of_any_loader_is_weighed(framework: str, alone: Lives, resized: Lives) -> None:
    """The loader that ends its epoch with a short step leads, whichever it is: that step is made, the rank that has no
    sample in it only repeats one, though it has samples of the other loader, and weights are right to 1e-12.
    """
    (one,) = alone(framework, "together one")
    for lives in ([one], resized(framework, "together two")):
        assert {life["step"] for life in lives} == {6}
        assert all(
            max(abs(a - b) for a, b in zip(life["weights"], one["weights"], strict=True)) < 1e-12 for life in lives
        )
        seen = [(epoch, one) for life in lives for epoch, _, loader, one in life["seen"] if loader == "second"]
        assert Counter(seen) == Counter((epoch, one) for epoch in range(2) for one in range(17))


def test_gathered_metrics_have_no_padded_duplicates(resized: Lives) -> None:
    """Accelerate gathers 9 samples from two and from three processes as 9."""
    found = [ids for life in resized("accelerate", "resized") for ids in life["evaluated"]]
    assert found
    assert all(sorted(ids) == list(range(EVALUATED)) for ids in found)
