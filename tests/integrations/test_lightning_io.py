"""`FlashCheckpointIO`: Lightning's own files, written behind the step.

The first four are what Lightning's AsyncCheckpointIO got or gets wrong: files of mixed steps (its #20953), a queue
without a bound, errors that are told late or never, files that are not atomic.
"""

from __future__ import annotations

import os
import pickle  # noqa: TID251 -- what Lightning does with a Trainer
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

from dlrover_hooks.checkpoint.storage.atomic_files import whole_link
from dlrover_hooks.errors import StorageFailed
from dlrover_hooks.integrations.lightning import ElasticCallback, async_checkpoint_io
from dlrover_hooks.integrations.lightning.async_checkpoint_io import FlashCheckpointIO
from tests.disks import small_disk
from tests.ranks import ROOT, run

pytestmark = pytest.mark.filterwarnings("ignore")


class Numbers(Dataset):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index / 20, 1.0, 0.5])


class Net(LightningModule):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.layers(batch) - 1).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", (self.layers(batch) - 1).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def fit(io: FlashCheckpointIO | None, *callbacks: Callback, model: Net | None = None, **options: Any) -> Trainer:
    seed_everything(1, verbose=False)
    files = any(isinstance(one, ModelCheckpoint) for one in callbacks)
    given = {"max_epochs": 3, "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False,
             "enable_model_summary": False, "enable_checkpointing": files} | options  # fmt: skip
    ckpt_path = given.pop("ckpt_path", None)
    trainer = Trainer(callbacks=list(callbacks), plugins=[io] if io is not None else [], **given)
    data = DataLoader(Numbers(), batch_size=4)
    trainer.fit(model or Net(), data, data, ckpt_path=ckpt_path)
    return trainer


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return list(ours) == list(theirs) and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours == theirs


def held(io: FlashCheckpointIO) -> threading.Event:
    """What is saved from here on waits behind this event."""
    gate = threading.Event()
    io._started().add("held", lambda: gate.wait(60))
    return gate


def test_a_file_holds_one_step_whatever_happens_while_it_is_written(tmp_path: Path) -> None:
    io, weights, numbers = FlashCheckpointIO(), torch.zeros(1000), [1]
    gate = held(io)
    io.save_checkpoint({"weights": weights, "numbers": numbers, "global_step": 1}, tmp_path / "a.ckpt")
    weights.fill_(2)
    numbers.append(2)
    gate.set()
    loaded = io.load_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert not loaded["weights"].any()
    assert loaded["numbers"] == [1]
    io.teardown()


def test_no_more_than_two_saves_are_kept_in_memory(tmp_path: Path) -> None:
    io, state, saved = FlashCheckpointIO(), {"weights": torch.zeros(1000), "global_step": 1}, threading.Event()
    gate = held(io)
    for name in ("a", "b"):
        io.save_checkpoint(state, tmp_path / name)
    third = threading.Thread(target=lambda: (io.save_checkpoint(state, tmp_path / "c"), saved.set()))
    third.start()
    assert not saved.wait(0.1)
    gate.set()
    assert saved.wait(60)
    third.join()
    io.teardown()
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"]


def test_the_last_saves_error_is_raised_at_the_end_of_the_fit(tmp_path: Path) -> None:
    class Save(Callback):
        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            (tmp_path / "file").write_text("")
            trainer.save_checkpoint(tmp_path / "file" / "a.ckpt")

    with pytest.raises(StorageFailed, match=r"cannot write .*file/a.ckpt: "):
        fit(FlashCheckpointIO(), Save())
    fit(FlashCheckpointIO(on_error="warn"), Save())


def test_the_fits_own_error_is_not_hidden_behind_that_of_a_save(tmp_path: Path) -> None:
    class Fail(Callback):
        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            trainer.save_checkpoint("/proc/nowhere/a.ckpt")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(FlashCheckpointIO(), Fail())


KILLED = """
    import os, sys, threading
    import torch
    from dlrover_hooks.integrations.lightning.async_checkpoint_io import FlashCheckpointIO

    io = FlashCheckpointIO()
    io.save_checkpoint({"weights": torch.full((1 << 24,), 1.0), "global_step": 1}, sys.argv[1])
    io.load_checkpoint(sys.argv[1])
    io.save_checkpoint({"weights": torch.full((1 << 24,), 2.0), "global_step": 2}, sys.argv[1])
    print("saving", flush=True)
    threading.Event().wait()
"""


