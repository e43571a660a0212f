"""What a Lightning run meets when it is started again: an epoch's end, limits, callbacks."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from dlrover_hooks.errors import UsageError
from dlrover_hooks.integrations.lightning import ElasticCallback

pytestmark = pytest.mark.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Crash(Exception):
    pass


class Numbers(Dataset):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([index / 20, 1.0, 0.5]), index


class Net(LightningModule):
    """`seen`: (epoch, step, ids) of every batch; `validated`: steps at which a validation began."""

    def __init__(self, crash_at: int | None = None) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 1))
        self.crash_at, self.seen, self.validated = crash_at, list[tuple[int, int, tuple[int, ...]]](), list[int]()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.crash_at == self.global_step:
            raise Crash
        self.seen.append((self.current_epoch, self.global_step, tuple(batch[1].tolist())))
        return (self.layers(batch[0]) - 1).square().mean()

    def on_validation_start(self) -> None:
        if not self.trainer.sanity_checking:
            self.validated.append(self.global_step)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("flat", torch.tensor(1.0))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Begun(Callback):
    """The epochs for which `on_train_epoch_start` was called."""

    def __init__(self) -> None:
        self.epochs = list[int]()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.epochs.append(trainer.current_epoch)


def loader() -> DataLoader[Any]:
    return DataLoader(Numbers(), batch_size=4, shuffle=True)


def trainer(*callbacks: Callback, **options: Any) -> Trainer:
    seed_everything(1, verbose=False)
    given = {"max_epochs": 2, "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False,
             "enable_progress_bar": False, "enable_model_summary": False} | options  # fmt: skip
    return Trainer(callbacks=list(callbacks), **given)


def fit(job: str, *callbacks: Callback, crash_at: int | None = None, ckpt_path: Any = None, elastic: Any = None,
        before: tuple[Callback, ...] = (), kind: type[Net] = Net, **options: Any) -> Net:  # fmt: skip
    given: dict[str, Any] = {"save_every": 1} | (elastic or {})
    hook = ElasticCallback(job=job, **given)
    made = trainer(*before, hook, *callbacks, **options)
    model = kind(crash_at)
    try:
        made.fit(model, loader(), DataLoader(Numbers(), batch_size=20), ckpt_path=ckpt_path)
    except Crash:
        assert crash_at is not None
    return model


def lived(before: Net, after: Net) -> list[tuple[int, int, tuple[int, ...]]]:
    return [seen for seen in before.seen if seen[1] < after.seen[0][1]] + after.seen


def equal(a: Net, b: Net) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize("limit", [{}, {"limit_train_batches": 3}])
def test_a_checkpoint_of_an_epochs_end_goes_on_with_the_next_epoch(job: str, tmp_path: Path, limit: Any) -> None:
    """ModelCheckpoint's default; Lightning does not load the loaders' states of such a file by itself."""
    calm = fit(f"{job}-calm", max_epochs=3, **limit)
    files = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    first = fit(f"{job}-first", files, max_epochs=1, enable_checkpointing=True, **limit)
    second = fit(f"{job}-second", max_epochs=3, ckpt_path=tmp_path / "last.ckpt", **limit)
    assert first.seen + second.seen == calm.seen


def test_a_checkpoint_of_an_epochs_last_step_is_followed_by_a_whole_epoch(job: str, tmp_path: Path) -> None:
    """Lightning alone takes that epoch for the rest of the one before, and does not call `on_train_epoch_start`."""
    calm = fit(f"{job}-calm", max_epochs=3)
    files = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=5, save_top_k=-1, filename="{step}")
    first = fit(f"{job}-first", files, max_epochs=1, enable_checkpointing=True)
    second = fit(f"{job}-second", begun := Begun(), max_epochs=3, ckpt_path=tmp_path / "step=5.ckpt")
    assert first.seen + second.seen == calm.seen
    assert begun.epochs == [1, 2]


def test_a_finished_run_of_cut_short_epochs_goes_on_with_a_new_one(job: str, tmp_path: Path) -> None:
    calm = fit(f"{job}-calm", max_epochs=3, limit_train_batches=3)
    options: dict[str, Any] = {"limit_train_batches": 3, "elastic": {"save_to": str(tmp_path / "saved")}}
    first, second = fit(job, max_epochs=1, **options), fit(job, max_epochs=3, **options)
    assert first.seen + second.seen == calm.seen


@pytest.mark.parametrize("every", [1, 100])
def test_a_finished_run_continued_is_the_longer_run(job: str, tmp_path: Path, every: int) -> None:
    """Bit for bit, dropout included, whenever the last snapshot before the end was."""
    calm = fit(f"{job}-calm", max_epochs=4)
    elastic = {"save_to": str(tmp_path / "saved"), "save_every": every}
    fit(job, elastic=elastic)
    assert equal(fit(job, max_epochs=4, elastic=elastic), calm)


def test_a_run_stopped_early_is_finished(job: str, tmp_path: Path) -> None:
    """Started again it trains nothing; with a higher limit it is asked again."""
    options: dict[str, Any] = {"elastic": {"save_to": str(tmp_path / "saved")}, "max_epochs": 9}
    first = fit(job, EarlyStopping("flat", patience=1), **options)
    assert len(first.seen) == 10
    again = fit(job, EarlyStopping("flat", patience=1), **options)
    assert again.seen == []
    assert equal(first, again)
    options["max_epochs"] = 3
    assert fit(job, **options).seen != []


@pytest.mark.parametrize("named", [True, False])
def test_fit_again_on_one_trainer_goes_on_in_the_data(job: str, named: bool) -> None:
    """api.md 7: the same Trainer, after a normal end, in the middle of an epoch; no checkpoint is needed for it."""
    calm = Net()
    trainer(max_steps=8, max_epochs=10).fit(calm, loader())
    model, elastic = Net(), ElasticCallback(save_every=1, job=job if named else None)
    made = trainer(elastic, max_steps=3, max_epochs=10)
    made.fit(model, loader())
    made.fit_loop.epoch_loop.max_steps = 8
    made.fit(model, loader())
    ids = [index for _, step, batch in model.seen if step < 5 for index in batch]
    assert sorted(ids) == list(range(20))
    assert [step for _, step, _ in model.seen] == list(range(8))


@pytest.mark.parametrize("rows", [20, 11])
def test_another_trainer_with_the_same_callback_starts_anew(rows: int) -> None:
    """Folds of a cross-validation: neither the place nor the length of the fold before is of interest."""
    calm, shared = Net(), ElasticCallback()
    few: Any = torch.utils.data.Subset(Numbers(), range(rows))
    trainer(ElasticCallback()).fit(calm, DataLoader(few, 4, shuffle=True))
    trainer(shared).fit(Net(), loader())
    model = Net()
    trainer(shared).fit(model, DataLoader(few, 4, shuffle=True))
    assert model.seen == calm.seen


def test_the_same_trainer_may_go_on_with_other_data(caplog: pytest.LogCaptureFixture) -> None:
    made, model = trainer(ElasticCallback()), Net()
    made.fit(model, loader())
    made.fit_loop.max_epochs = 3
    model.seen.clear()
    few: Any = torch.utils.data.Subset(Numbers(), range(11))
    made.fit(model, DataLoader(few, 4, shuffle=True))
    assert sorted(index for _, _, ids in model.seen for index in ids) == list(range(11))
    assert "not that of the fit before" in caplog.text


def test_validation_by_total_batches_stays_where_it_was(job: str) -> None:
    """`check_val_every_n_epoch=None`: the count of all batches must not be one ahead after a restore."""
    options: dict[str, Any] = {"val_check_interval": 3, "check_val_every_n_epoch": None}
    calm = fit(f"{job}-calm", **options)
    before, after = fit(job, crash_at=4, **options), fit(job, crash_at=7, **options)
    last = fit(job, **options)
    assert calm.validated == [3, 6, 9]
    assert [*before.validated, *after.validated, *last.validated] == calm.validated
    assert equal(last, calm)


class Endless(IterableDataset):
    """Of unknown length, so that Lightning fetches a batch ahead."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        return (Numbers()[index] for index in range(20))


