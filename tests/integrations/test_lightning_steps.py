"""What is kept of a `Trainer` at each step boundary is all that a whole cut has beside weights."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint, Timer
from lightning.pytorch.plugins.precision import Precision
from torch.utils.data import DataLoader, TensorDataset

from dlrover_hooks.integrations.lightning import ElasticCallback, _private_api as private
from dlrover_hooks.integrations.lightning.consistent_cut import cut, put_back, validating
from dlrover_hooks.integrations.lightning.state_beside_optimizer import StateBesideOptimizer
from dlrover_hooks.integrations.lightning.stateful_loaders import OwnLoaders
from tests.integrations.test_lightning_private_api import Net, trainer

pytestmark = pytest.mark.filterwarnings("ignore")
WEIGHTS = ("state_dict", "optimizer_states")


class Scaling(Precision):
    """With a state that changes in mid-step, as a GradScaler's does."""

    scale = 1

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale} if self.scale % 3 else {}

    def pre_backward(self, *args: Any) -> Any:
        self.scale += 1
        return super().pre_backward(*args)


class Drawn(DataLoader[Any]):
    """A stateful loader, as StatefulDataLoader is one."""

    fetched = 0

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            self.fetched += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"fetched": self.fetched}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fetched = state["fetched"]


class Data(LightningDataModule):
    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own, self.calls, self.lists = own, 0, list[int]()

    def train_dataloader(self) -> DataLoader[Any]:
        return (Drawn if self.own else DataLoader)(TensorDataset(torch.arange(8.0)[:, None]), batch_size=1)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.arange(2.0)[:, None]), batch_size=1)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls += 1
        self.lists.append(self.calls)
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls, "lists": self.lists}


class Scheduled(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("wrong", self.layer(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"},
                             {"scheduler": plateau, "monitor": "wrong"}]  # fmt: skip


class Counts(Callback):
    """Changes its state in mid-step."""

    def __init__(self) -> None:
        self.seen = list[int]()

    def on_before_backward(self, trainer: Trainer, *_: Any) -> None:
        self.seen.append(trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}


class Compares(Callback):
    """First of all, as `ElasticCallback` is: takes the light one and a whole one, and puts them over a later cut."""

    def __init__(self) -> None:
        self.compared = list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]()
        self._own: OwnLoaders | None = None
        self._taken: Any = None

    def setup(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        private.come_first(trainer, self)
        self._own = OwnLoaders(trainer)
        private.before_each_fetch(trainer, self._own.note)

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        assert self._own is not None
        for loader in private.stateful_loaders(trainer):
            self._own.add(loader)
        self.beside = StateBesideOptimizer(trainer, self._own, None)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._compare(trainer)
        self._taken = copy.deepcopy((self.beside.take(), self._cut(trainer)))

    def on_before_backward(self, trainer: Trainer, *_: Any) -> None:
        self._compare(trainer)

    def on_after_backward(self, trainer: Trainer, *_: Any) -> None:
        self._compare(trainer)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._compare(trainer)

    def on_validation_start(self, trainer: Trainer, *_: Any) -> None:
        self._compare(trainer)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        self._compare(trainer)

    def _compare(self, trainer: Trainer) -> None:
        if self._taken is not None:
            kept, whole = copy.deepcopy(self._taken)
            later = self._cut(trainer)
            self.compared.append((self.beside.put_over(copy.deepcopy(later), kept), whole, later))

    def _cut(self, trainer: Trainer) -> dict[str, Any]:
        made = cut(trainer, self._own, None)
        made["lightning"] = {key: value for key, value in made["lightning"].items() if key not in WEIGHTS}
        return made


@pytest.mark.parametrize("own", [False, True])
def test_a_later_cut_is_made_that_of_the_boundary(tmp_path: Path, own: bool) -> None:
    """At every place of a step, over epochs, with all that Lightning keeps a state of."""
    compares = Compares()
    many: list[Callback] = [
        Counts(),
        EarlyStopping("wrong", patience=99),
        ModelCheckpoint(tmp_path, monitor="wrong", save_top_k=2),
        ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1),
    ]
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "max_epochs": 3, "enable_checkpointing": True,
                               "val_check_interval": 4, "num_sanity_val_steps": 0, "plugins": [Scaling()]}  # fmt: skip
    trainer(*many, compares, **options).fit(Scheduled(), datamodule=Data(own))
    assert len(compares.compared) > 100
    for made, whole, _ in compares.compared:
        assert made == whole
    lights = [(whole["lightning"], later["lightning"]) for _, whole, later in compares.compared]
    changed = {key for whole, later in lights for key in whole if whole[key] != later.get(key)}
    assert changed >= {"epoch", "global_step", "loops", "callbacks", "lr_schedulers", "Scaling", "Data"}
    assert any(whole["saved_at"] != later["saved_at"] for _, whole, later in compares.compared)


