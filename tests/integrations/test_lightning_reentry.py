"""What a fit that is entered again needs of Lightning, one contract per function of `_lightning_private`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from dlrover_hooks.errors import UsageError
from dlrover_hooks.integrations.lightning import ElasticCallback, _private_api as private
from dlrover_hooks.integrations.lightning.fresh_attributes import FreshAttributes
from tests.integrations.test_lightning_private_api import At, Net, trainer

pytestmark = pytest.mark.filterwarnings("ignore")


class Validated(Net):
    """`validated`: at how many steps. `fails_at`: what its training step raises there."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.validated, self.fails_at = list[int](), fails_at

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.fails_at:
            raise RuntimeError("lost")
        return super().training_step(batch, batch_idx)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not batch_idx:
            self.validated.append(self.global_step)


def test_progress_that_is_put_back_is_no_restart() -> None:
    """A Trainer that failed in its second epoch trains and validates as a new one does."""
    model = Validated(fails_at=6)
    kept = At("setup", lambda trainer: copy.deepcopy(private.progress(trainer)))
    made = trainer(kept, max_epochs=2, num_sanity_val_steps=0)
    with pytest.raises(RuntimeError, match="lost"):
        made.fit(model)
    assert model.validated == [4]
    private.set_progress(made, kept.found[0])
    again = Validated()
    made.fit(again)
    assert (made.global_step, len(again.seen), again.validated) == (8, 16, [4, 8])


@pytest.mark.parametrize(("every", "step"), [(1.0, 4), (2, 2)])
@pytest.mark.parametrize("owed", [True, False])
def test_a_validation_is_owed(every: float, step: int, owed: bool) -> None:
    """And without the mark Lightning leaves out the validation that had begun: that is why there is one."""
    taken: list[dict[str, Any]] = []

    class Take(Callback):
        def on_validation_start(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == step and not taken:
                taken.append(private.dump(trainer))

    options: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 0, "val_check_interval": every}
    trainer(Take(), **options).fit(Validated())
    if owed:
        private.owe_validation(taken[0])
    model, counts = Validated(), list[tuple[int, int]]()

    class Begins(Callback):
        def on_validation_start(self, trainer: Trainer, *_: Any) -> None:
            private.validation_begins(trainer)
            total: Any = trainer.fit_loop.epoch_loop.val_loop.batch_progress.total
            counts.append((total.ready, total.processed))

    resume = At("setup", lambda trainer: private.resume_from(trainer, taken[0], lambda *_: True))
    trainer(resume, Begins(), **options).fit(model)
    wanted = list(range(step, 9, 4 if every == 1.0 else 2))
    assert model.validated == (wanted if owed else wanted[1:])
    assert all(ready == processed for ready, processed in counts)


def environ(monkeypatch: pytest.MonkeyPatch, rank: int, local_rank: int, world: int) -> None:
    place = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")


def test_follow_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local rank 2 of 3 becomes rank 1 of 2, and rank 2 of 3 again: validation data is shared out to as many."""
    environ(monkeypatch, 2, 2, 3)
    made = trainer(strategy="ddp", devices=3)
    strategy, devices = made.strategy, made.strategy.parallel_devices  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(strategy, DDPStrategy)
    private.follow_world(made)
    assert strategy.parallel_devices is devices, "nothing is touched in the world that it was made for"
    for rank, world in ((1, 2), (0, 1), (2, 3)):
        environ(monkeypatch, rank, 2, world)
        private.follow_world(made)
        assert strategy.distributed_sampler_kwargs == {"num_replicas": world, "rank": rank}
        assert strategy.root_device == torch.device("cpu")
        assert (made.world_size, made.num_nodes * made.num_devices) == (world, world)
        assert strategy.launcher is not None
        assert strategy.launcher.launch(lambda: "runs here", trainer=None) == "runs here"
    assert isinstance(strategy.cluster_environment, TorchElasticEnvironment)


def test_one_device_has_no_world_to_follow() -> None:
    made = trainer()
    private.follow_world(made)
    assert made.world_size == 1


def test_recover_is_one_of_two_words() -> None:
    with pytest.raises(UsageError, match=r"recover='proces'.*\n.*'process', 'restart'"):
        ElasticCallback(recover="proces")


def test_fit_is_left_alone_where_nothing_can_be_recovered() -> None:
    fit = Trainer.fit
    ElasticCallback()
    assert Trainer.fit is fit


def test_lightnings_way_into_the_wrapped_model_is_closed() -> None:
    """A fault within DDP leaves it open. A `forward` that the user has put there stays."""
    for own in ({}, {"forward": lambda *_: None}):
        model = Validated()
        vars(model).update(own)
        fresh = FreshAttributes(trainer(), model)
        vars(model)["forward"] = model.training_step
        fresh.let_go()
        assert {name: value for name, value in vars(model).items() if name == "forward"} == own
