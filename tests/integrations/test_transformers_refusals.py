"""What a Trainer cannot do with the hooks is refused, with what works instead; and what the adapter relies on."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import Trainer

from dlrover_hooks.data.leased.shard_dataset import ShardDataset
from dlrover_hooks.errors import UsageError
from dlrover_hooks.integrations.transformers import _private_api as private, elastic_trainer
from tests import ranks
from tests.integrations.transformers_cases import Crash, Texts, Watched, made

pytestmark = [pytest.mark.usefixtures("fresh_accelerate"), pytest.mark.filterwarnings("ignore")]


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (Texts()[index] for index in range(4))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "auto_find_batch_size": ({"auto_find_batch_size": True}, "per_device_train_batch_size"),
    "split_batches": ({"accelerator_config": {"split_batches": True}}, "global_batch_size="),
    "an IterableDataset": ({"max_steps": 2, "trainer": {"train_dataset": Stream}}, "map-style dataset"),
    "a ShardDataset": ({"max_steps": 2, "trainer": {"train_dataset": lambda: ShardDataset(Texts())}}, "dataset itself"),
    "batches by length": ({"train_sampling_strategy": "group_by_length"}, "'sequential'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_with_what_works_instead(what: str, tmp_path: Path, job: str) -> None:
    options, instead = REFUSED[what]
    with pytest.raises(UsageError) as caught:
        made(tmp_path, job, **options).train()
    assert instead in str(caught.value)


def test_a_training_is_one_job(tmp_path: Path, job: str) -> None:
    trainer = made(tmp_path, job, max_steps=1)
    with pytest.raises(UsageError, match="elastic already"):
        elastic_trainer(trainer, job=job)
    trainer.train()
    with pytest.raises(UsageError, match="another job="):
        trainer.train()
    with pytest.raises(UsageError, match="'process', 'restart'"):
        elastic_trainer(made(tmp_path, job, hook=False), recover="never")


def test_launched_again_a_finished_job_trains_nothing(tmp_path: Path, job: str) -> None:
    saved = {"save_to": str(tmp_path / "saved")}
    first, second = (made(tmp_path, job, max_steps=3, shared=saved) for _ in range(2))
    first.train()
    second.train()
    assert second.seen == []
    assert second.state.global_step == 3
    torch.testing.assert_close(second.model.state_dict(), first.model.state_dict(), rtol=0, atol=0)  # pyright: ignore[reportOptionalMemberAccess]


def test_disabled_it_is_the_trainer(tmp_path: Path, job: str) -> None:
    trainer = made(tmp_path, job, hook=False)
    assert elastic_trainer(trainer, disable=True) is trainer
    assert type(trainer) is Watched
    assert not hasattr(trainer, "elastic")


def test_the_loader_may_be_looked_at(tmp_path: Path, job: str) -> None:
    trainer = made(tmp_path, job, max_steps=1)
    assert len(trainer.get_train_dataloader()) == 11
    assert isinstance(trainer, Watched)
    assert "loss" in trainer.evaluate() or "eval_loss" in trainer.evaluate()


def steps(trainer: Watched) -> list[int]:
    return [step for _, step, _ in trainer.seen]


@pytest.mark.deep
def test_a_checkpoint_of_trainers_own_is_taken_if_it_is_newer(
    tmp_path: Path, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And its data goes on where it was, without skipping batches."""
    caplog.set_level(logging.INFO, "dlrover_hooks")
    whole = made(tmp_path / "out", f"{job}-calm", save_strategy="steps", save_steps=4, max_steps=9)
    whole.train()
    checkpoint = str(tmp_path / "out" / "checkpoint-8")
    other = made(tmp_path / "new", f"{job}-other", save_strategy="steps", save_steps=4, max_steps=9)
    other.train(resume_from_checkpoint=checkpoint)
    assert other.seen == whole.seen[-1:]
    torch.testing.assert_close(other.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)  # pyright: ignore[reportOptionalMemberAccess]
    assert other.elastic.step == 9  # pyright: ignore[reportAttributeAccessIssue]
    for crash, given, begun in ((3, None, 0), (9, checkpoint, 8), (10, str(tmp_path / "out" / "checkpoint-4"), 9)):
        trainer = made(tmp_path / "third", f"{job}-third", crash, max_steps=10)
        if crash < 10:
            with pytest.raises(Crash):
                trainer.train(resume_from_checkpoint=given)
        else:
            trainer.train(resume_from_checkpoint=given)
        assert min(steps(trainer)) == begun
    assert f"resumes from {checkpoint}: the job's own checkpoint is of step 3" in caplog.text


OVERRIDDEN = {name for name, value in vars(private._ElasticLoop).items() if inspect.isfunction(value)}


@pytest.mark.parametrize("name", sorted(OVERRIDDEN))
def test_what_is_overridden_is_there(name: str) -> None:
    """With the arguments that the adapter names."""
    theirs, ours = (inspect.signature(getattr(cls, name)).parameters for cls in (Trainer, private._ElasticLoop))
    named = [one for one, kind in ours.items() if kind.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert [one for one in theirs][: len(named)] == named
    if name == "_run_epoch":
        wanted = {"epoch", "train_dataloader", "resume_from_checkpoint", "steps_trained_in_current_epoch"}
        assert wanted | {"num_update_steps_per_epoch", "trial", "ignore_keys_for_eval", "start_time"} <= set(theirs)


def test_the_private_attributes_are_there(tmp_path: Path, job: str) -> None:
    """Those that a training makes, after it."""
    trainer = made(tmp_path, job, max_steps=1, patience=1, eval_strategy="steps", metric_for_best_model="loss",
                   load_best_model_at_end=True, save_steps=1, eval_steps=1, save_strategy="steps")  # fmt: skip
    trainer.train()
    counters = private.loss_counters(trainer)
    assert set(counters) == {"loss", "logged", "flos"}
    private.set_loss_counters(trainer, counters | {"loss": torch.tensor(2.0)})
    assert private.loss_counters(trainer)["loss"] == 2.0
    assert private.loss_divisor(trainer, torch.tensor(3)) == 0
    assert private.loss_divisor(trainer, None) == 1
    (stopping,) = private.stateful_callbacks(trainer)
    stopping.early_stopping_patience_counter = 5
    private.refresh_callback_states(trainer)
    states: Any = trainer.state.stateful_callbacks
    assert states["EarlyStoppingCallback"]["attributes"] == {"early_stopping_patience_counter": 5}
    private.leave_round(trainer)
    assert trainer.model_wrapped is trainer.model
    assert type(trainer.optimizer) is torch.optim.AdamW
    before = trainer.accelerator
    private.enter_round(trainer)
    assert trainer.accelerator is not before


def test_a_missing_extra_is_named() -> None:
    code = "import sys; sys.modules['transformers'] = None; import dlrover_hooks.integrations.transformers"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env=ranks.environments(1)[0]
    )
    assert done.returncode == 1
    assert "ImportError: Transformers is not installed: pip install 'dlrover-hooks[transformers]'" in done.stderr