def test_time_and_the_end_are_kept_too() -> None:
    """A callback's time goes on, a fit is stopped."""
    found = list[tuple[Any, Any]]()
    timer = Timer()

    class Looks(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            beside = StateBesideOptimizer(trainer, None, None)
            trainer.should_stop = True
            kept, elapsed = copy.deepcopy(beside.take()), timer.state_dict()
            trainer.should_stop = False
            made = beside.put_over(cut(trainer, None, None), kept)
            found.append((made["stopped"], made["lightning"]["callbacks"]["Timer"]["time_elapsed"]["train"]))
            assert elapsed["time_elapsed"]["train"] >= found[-1][1]

    made = trainer(timer, Looks())
    made.fit(Net())
    assert len(found) == 4
    assert {stopped == [1, -1] for stopped, _ in found} == {True}


def test_what_a_validation_keeps_is_put_back_whole() -> None:
    taken = list[Any]()

    class Takes(Callback):
        def on_validation_start(self, trainer: Trainer, *_: Any) -> None:
            taken.append(copy.deepcopy(validating(trainer, None)))

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if taken:
                made = StateBesideOptimizer(trainer, None, None).put_over(now := cut(trainer, None, None), taken[0])
                assert made == put_back(now, taken[0])
                assert made["lightning"]["global_step"] == 8
                taken.append(made)

    trainer(Takes(), max_epochs=2, num_sanity_val_steps=0).fit(Scheduled(), datamodule=Data(own=False))
    assert len(taken) > 2


class Adds(Net):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = 1


class Saves(Precision):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = 1


class AddsToo(Callback):
    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = 1


class Mine(ElasticCallback):
    """Has no hook but the inherited one."""


NO_HOOK: Any = functools.partial(LambdaCallback, on_fit_end=lambda *_: None)
HOOK: Any = functools.partial(LambdaCallback, on_save_checkpoint=lambda *_: None)


@pytest.mark.parametrize(
    ("model", "callback", "precision", "name"),
    [
        (Net, Mine, Precision, ""),
        (Net, NO_HOOK, Precision, ""),
        (Adds, Mine, Precision, "Adds"),
        (Net, AddsToo, Precision, "AddsToo"),
        (Net, HOOK, Precision, "LambdaCallback"),
        (Net, Mine, Saves, "Saves"),
    ],
)
def test_hooks_that_add_to_checkpoints_are_found(model: Any, callback: Any, precision: Any, name: str) -> None:
    """Where one is, the light one does not go with a cut of another time, unless nothing has run since."""
    made = trainer(callback(), plugins=[precision()])
    made.strategy._lightning_module = model()
    assert private.adds_to_checkpoints(made) == name
    beside = StateBesideOptimizer(made, None, None)
    kept = beside.take()
    assert name in beside.lost(kept)
    assert bool(name) == bool(beside.lost(kept))
    assert beside.lost({"lightning": {}}) == ""
    beside.rests = True
    assert beside.lost(kept) == ""
    beside.take()
    assert bool(beside.lost(kept)) == bool(name)


def test_a_loop_with_a_state_of_its_own_is_found() -> None:
    made = trainer()
    made.strategy._lightning_module = Net()
    loop = made.fit_loop.epoch_loop

    class Another(type(loop)):
        def on_save_checkpoint(self) -> dict[str, Any]:
            return {}

    cast(Any, loop).__class__ = Another
    assert private.adds_to_checkpoints(made) == "Another"