def test_a_link_follows_an_earlier_one_that_is_pending(tmp_path: Path) -> None:
    """Also where its own file is written already: Lightning would replace the link while the thread does."""
    first, second, last = (tmp_path / name for name in ("first.ckpt", "second.ckpt", "last.ckpt"))
    first.touch()
    second.touch()
    io = FlashCheckpointIO()
    gate = held(io)
    io._started().add(str(last), lambda: whole_link(str(first), str(last)))
    assert async_checkpoint_io._link_later(str(second), str(last))
    gate.set()
    io.teardown()
    assert last.resolve() == second
    assert not async_checkpoint_io._link_later(str(first), str(last)), "nothing is pending: Lightning links by itself"


@pytest.mark.deep
def test_a_killed_process_leaves_the_older_file_whole(tmp_path: Path) -> None:
    """Whatever the moment: the file is that of one save or of the other."""
    path = tmp_path / "last.ckpt"
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert process.stdout is not None
    assert process.stdout.readline() == "saving\n"
    process.kill()
    process.communicate()
    weights = torch.load(path, weights_only=True)["weights"]
    assert weights.min() == weights.max()
    assert weights[0] in (1, 2)


@pytest.mark.parametrize("save_last", [True, "link", None])
@pytest.mark.parametrize("top", [1, 2, -1])
def test_the_folder_is_lightnings_own(tmp_path: Path, save_last: Any, top: int) -> None:
    """Names, removals of `save_top_k`, the `last` copy or link, two ModelCheckpoints of the same names: as without us;
    and so are the files, whichever of the two reads them.
    """
    for name, io in (("ours", FlashCheckpointIO()), ("theirs", None)):
        best = ModelCheckpoint(tmp_path / name, monitor="loss", save_top_k=top, save_last=save_last, every_n_epochs=1)
        steps = ModelCheckpoint(tmp_path / name, every_n_train_steps=5, save_weights_only=True, save_last=save_last)
        trainer = fit(io, best, steps)
        assert Path(best.best_model_path).exists()
        assert Net.load_from_checkpoint(best.best_model_path).hparams["width"] == 4
        trainer.save_checkpoint(tmp_path / name / "own.ckpt")
        assert (tmp_path / name / "own.ckpt").exists()
    ours, theirs = (sorted(os.listdir(tmp_path / name)) for name in ("ours", "theirs"))
    assert ours == theirs
    for name in ours:
        one, other = (tmp_path / which / name for which in ("ours", "theirs"))
        assert one.is_symlink() == other.is_symlink()
        if one.is_symlink():
            assert os.readlink(one) == os.readlink(other)
        mine, yours = (torch.load(path, weights_only=False) for path in (one, other))
        for key in set(mine) - {"callbacks"}:  # they name their folder
            assert same(mine[key], yours[key]), key


@pytest.mark.parametrize("path", ["last", "best"])
def test_a_fit_goes_on_from_its_own_files(tmp_path: Path, path: str) -> None:
    """`ckpt_path="last"` and `"best"`, in the same process and behind a write that is slow."""
    whole, first = Net(), Net()
    first.load_state_dict(whole.state_dict())
    fit(None, ModelCheckpoint(tmp_path / "whole"), model=whole, max_epochs=4)
    files = ModelCheckpoint(tmp_path / "split", save_last=True, monitor="step", mode="max")
    trainer = fit(FlashCheckpointIO(), files, model=first, max_epochs=2)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(first, DataLoader(Numbers(), batch_size=4), DataLoader(Numbers(), batch_size=4), ckpt_path=path)
    assert trainer.global_step == 20
    assert same(whole.state_dict(), first.state_dict())


