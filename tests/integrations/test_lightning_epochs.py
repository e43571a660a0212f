"""ElasticCallback: the sampler goes in however a loader comes, and its place is that of the epoch."""

from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

from dlrover_hooks.data.loader import ElasticLoader
from dlrover_hooks.integrations.lightning import ElasticCallback
from tests.deep import deep
from tests.integrations.test_lightning import Crash, Net, Numbers, exactly_once, fit, surviving

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("kind", ["loader", "module", "datamodule", "dict"])
def test_the_sampler_goes_in_however_the_loader_comes(job: str, kind: str) -> None:
    """Through the trainer's data source: a loader, a collection, a module's or a DataModule's method."""
    from lightning.pytorch import LightningDataModule

    def make() -> DataLoader:
        return DataLoader(Numbers(), batch_size=4, shuffle=True)

    class WithLoader(Net):
        def train_dataloader(self) -> DataLoader:
            return make()

    class Module(LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            return make()

    class Named(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch["text"], batch_idx)

    kinds: dict[str, Callable[[], tuple[Net, dict[str, Any]]]] = {
        "loader": lambda: (Net(), {"train_dataloaders": make()}),
        "module": lambda: (WithLoader(), {}),
        "datamodule": lambda: (Net(), {"datamodule": Module()}),
        "dict": lambda: (Named(), {"train_dataloaders": {"text": make()}}),
    }
    model, given = kinds[kind]()
    found: list[Any] = []

    class Look(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            found.extend(trainer.fit_loop._combined_loader.flattened)  # pyright: ignore[reportOptionalMemberAccess]

    trainer = Trainer(max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
                      enable_progress_bar=False, callbacks=[ElasticCallback(job=job), Look()])  # fmt: skip
    trainer.fit(model, **given)
    assert [type(loader) for loader in found] == [ElasticLoader]
    assert exactly_once(model.seen, epochs=1)


@pytest.mark.parametrize("workers", [0, deep(2)])
@pytest.mark.parametrize("options", [{}, {"reload_dataloaders_every_n_epochs": 1}])
def test_worker_processes_and_reloaded_loaders_keep_the_place(
    job: str, workers: int, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """What DataLoader workers prefetched is not in the model: it is replayed. A reloaded loader takes the place."""

    class WithLoader(Net):
        def train_dataloader(self) -> DataLoader:
            return DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=workers)

    def run(model: Net) -> None:
        seed_everything(1, verbose=False)
        trainer = Trainer(max_epochs=3, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
                          enable_progress_bar=False, callbacks=[ElasticCallback(job=job, save_every=1)],
                          **options)  # fmt: skip
        trainer.fit(model)

    before, after = WithLoader(crash_at=7), WithLoader()
    with pytest.raises(Crash):
        run(before)
    run(after)
    assert after.seen[0][1] == 7
    assert exactly_once(surviving(before, after), epochs=3)
    assert "epochs(n)" not in caplog.text, "the Trainer counts epochs: there is no loop to be changed"


def test_the_learning_rate_finder_takes_no_data_from_the_run(job: str) -> None:
    """Its trial steps draw batches from the same loaders; the run then starts at the first position all the same."""
    from lightning.pytorch.callbacks import LearningRateFinder

    class Tunable(Net):
        def __init__(self) -> None:
            super().__init__()
            self.lr = 0.1

    class Begin(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            cast(Net, pl_module).seen.clear()

    model = Tunable()
    finder = LearningRateFinder(num_training_steps=7, early_stop_threshold=None)
    fit(model, ElasticCallback(job=job, save_every=1), callbacks=(finder, Begin()))
    assert exactly_once(model.seen)


def test_a_trial_of_the_tuner_is_no_training(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It calls `fit`: under a launcher the job was finished by that, and the fit behind it failed."""
    from lightning.pytorch.tuner import Tuner

    from dlrover_hooks.integrations.lightning import recovery as again

    class Tunable(Net):
        def __init__(self) -> None:
            super().__init__()
            self.lr = 0.1

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.layer(batch[0]).square().mean()

    ran: list[Trainer] = []
    monkeypatch.setattr(Trainer, "fit", Trainer.fit)
    again._wrap_fit()  # as under a launcher
    monkeypatch.setattr(again.FitRounds, "run", lambda self, trainer, fit: (ran.append(trainer), fit()))
    elastic, model = ElasticCallback(job=job, save_every=1), Tunable()
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        callbacks=[elastic],
    )  # fmt: skip
    loader = DataLoader(TensorDataset(torch.randn(8, 3)), 2, shuffle=True)
    Tuner(trainer).lr_find(model, loader, num_training=3, early_stop_threshold=None)
    assert ran == []
    trainer.fit(model, loader)
    assert ran == [trainer]
    assert trainer.global_step == 4


def test_an_epoch_cut_short_is_not_gone_back_to(job: str) -> None:
    """limit_train_batches=3 of 5: the next epoch begins at its start, over a restart too; no step is trained twice."""
    before, after = Net(crash_at=4), Net()
    with pytest.raises(Crash):
        fit(before, ElasticCallback(job=job, save_every=1), limit_train_batches=3)
    fit(after, ElasticCallback(job=job, save_every=1), limit_train_batches=3)
    calm = Net()
    fit(calm, None, limit_train_batches=3)
    seen = surviving(before, after)
    assert [seen.count(one) for one in seen] == [1] * len(seen)
    assert Counter(epoch for epoch, _, _ in seen) == Counter(epoch for epoch, _, _ in calm.seen) == {0: 12, 1: 12}


def test_mid_window_requests_are_no_quiet_points(job: str) -> None:
    """With accumulation the loop counts batches ahead of commits: a crash in mid-window replays the window."""

    class MidWindow(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.crash_at is not None and batch_idx == 3:
                raise Crash
            return super().training_step(batch, batch_idx)

    before, after = MidWindow(crash_at=99), Net()
    with pytest.raises(Crash):
        fit(before, ElasticCallback(job=job, save_every=1), accumulate_grad_batches=2)
    fit(after, ElasticCallback(job=job, save_every=1), accumulate_grad_batches=2)
    assert after.seen[0][1] == 1
    assert exactly_once(surviving(before, after))
