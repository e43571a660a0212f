"""Forged states with valid hashes, through Lightning, Accelerate and Fabric: the generation before is taken."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlrover_hooks.checkpoint.storage.catalog import MANIFEST
from tests.contracts import accelerate_trial, fabric_trial, lightning_trial
from tests.contracts.report import Given, Trial
from tests.integrations.test_forged import forge, other, without
from tests.ranks import left_of, named_job
from tests.waiting import until

pytestmark = [pytest.mark.usefixtures("fresh_accelerate"), pytest.mark.filterwarnings("ignore")]
TRIALS: dict[str, Trial] = {
    "lightning": lightning_trial.train,
    "accelerate": accelerate_trial.train,
    "fabric": fabric_trial.train,
}
Change = Callable[[dict[str, Any]], None]
ANY: dict[str, Change] = {
    "no state": without("state"),
    "no data": without("data"),
    "a state that is a list": other([], "state"),
    "a dataset that is a number": other(1, "data", "train"),
    "half a random state": other({"$tuple": [3, {"$tuple": [1, 2]}, None]}, "rank", "rng", "python"),
    "a random state that is a number": other(1, "rank", "rng"),
    "no random state": without("rank", "rng"),
    "a rank part that is a list": other([], "rank"),
    "classes that are a number": other(1, "state", "optimizer_classes"),
}
LOOP: dict[str, Change] = {
    "parts that are a list": other([], "state", "parts"),
    "models that are a number": other(1, "state", "parts", "model"),
    "a model that is a number": other([1], "state", "parts", "model"),
    "a model that is a list": other([[]], "state", "parts", "model"),
    "an optimizer that is a number": other([1], "state", "parts", "optimizer"),
    "an optimizer without state": without("state", "parts", "optimizer", 0, "state"),
    "a group without parameters": other([{"lr": 0.1}], "state", "parts", "optimizer", 0, "param_groups"),
    "groups that are numbers": other([1], "state", "parts", "optimizer", 0, "param_groups"),
    "a step below 0": other(-5, "state", "step"),
    "no step": without("state", "step"),
    "an epoch that is a text": other("one", "state", "epoch"),
    "an epoch that is half over": other("half", "state", "epoch_over"),
    "a world of 0": other(0, "state", "first_world"),
    "bucket orders that are a number": other(1, "state", "bucket_orders"),
    "a scheduler that is a number": other([1], "state", "parts", "scheduler"),
}
LIGHTNING: dict[str, Change] = {
    "no trainer": other(1, "state", "lightning"),
    "no model": without("state", "lightning", "state_dict"),
    "a model that is a list": other([], "state", "lightning", "state_dict"),
    "optimizers that are a number": other(1, "state", "lightning", "optimizer_states"),
    "an optimizer without state": without("state", "lightning", "optimizer_states", 0, "state"),
    "a group without parameters": other([{"lr": 0.1}], "state", "lightning", "optimizer_states", 0, "param_groups"),
    "no loops": without("state", "lightning", "loops"),
    "loops that are a list": other([], "state", "lightning", "loops"),
    "no fit loop": other({}, "state", "lightning", "loops"),
    "a fit loop that is a number": other(1, "state", "lightning", "loops", "fit_loop"),
    "an empty fit loop": other({}, "state", "lightning", "loops", "fit_loop"),
    "progress that is a number": other(1, "state", "lightning", "loops", "fit_loop", "epoch_progress"),
    "a step that is a text": other("one", "state", "lightning", "global_step"),
    "a step below 0": other(-5, "state", "lightning", "global_step"),
    "no epoch": without("state", "lightning", "epoch"),
    "an epoch that is a text": other("one", "state", "lightning", "epoch"),
    "no version": without("state", "lightning", "pytorch-lightning_version"),
    "a version that is a number": other(1, "state", "lightning", "pytorch-lightning_version"),
    "schedulers that are a number": other(1, "state", "lightning", "lr_schedulers"),
    "a scheduler that is a number": other([1], "state", "lightning", "lr_schedulers"),
    "callbacks that are a list": other([], "state", "lightning", "callbacks"),
    "bucket order that is a number": other(1, "state", "bucket_order"),
    "stopped by a text": other("yes", "state", "stopped"),
    "saved at a text": other("yes", "state", "saved_at"),
}
CASES = [
    pytest.param(adapter, change, id=f"{adapter}: {name}")
    for adapter, own in (("lightning", LIGHTNING), ("accelerate", LOOP), ("fabric", LOOP))
    for name, change in (ANY | own).items()
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By adapter, a run with two durable generations: one of a launch that crashes, and the last one."""
    found = dict[str, Path]()
    for adapter, train in TRIALS.items():
        url = found[adapter] = tmp_path_factory.mktemp(adapter) / "saved"
        with named_job(f"forged-{adapter}") as job:
            given = Given(job=job, shared={"save_to": str(url), "persist_every": 1, "keep": 2})
            assert train(given, 3).crashed
            until(lambda url=url: list(url.glob(f"step-*/{MANIFEST}")), f"a durable generation of {adapter}")
            assert not train(given, None).crashed
            until(lambda job=job: not left_of(job), "the end of the keeper, which writes no more")
        assert len(list(url.glob(f"step-*/{MANIFEST}"))) == 2
    return found


@pytest.mark.parametrize(("adapter", "change"), CASES)
def test_a_forged_state_is_corrupt_and_the_generation_before_is_taken(
    saved: dict[str, Path], tmp_path: Path, job: str, adapter: str, change: Change, caplog: pytest.LogCaptureFixture
) -> None:
    here = tmp_path / "saved"
    shutil.copytree(saved[adapter], here)
    older, newer = sorted(here.glob("step-*"))
    forge(newer, change)
    step = int(older.name.split("-")[1])
    with caplog.at_level(logging.WARNING, "dlrover_hooks"):
        report = TRIALS[adapter](Given(job=job, shared={"resume": str(here)}), step)
    assert report.crashed
    assert "cannot load" in caplog.text
    assert f"resumes step {step} " in caplog.text