def test_model_checkpoint_is_as_it_was_when_nothing_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its class is changed from the first save of any plugin to the end of the last one, failed or not."""
    monkeypatch.setattr(async_checkpoint_io, "_alive", WeakSet())  # other tests' plugins may not have ended
    monkeypatch.setattr(async_checkpoint_io, "_undo", [])
    before = ModelCheckpoint.file_exists, ModelCheckpoint._link_checkpoint
    fit(FlashCheckpointIO(), ModelCheckpoint(tmp_path / "a"))
    assert (ModelCheckpoint.file_exists, ModelCheckpoint._link_checkpoint) == before
    one, other = FlashCheckpointIO(), FlashCheckpointIO()
    (tmp_path / "folder").mkdir()
    for io, name in ((one, "b.ckpt"), (other, "folder")):
        io.save_checkpoint({"global_step": 1}, tmp_path / name)
    one.teardown()
    assert ModelCheckpoint.file_exists is not before[0]
    with pytest.raises(StorageFailed):
        other.teardown()
    assert (ModelCheckpoint.file_exists, ModelCheckpoint._link_checkpoint) == before


def test_what_is_saved_after_a_fit_is_there_when_the_call_returns(tmp_path: Path) -> None:
    io = FlashCheckpointIO()
    trainer = fit(io)
    for name in ("a.ckpt", "b.ckpt"):
        trainer.save_checkpoint(tmp_path / name)
        assert Net.load_from_checkpoint(tmp_path / name)
    trainer.fit_loop.max_epochs = 5
    trainer.fit(Net(), DataLoader(Numbers(), batch_size=4))
    io.teardown()


def test_what_cannot_be_copied_is_written_within_the_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A generator can be neither copied nor pickled; Lightning's error, from the same call. A file object the same."""
    io = FlashCheckpointIO()
    with pytest.raises(TypeError, match="pickle"):
        io.save_checkpoint({"own": (one for one in ()), "global_step": 1}, tmp_path / "a.ckpt")
    assert "is written within the step" in caplog.text
    assert os.listdir(tmp_path) == []
    io.teardown()


def test_a_file_that_never_appeared_is_forgotten_after_a_restart(job: str, tmp_path: Path) -> None:
    """Killed while it was written: the cut behind it knows it already."""

    class Crash(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 12:
                raise ZeroDivisionError

    def files() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, monitor="loss", mode="max", save_top_k=2)

    first, second = files(), files()
    with pytest.raises(ZeroDivisionError):
        fit(FlashCheckpointIO(), ElasticCallback(job=job, save_every=1), first, Crash())
    Path(first.best_model_path).unlink()
    fit(FlashCheckpointIO(), ElasticCallback(job=job, save_every=1), second)
    assert len(second.best_k_models) == 2
    assert sorted(os.listdir(tmp_path)) == sorted(os.path.basename(path) for path in second.best_k_models)
    assert second.best_model_path in second.best_k_models


def test_storage_elsewhere_is_lightnings_own(tmp_path: Path) -> None:
    io = FlashCheckpointIO()
    io.save_checkpoint({"weights": torch.ones(3), "global_step": 1}, "memory://folder/a.ckpt")
    assert torch.equal(io.load_checkpoint("memory://folder/a.ckpt")["weights"], torch.ones(3))
    io.remove_checkpoint("memory://folder/a.ckpt")
    io.teardown()
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint("memory://folder/a.ckpt")


TRIAL = [sys.executable, "-m", "tests.integrations.lightning_io_trial"]
WARM = ("torch._dynamo", "dlrover_hooks.integrations.lightning")


@pytest.mark.deep
def test_several_processes_write_one_file(tmp_path: Path) -> None:
    """Rank 0 writes, all ranks read and go on."""
    ranks = run([*TRIAL, str(tmp_path)], 2, timeout_s=200, warm=WARM)
    assert all(rank["files"] == ["epoch=1-step=10.ckpt", "last.ckpt"] for rank in ranks)
    assert sorted(os.listdir(tmp_path)) == ["epoch=1-step=10.ckpt", "last.ckpt"]
    loaded = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert loaded["global_step"] == 10


def test_the_plugin_travels_to_spawned_processes(tmp_path: Path) -> None:
    """Lightning pickles the Trainer for `ddp_spawn`, also after a fit; only settings go along."""
    io = FlashCheckpointIO(on_error="warn", deadline=5)
    io.save_checkpoint({"global_step": 1}, tmp_path / "a.ckpt")
    there = pickle.loads(pickle.dumps(io))
    assert (there.on_error, there.deadline) == ("warn", 5)
    there.save_checkpoint({"global_step": 1}, tmp_path / "b.ckpt")
    for one in (io, there):
        one.teardown()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk_is_called_by_its_name(tmp_path: Path) -> None:
    """Torch's writer says of it "unexpected pos". Nothing is left of the file that did not fit."""
    with small_disk(tmp_path / "disk") as disk:
        io = FlashCheckpointIO()
        io.save_checkpoint({"weights": torch.ones(1 << 16)}, disk / "a.ckpt")
        with pytest.raises(StorageFailed, match=r"cannot write .*a\.ckpt: No space left on device") as failed:
            io.teardown()
        assert "free some space" in failed.value.hint
        assert [path.name for path in disk.iterdir()] == ["filler"]
        (disk / "filler").unlink()
        io.save_checkpoint({"weights": torch.ones(1 << 16)}, disk / "a.ckpt")
        io.teardown()
        assert (disk / "a.ckpt").exists()