def fit_stateful(job: str, data: Any, crash_at: int | None = None, *, epochs: int = 2, **given: Any) -> Net:
    made = trainer(ElasticCallback(job=job, save_every=1, **given), max_epochs=epochs)
    shuffle = None if isinstance(data, IterableDataset) else True
    model, feed = Net(crash_at), StatefulDataLoader(data, batch_size=4, shuffle=shuffle)
    with contextlib.suppress(Crash):
        made.fit(model, feed)
    return model


@pytest.mark.parametrize("data", [Numbers(), Endless()])
@pytest.mark.parametrize("crash_at", [3, 5, 7])
def test_a_torchdata_loader_keeps_its_own_place(job: str, crash_at: int, data: Any) -> None:
    """It is not wrapped; its state is that of the step, though Lightning has asked it for the next batch by then."""
    calm = fit_stateful(f"{job}-calm", data)
    before, after = fit_stateful(job, data, crash_at), fit_stateful(job, data)
    assert after.seen[0][1] == crash_at
    assert lived(before, after) == calm.seen
    assert equal(after, calm)


@pytest.mark.parametrize("data", [Numbers(), Endless()])
def test_a_torchdata_loader_goes_on_in_a_longer_run(job: str, tmp_path: Path, data: Any) -> None:
    calm = fit_stateful(f"{job}-calm", data, epochs=3)
    first, second = (fit_stateful(job, data, epochs=epochs, save_to=str(tmp_path)) for epochs in (1, 3))
    assert first.seen + second.seen == calm.seen
    assert equal(second, calm)


