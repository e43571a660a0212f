"""`ElasticCallback` in a real Trainer, one process: resume, refusals, what it leaves alone."""

import json
import logging
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset

from dlrover_hooks.data.leased.shard_dataset import ShardDataset
from dlrover_hooks.errors import DataMismatch, NoCheckpoint, SaveToBusy, UnsupportedState, UsageError
from dlrover_hooks.integrations.lightning import ElasticCallback

pytestmark = pytest.mark.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Crash(Exception):
    pass


class Numbers(Dataset):
    def __init__(self, n: int = 20) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3,), index / 10), index


class Net(LightningModule):
    """Keeps the ids of every step; `crash_at` breaks off in that step."""

    def __init__(self, crash_at: int | None = None, **hyper: Any) -> None:
        super().__init__()
        self.save_hyperparameters(hyper)
        self.layer, self.crash_at = nn.Linear(3, 1), crash_at
        self.seen: list[tuple[int, int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.crash_at == self.global_step:
            raise Crash
        self.seen += [(self.current_epoch, self.global_step, index) for index in batch[1].tolist()]
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def fit(model: Net, elastic: ElasticCallback | None, n: int = 20, seed: int = 1, ckpt_path: str | None = None,
        callbacks: tuple[Callback, ...] = (), loader: Any = None, **options: Any) -> Trainer:  # fmt: skip
    seed_everything(seed, verbose=False)
    given = {"max_epochs": 2, "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False,
             "enable_progress_bar": False, "enable_model_summary": False} | options  # fmt: skip
    trainer = Trainer(callbacks=[*([elastic] if elastic is not None else []), *callbacks], **given)
    trainer.fit(model, loader or DataLoader(Numbers(n), batch_size=4, shuffle=True), ckpt_path=ckpt_path)
    return trainer


def crash(job: str, at: int, **options: Any) -> Net:
    model = Net(crash_at=at)
    with pytest.raises(Crash):
        fit(model, ElasticCallback(job=job, save_every=1, **options))
    return model


def surviving(before: Net, after: Net) -> list[tuple[int, int, int]]:
    first = after.seen[0][1]
    return [seen for seen in before.seen if seen[1] < first] + after.seen


def exactly_once(seen: list[tuple[int, int, int]], n: int = 20, epochs: int = 2) -> bool:
    return Counter((epoch, index) for epoch, _, index in seen) == Counter(
        (e, i) for e in range(epochs) for i in range(n)
    )


def test_resumes_from_memory_without_a_path(job: str) -> None:
    """A new Trainer and model of the same job go on where the last whole generation stood."""
    before, after, elastic = crash(job, 7), Net(), ElasticCallback(job=job, save_every=1)
    fit(after, elastic)
    assert after.seen[0][1] == 7
    assert exactly_once(surviving(before, after))


def test_re_entering_fit_continues_in_the_epoch(job: str) -> None:
    """The same Trainer again: Lightning alone repeats the epoch and visited 24 of 40 samples."""
    elastic, model = ElasticCallback(job=job, save_every=1), Net(crash_at=3)
    trainer = Trainer(max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
                      enable_progress_bar=False, enable_model_summary=False, callbacks=[elastic])  # fmt: skip
    loader = DataLoader(Numbers(), batch_size=4, shuffle=True)
    with pytest.raises(Crash):
        trainer.fit(model, loader)
    model.crash_at = None
    trainer.fit(model, loader)
    assert [step for _, step, _ in model.seen] == sorted(step for _, step, _ in model.seen)
    assert exactly_once(model.seen)


def test_a_finished_job_has_nothing_left_to_do(job: str, tmp_path: Path) -> None:
    """Launched again it restores the last weights, trains nothing and returns; a higher limit goes on from there."""
    save_to = str(tmp_path / "ckpt")
    first, again, more, anew = Net(), Net(), Net(), Net()
    fit(first, ElasticCallback(save_to, job=job))
    fit(again, ElasticCallback(save_to, job=job), seed=1)
    assert again.seen == []
    assert torch.equal(first.layer.weight, again.layer.weight)
    fit(more, ElasticCallback(save_to, job=job), max_epochs=3)
    assert {epoch for epoch, _, _ in more.seen} == {2}
    assert len(more.seen) == 20
    fit(anew, ElasticCallback(save_to, job=job, resume="never"))
    assert exactly_once(anew.seen)


@pytest.mark.parametrize(
    ("change", "named"),
    [({"n": 19}, "n"), ({"seed": 2}, "seed")],
)
def test_other_data_on_resume_is_refused_and_nothing_is_lost(
    job: str, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    """A changed length or seed would train on the wrong samples silently; the checkpoint stays."""
    save_to = str(tmp_path / "ckpt")
    before = crash(job, 6, save_to=save_to, persist_every=1)
    with pytest.raises(DataMismatch, match=named):
        fit(Net(), ElasticCallback(save_to, job=job, save_every=1), **change)
    after = Net()
    fit(after, ElasticCallback(save_to, job=job, save_every=1))
    assert exactly_once(surviving(before, after))


def test_only_the_weights(job: str) -> None:
    """Step, loops, optimizer and data begin from 0 (resume="weights")."""
    before = crash(job, 7)
    saved = {name: value.clone() for name, value in before.state_dict().items()}
    found: list[bool] = []

    class First(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            found.append(all(torch.equal(value, saved[name]) for name, value in pl_module.state_dict().items()))
            found.append(not trainer.optimizers[0].state)

    after = Net()
    fit(after, ElasticCallback(job=job, save_every=1, resume="weights"), callbacks=(First(),))
    assert found == [True, True]
    assert after.seen[0][:2] == (0, 0)
    assert exactly_once(after.seen)


def test_require_says_that_nothing_was_found(job: str, tmp_path: Path) -> None:
    with pytest.raises(NoCheckpoint, match=job):
        fit(Net(), ElasticCallback(str(tmp_path), job=job, resume="require"))


def test_a_damaged_file_falls_back_to_the_generation_before(
    job: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One flipped bit in the newest durable file: named in the log, and the run goes on one generation earlier."""
    save_to = tmp_path / "ckpt"
    before, during = Net(), []

    class Stop(Callback):
        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            raise Crash

    with pytest.raises(Crash):
        fit(before, ElasticCallback(str(save_to), job=job, save_every=1, persist_every=1, keep=3), callbacks=(Stop(),))
    for process in psutil.process_iter(["cmdline"]):
        if any(job in part for part in process.info["cmdline"] or ()):
            process.kill()  # the memory is gone, only storage is left
            process.wait(60)
    newest = json.loads((save_to / "latest.json").read_text())
    folder = max(save_to.glob("step-*"))
    assert str(folder.name).split("-")[1].lstrip("0") in json.dumps(newest)
    (file,) = folder.glob("shard-*")
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    file.write_bytes(content)
    after = Net()
    with caplog.at_level(logging.WARNING, "dlrover_hooks"):
        fit(after, ElasticCallback(str(save_to), job=job, save_every=1))
    (line,) = [line for line in caplog.messages if "match its hash" in line]
    assert line.endswith(f": {file}: chunk 0 does not match its hash")
    assert line.count(str(save_to)) == 1
    assert any("fell back: step" in line and line.endswith("from storage") for line in caplog.messages)
    assert exactly_once(surviving(before, after))
    assert not during


def test_two_live_jobs_on_one_url_are_refused(job: str, tmp_path: Path) -> None:
    seen: list[BaseException] = []

    class Second(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            if not seen:
                import subprocess
                import sys

                code = (
                    "import sys; sys.path.insert(0, sys.argv[1])\n"
                    "from dlrover_hooks.config import load, place\nfrom dlrover_hooks.session import Session\n"
                    "from dlrover_hooks.errors import SaveToBusy\nfrom dlrover_hooks.protocol import Departure\n"
                    "session = Session(load(save_to=sys.argv[2], job=sys.argv[3]), place())\n"
                    "try:\n    session.join()\nexcept SaveToBusy as error:\n    print('refused', error)\n"
                    "session.leave(Departure.DONE)\n"
                )
                root = str(Path(__file__).parents[2])
                found = subprocess.run([sys.executable, "-c", code, root, str(tmp_path), f"{job}-other"],
                                       capture_output=True, text=True, timeout=200)  # fmt: skip
                seen.append(SaveToBusy(found.stdout + found.stderr))

    fit(Net(), ElasticCallback(str(tmp_path), job=job), callbacks=(Second(),))
    assert str(seen[0]).startswith("refused")
    assert job in str(seen[0])


def test_a_checkpoint_of_lightnings_own_resumes_exactly_once(job: str, tmp_path: Path) -> None:
    """ModelCheckpoint saves inside a step, where the loader's commit is still one step behind the model."""
    kept = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    before, after = Net(crash_at=7), Net()
    with pytest.raises(Crash):
        fit(before, ElasticCallback(checkpoint=False), callbacks=(kept,), enable_checkpointing=True)
    path = str(tmp_path / "step=6.ckpt")
    fit(after, ElasticCallback(checkpoint=False), ckpt_path=path)
    assert after.seen[0][1] == 6
    assert exactly_once(surviving(before, after))


def test_an_explicit_path_wins_unless_ours_is_newer_in_the_same_run(job: str, tmp_path: Path) -> None:
    kept = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    before = Net(crash_at=7)
    with pytest.raises(Crash):
        fit(before, ElasticCallback(job=job, save_every=1), callbacks=(kept,), enable_checkpointing=True)
    newer = Net(crash_at=8)
    with pytest.raises(Crash):
        fit(newer, ElasticCallback(job=job, save_every=1), ckpt_path=str(tmp_path / "step=3.ckpt"))
    assert newer.seen[0][1] == 7, "ours is of the same run and newer"
    other = Net()
    fit(other, ElasticCallback(job=f"{job}-b", save_every=1), ckpt_path=str(tmp_path / "step=3.ckpt"))
    assert other.seen[0][1] == 3, "another run has nothing newer: the path wins"
    assert exactly_once(surviving(before, other))


def test_the_same_command_again_does_not_go_back_to_its_ckpt_path(job: str, tmp_path: Path) -> None:
    """A launcher gives it the same arguments again; the path is of another run. A path that is new is used."""
    kept = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    with pytest.raises(Crash):
        fit(Net(crash_at=7), ElasticCallback(job=f"{job}-first"), callbacks=(kept,), enable_checkpointing=True)
    began: list[int] = []
    for path, crash_at in (("step=3", 8), ("step=3", 9), ("step=6", 8), ("step=6", 9)):
        net = Net(crash_at=crash_at)
        with pytest.raises(Crash):
            fit(net, ElasticCallback(job=job, save_every=1), ckpt_path=str(tmp_path / f"{path}.ckpt"))
        began.append(net.seen[0][1])
    assert began == [3, 8, 6, 8]


def test_leased_data_is_refused_with_a_way_out(job: str) -> None:
    """Lightning fetches ahead of the step where no length is known: the last batch of a lease could not be counted."""
    lent = DataLoader(ShardDataset(Numbers()), batch_size=2)
    trainer = Trainer(callbacks=[ElasticCallback(job=job)], max_epochs=1, accelerator="cpu", logger=False,
                      enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    with pytest.raises(UsageError, match="over a ShardDataset") as refused:
        trainer.fit(Net(), lent)
    assert "give the dataset itself" in refused.value.hint


@pytest.mark.parametrize(
    ("options", "why"),
    [({"fast_dev_run": True}, "fast_dev_run"), ({"overfit_batches": 2}, "overfit_batches")],
)
def test_stands_aside_and_says_so(options: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("dlrover_hooks.integrations.lightning.callback.rank_zero_info", said.append)
    elastic = ElasticCallback()
    fit(Net(), elastic, **options)
    assert elastic.session is None
    assert [why in text for text in said] == [True]


def test_a_misspelt_keyword_is_answered_with_the_right_one() -> None:
    with pytest.raises(UsageError, match="no keyword 'save_evry'") as refused:
        ElasticCallback(save_evry=5)  # pyright: ignore[reportArgumentType]  # that is what type checkers say
    assert refused.value.hint == "did you mean 'save_every'?"


def test_validate_and_test_are_left_alone(job: str) -> None:
    class Checked(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert batch[1].tolist() == list(range(batch_idx * 4, min(20, batch_idx * 4 + 4)))

    elastic, model = ElasticCallback(job=job), Checked()
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                      callbacks=[elastic])  # fmt: skip
    assert trainer.validate(model, DataLoader(Numbers(), batch_size=4), verbose=False) == [{}]
    assert elastic.session is None


def test_a_callback_state_that_cannot_be_saved_is_named_before_training(job: str) -> None:
    class Awkward(Callback):
        @property
        def state_key(self) -> str:
            return "Awkward"

        def state_dict(self) -> dict[str, Any]:
            return {"handle": object()}

    model = Net()
    with pytest.raises(UnsupportedState, match="Awkward"):
        fit(model, ElasticCallback(job=job), callbacks=(Awkward(),))
    assert model.seen == []


def test_a_hyper_parameter_that_cannot_be_saved_becomes_its_repr(job: str) -> None:
    before = Net(crash_at=3, activation=nn.ReLU(), width=3)
    with pytest.raises(Crash):
        fit(before, ElasticCallback(job=job, save_every=1))
    elastic, after = ElasticCallback(job=job), Net()
    restored: dict[str, Any] = {}

    class Look(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            assert elastic.restored is not None
            restored.update(elastic.restored.state["lightning"]["hyper_parameters"])

    fit(after, elastic, callbacks=(Look(),))
    assert restored == {"activation": "ReLU()", "width": 3}


def test_several_workers_without_a_master_are_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that do not know of each other would each train on everything."""
    from dlrover_hooks.config import load, place
    from dlrover_hooks.session import Session

    with pytest.raises(UsageError, match="2 workers need a master"):
        Session(load({}), place({}, rank=0, world_size=2))


def test_disable_turns_every_hook_into_a_no_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLROVER_HOOKS_DISABLE", "1")
    elastic, model = ElasticCallback(), Net()
    fit(model, elastic)
    assert elastic.session is None
    assert exactly_once(model.seen)


warnings.filterwarnings("ignore", module="lightning")


def test_another_optimizer_is_refused_by_its_class(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it breaks in mid-step, for state of its own that is missing."""
    with pytest.raises(Crash):
        fit(Net(crash_at=3), ElasticCallback(job=job, save_every=1))
    monkeypatch.setattr(Net, "configure_optimizers", lambda net: torch.optim.SGD(net.parameters(), 0.1))
    with pytest.raises(UsageError, match=r"the optimizer was AdamW \(has .*here it is SGD \(has dampening"):
        fit(Net(), ElasticCallback(job=job))