class Batches(Callback):
    """Counts batches, and keeps the count in checkpoints."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_a_callback_before_ours_counts_each_batch_once(job: str) -> None:
    """The cut is taken before any callback hears of the next batch."""
    fit(job, crash_at=3, before=(Batches(),))
    counting = Batches()
    fit(job, before=(counting,))
    assert counting.count == 10


def test_an_accumulation_schedule_goes_on_in_mid_epoch(job: str) -> None:
    """Lightning sets the factor at an epoch's start only, and forgets it when it resumes in one."""

    def schedule() -> GradientAccumulationScheduler:
        return GradientAccumulationScheduler({0: 1, 1: 2})

    calm = fit(f"{job}-calm", schedule(), max_epochs=3)
    before, after = fit(job, schedule(), crash_at=6, max_epochs=3), fit(job, schedule(), max_epochs=3)
    assert lived(before, after) == calm.seen
    assert equal(after, calm)


class Plateau(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "flat"}}


def test_a_plateau_is_seen_at_the_end_of_a_resumed_epoch(job: str) -> None:
    """Lightning leaves `ReduceLROnPlateau` out at the end of the epoch that it resumes in: the rate stayed too high."""
    options: dict[str, Any] = {"kind": Plateau, "max_epochs": 3}
    calm = fit(f"{job}-calm", **options)
    fit(job, crash_at=7, **options)
    assert equal(fit(job, **options), calm)


@pytest.mark.parametrize("crash_at", [6, 10])
def test_averaging_goes_on_in_a_resumed_epoch(job: str, crash_at: int) -> None:
    """SWA makes its scheduler where an epoch starts; Lightning does not say that of one that it resumes in."""

    def averaging() -> StochasticWeightAveraging:
        return StochasticWeightAveraging(0.01, swa_epoch_start=2, annealing_epochs=2)

    calm = fit(f"{job}-calm", averaging(), max_epochs=4)
    fit(job, averaging(), crash_at=crash_at, max_epochs=4)
    assert equal(fit(job, averaging(), max_epochs=4), calm)


class Exact(torch.optim.SGD):
    """Moments in float32 for parameters in bfloat16, as fused and low-precision optimizers keep them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = closure()
        for parameter in (one for group in self.param_groups for one in group["params"] if one.grad is not None):
            state = self.state[parameter]
            state["mean"] = 0.9 * state.get("mean", 0.0) + parameter.grad.float() / 3
            parameter -= (0.1 * state["mean"]).to(parameter.dtype)
        return loss


class Low(Net):
    def __init__(self, crash_at: int | None = None) -> None:
        super().__init__(crash_at)
        self.layers.to(torch.bfloat16)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step([batch[0].bfloat16(), batch[1]], batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Exact(self.parameters(), lr=0.1)


def test_moments_come_back_in_their_own_dtype(job: str) -> None:
    """`Optimizer.load_state_dict` casts them to the parameter's: the run would go on with rounded moments."""
    before, moments = fit(job, crash_at=7, kind=Low), list[torch.Tensor]()

    class Look(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            moments.extend([] if moments else [one["mean"].clone() for one in trainer.optimizers[0].state.values()])

    fit(job, Look(), kind=Low)
    kept = [state["mean"] for state in before.trainer.optimizers[0].state.values()]
    assert [one.dtype for one in moments] == [torch.float32] * len(kept)
    assert all(torch.equal(one, other) for one, other in zip(moments, kept, strict=True))


def test_devices_that_are_not_the_launchers_workers_are_refused(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU `devices="auto"` means one: each of the launcher's workers would train alone."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(UsageError) as refused:
        fit(job)
    assert "started 2 worker(s), but this Trainer has a world of 1" in str(refused.value)
    assert "WORLD_SIZE" in str(refused.value)
