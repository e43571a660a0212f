"""Contracts of `_private_api`, the one module that uses private names of Lightning: what a new release must still do.

And the environment of `dlrover-hooks run`, in which Lightning must find torchrun's.
"""

from __future__ import annotations

import ast
import copy
import inspect
import json
import logging
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.progress import _ReadyCompletedTracker
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dlrover_hooks.data.loader import elastic_loader
from dlrover_hooks.integrations.lightning import _private_api as private

pytestmark = pytest.mark.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Net(LightningModule):
    """Trains on numbers 0..7, keeps what it saw; `early` asks for the loaders before a checkpoint is read."""

    def __init__(self, early: bool = False) -> None:
        super().__init__()
        self.layer, self.early, self.seen = nn.Linear(1, 1), early, list[float]()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.arange(8.0)[:, None]), batch_size=2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen += batch[0].flatten().tolist()
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.early:
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=0.01)


FOLDER = Path(private.__file__).parent


def private_names(path: Path) -> set[str]:
    """Attributes with one underscore of objects other than `self`, and such names imported from Lightning."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning"):
            found |= {one.name for one in node.names}
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def test_private_names_of_lightning_stand_in_one_module() -> None:
    """So that a new release is compared with one file. Objects of this project may know each other's."""
    own = {
        node.attr
        for path in FOLDER.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    others = {path.name: private_names(path) - own for path in FOLDER.glob("*.py") if path.name != "_private_api.py"}
    assert {name: names for name, names in others.items() if names} == {}


def test_every_private_name_still_exists_in_lightning() -> None:
    import lightning

    package = Path(lightning.__file__).parent
    sources = "\n".join(path.read_text() for part in ("pytorch", "fabric") for path in (package / part).rglob("*.py"))
    words = set(re.findall(r"\b_[A-Za-z]\w*", sources))
    assert private_names(Path(private.__file__)) - words == set()


class At(Callback):
    """Calls `then(trainer)` once, in the named hook."""

    def __init__(self, hook: str, then: Any) -> None:
        self.found: list[Any] = []

        def call(trainer: Trainer, *_: Any, **__: Any) -> None:
            if not self.found:
                self.found.append(then(trainer))

        setattr(self, hook, call)


def trainer(*callbacks: Callback, **options: Any) -> Trainer:
    given: dict[str, Any] = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "logger": False}
    quiet: dict[str, Any] = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(callbacks=list(callbacks), **given | quiet | options)


def dumped_after(steps: int) -> dict[str, Any]:
    """A checkpoint as `dump` takes it in `on_train_batch_start`, where `steps` are behind it."""
    made: list[dict[str, Any]] = []

    class Take(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == steps:
                made.append(private.dump(trainer))

    trainer(Take()).fit(Net())
    return made[0]


def test_wrap_train_loaders_in_setup_and_unwrap() -> None:
    given: list[list[Any]] = []

    def wrap(loaders: list[Any]) -> list[Any]:
        given.append(loaders)
        return [elastic_loader(loader) for loader in loaders]

    model, look = Net(), At("on_train_start", lambda trainer: trainer.train_dataloader)
    made = trainer(At("setup", lambda trainer: private.wrap_train_loaders(trainer, wrap)), look)
    source = made.fit_loop._data_source
    made.fit(model)
    assert [type(loader) for loader in given[0]] == [DataLoader]
    assert type(look.found[0]).__name__ == "ElasticLoader"
    private.unwrap(made)
    assert made.fit_loop._data_source is source


def test_resume_from_loads_without_a_path_and_unwrap_forgets_it() -> None:
    checkpoint, model = dumped_after(2), Net()
    made = trainer(At("setup", lambda trainer: private.resume_from(trainer, checkpoint, lambda *_: True)))
    made.fit(model)
    assert made.global_step == 4
    assert len(model.seen) == 4
    private.unwrap(made)
    assert "resume_start" not in vars(made._checkpoint_connector)


@pytest.mark.parametrize("ours", [True, False])
def test_resume_from_asks_who_wins_over_a_path(tmp_path: Path, ours: bool) -> None:
    path, asked = tmp_path / "one.ckpt", list[tuple[str, int]]()
    torch.save(dumped_after(1), path)
    checkpoint, model = dumped_after(3), Net()

    def wins(path: str, content: dict[str, Any]) -> bool:
        asked.append((path, content["global_step"]))
        return ours

    trainer(At("setup", lambda trainer: private.resume_from(trainer, checkpoint, wins))).fit(
        model, ckpt_path=str(path), weights_only=False
    )
    assert asked == [(str(path), 1)]
    assert len(model.seen) == (2 if ours else 6)


def test_dump_is_lightnings_own_checkpoint() -> None:
    checkpoint = dumped_after(2)
    assert {"state_dict", "loops", "optimizer_states", "lr_schedulers", "callbacks"} <= checkpoint.keys()
    assert (checkpoint["global_step"], checkpoint["epoch"]) == (2, 0)


def test_the_states_of_loops_are_lightnings_own() -> None:
    """At the beginning, within an epoch, and of a loop that was given another part."""
    told = list[tuple[Any, Any]]()

    class Telling(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            told.append((private.loops(trainer), trainer._checkpoint_connector._get_loops_state_dict()))

    made = trainer(Telling())
    told.append((private.loops(made), made._checkpoint_connector._get_loops_state_dict()))
    made.fit(Net())
    cast(Any, made.fit_loop).another = _ReadyCompletedTracker(1, 2)
    told.append((private.loops(made), made._checkpoint_connector._get_loops_state_dict()))
    assert len(told) > 3
    assert all(ours == theirs for ours, theirs in told)
    assert private.dump(made)["loops"] == made._checkpoint_connector._get_loops_state_dict()


def test_end_loaders_and_mode() -> None:
    """The one given gives nothing more; in the next epoch it does."""
    ended, seen = DataLoader(TensorDataset(torch.arange(4.0)), batch_size=2), list[tuple[bool, ...]]()

    class Two(Net):
        def train_dataloader(self) -> Any:
            return CombinedLoader([ended, super().train_dataloader()], "max_size")

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            seen.append(tuple(one is not None for one in batch))
            return super().training_step(batch[1], batch_idx)

    end = At("on_train_start", lambda trainer: (private.mode(trainer), private.end_loaders(trainer, [ended])))
    trainer(end, max_epochs=2).fit(Two())
    assert end.found[0][0] == "max_size"
    assert seen == [(False, True)] * 4 + [(True, True)] * 2 + [(False, True)] * 2


class Kept(DataLoader[Any]):
    """A stateful loader, as StatefulDataLoader is one."""

    def __init__(self) -> None:
        super().__init__(range(8), batch_size=2)  # pyright: ignore[reportArgumentType]
        self.loaded: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"place": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded.append(state)


class Fed(Net):
    def __init__(self, loader: Kept, early: bool = False) -> None:
        super().__init__(early)
        self.kept = [loader]

    def train_dataloader(self) -> Any:
        return self.kept[0]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step([batch.float()[:, None]], batch_idx)


@pytest.mark.parametrize(("new", "kept"), [({"place": 5}, {"place": 5}), (None, {"place": 1})])
def test_replace_loader_states(new: dict[str, int] | None, kept: dict[str, int]) -> None:
    def take(trainer: Trainer) -> dict[str, Any]:
        checkpoint = private.dump(trainer)
        private.replace_loader_states(trainer, checkpoint, lambda loader: new)
        return checkpoint

    look = At("on_train_batch_end", take)
    trainer(look).fit(Fed(Kept()))
    assert look.found[0]["loops"]["fit_loop"]["state_dict"]["combined_loader"] == [kept]


def test_replace_loader_states_without_stateful_loaders_changes_nothing() -> None:
    def take(trainer: Trainer) -> bool:
        checkpoint = private.dump(trainer)
        before = copy.deepcopy(checkpoint["loops"])
        private.replace_loader_states(trainer, checkpoint, lambda loader: {"place": 5})
        return checkpoint["loops"] == before

    look = At("on_train_batch_end", take)
    trainer(look).fit(Net())
    assert look.found == [True]


@pytest.mark.parametrize("early", [True, False])
def test_load_pending_loader_states(tmp_path: Path, early: bool) -> None:
    """Also where the loaders are asked for before the checkpoint is read: their state must arrive all the same."""
    look, path, loader = At("on_train_batch_end", private.dump), tmp_path / "one.ckpt", Kept()
    trainer(look).fit(Fed(Kept()))
    torch.save(look.found[0], path)
    pending = At("on_train_start", private.load_pending_loader_states)
    trainer(pending).fit(Fed(loader, early), ckpt_path=str(path), weights_only=False)
    assert loader.loaded == [{"place": 1}]


def test_batches_that_stepped_is_in_a_dump_and_can_be_set() -> None:
    assert private.batches_that_stepped(dumped_after(3)) == 3
    made = trainer()
    private.set_batches_that_stepped(made, 9)
    assert made.fit_loop.epoch_loop._batches_that_stepped == 9


def test_restart_is_over() -> None:
    """In the whole epoch that it resumes in, Lightning is restarting."""
    checkpoint = dumped_after(2)
    resume = At("setup", lambda trainer: private.resume_from(trainer, checkpoint, lambda *_: True))
    before = At("on_train_batch_start", lambda trainer: trainer.fit_loop.restarting)
    after = At("on_train_batch_end", lambda trainer: trainer.fit_loop.restarting)
    over = At("on_train_batch_start", private.restart_is_over)
    trainer(resume, before, over, after).fit(Net())
    assert before.found + after.found == [True, False]


@pytest.mark.parametrize("left_out", [(0, 1), (1, 2)])
def test_a_batch_whose_training_step_is_left_out(left_out: tuple[int, int]) -> None:
    """Gradients are zeroed where its step begins, it has none of its own, and the outputs of the batch before."""
    outputs, grads, happened = list[float](), list[float](), list[Any]()

    class Looks(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            def skips(last: bool) -> bool:
                batch = trainer.fit_loop.epoch_loop.batch_idx
                happened.append((batch, last))
                return batch in left_out

            private.leave_out_training_steps(trainer, skips, keep=True)

        def on_before_zero_grad(self, *_: Any) -> None:
            happened.append("zero")

        def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
            grads.append(pl_module.layer.weight.grad.item())

        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, given: Any, *_: Any) -> None:
            outputs.append(given["loss"].item())

    net = Net()
    with torch.no_grad():
        net.layer.weight.fill_(1.0)
        net.layer.bias.fill_(0.0)
    fit = trainer(Looks(), accumulate_grad_batches=4, max_epochs=1)
    fit.fit(net)
    left = [batch for batch in range(4) if batch not in left_out]
    seen = [float(value) for batch in left for value in (2 * batch, 2 * batch + 1)]
    assert net.seen == seen
    assert happened == [(0, False), "zero", (1, False), (2, False), (3, True)]
    assert grads == [pytest.approx(sum(2 * value * value for value in seen) / 2 / 4)]
    assert outputs[:3] == ([0.0, 0.0, outputs[2]] if left_out == (0, 1) else [outputs[0]] * 3)
    private.unwrap(fit)
    assert "run" not in vars(fit.fit_loop.epoch_loop.automatic_optimization)


def test_the_last_batch_of_an_epoch_is_the_last_one_of_a_step() -> None:
    """Lightning steps there, whatever `accumulate_grad_batches` says."""
    lasts = list[bool]()

    class Looks(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            private.leave_out_training_steps(trainer, lambda last: bool(lasts.append(last)), keep=False)

    trainer(Looks(), accumulate_grad_batches=3, max_epochs=1).fit(Net())
    assert lasts == [False, False, True, True]


@pytest.mark.parametrize("itself", [False, True])
def test_whether_a_batch_is_fetched_before_its_training_step(itself: bool) -> None:
    found = list[bool]()

    class Fetches(Net):
        def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
            return super().training_step(next(dataloader_iter)[0], 0)

    class Looks(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            found.append(private.fetches_before_training_steps(trainer))

    trainer(Looks(), max_epochs=1).fit(Fetches() if itself else Net())
    assert found == [not itself]


def test_the_broadcast_of_a_signal_is_made_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()

    def broadcast(loop: _TrainingEpochLoop) -> None:
        made.append(loop.batch_idx + 1)

    monkeypatch.setattr(_TrainingEpochLoop, "_broadcast_sigterm_tensor", broadcast)

    class Before(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            private.sync_signals_between_steps(trainer)
            loop = trainer.fit_loop.epoch_loop
            advance = loop.advance

            def as_with_several_processes(fetcher: Any) -> None:
                loop._broadcast_sigterm_tensor()
                advance(fetcher)

            loop.advance = as_with_several_processes  # type: ignore[method-assign]

    assert "_broadcast_sigterm_tensor()" in inspect.getsource(_TrainingEpochLoop.advance), RENAMED.format("advance")
    fit = trainer(Before(), accumulate_grad_batches=2, max_epochs=2)
    fit.fit(Net())
    assert made == [0, 2, 0, 2]
    private.unwrap(fit)
    assert "_broadcast_sigterm_tensor" not in vars(fit.fit_loop.epoch_loop)


def test_fast_dev_run_is_known() -> None:
    assert private.fast_dev_run(trainer(fast_dev_run=True))
    assert not private.fast_dev_run(trainer())


def test_callbacks_are_those_of_the_trainer() -> None:
    mine = Callback()
    assert mine in private.callbacks(trainer(mine))


def test_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    text = f"only once {uuid.uuid4().hex}"
    with caplog.at_level(logging.WARNING, "dlrover_hooks"):
        private.warn_once(text)
        private.warn_once(text)
    assert caplog.text.count(text) == 1


SCRIPT = """
import json, os, sys
from lightning.fabric.plugins.environments import TorchElasticEnvironment
found = [TorchElasticEnvironment.detect()]
place = TorchElasticEnvironment()
told = [place.global_rank(), place.world_size(), place.local_rank(), place.creates_processes_externally]
del os.environ["TORCHELASTIC_RUN_ID"]
found.append(TorchElasticEnvironment.detect())
open(sys.argv[1], "w").write(json.dumps([found, told]))
"""


@pytest.mark.deep
def test_lightning_finds_torchruns_environment_in_a_launched_worker(tmp_path: Path) -> None:
    """And measured: without TORCHELASTIC_RUN_ID it does not, and would start processes of its own."""
    script, out, root = tmp_path / "script.py", tmp_path / "out.json", Path(__file__).parents[2]
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "dlrover_hooks", "run", "-n", "1", "--standby", "0", str(script), str(out)]
    run = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=200, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(out.read_text()) == [[True, False], [0, 1, 0, True]]


@pytest.mark.parametrize("per_step", [2, 3])
def test_count_batches_anew(per_step: int) -> None:
    """One step of two batches was made; four batches are an epoch. Where a step has three, one is left."""
    made: list[dict[str, Any]] = []

    class Take(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 1 and not made:
                made.append(private.dump(trainer))

    trainer(Take(), accumulate_grad_batches=2).fit(Net())
    found: list[int] = []

    class Anew(Callback):
        def on_train_start(self, trainer: Trainer, *_: Any) -> None:
            private.count_batches_anew(trainer, per_step)
            progress: Any = trainer.fit_loop.epoch_loop.batch_progress
            found.extend([progress.current.processed, progress.total.processed])

    resume = At("setup", lambda trainer: private.resume_from(trainer, made[0], lambda *_: True))
    model = Net()
    trainer(resume, Anew(), accumulate_grad_batches=per_step).fit(model)
    assert found == [per_step, per_step]
    assert len(model.seen) == 2 * (4 - per_step)


RENAMED = (
    "Lightning's ModelCheckpoint.{0} is not what `count_files_under_way` replaces: see which method tells now whether "
    "a file name is taken, or links to the last file"
)


def test_model_checkpoint_asks_where_files_under_way_are_counted(tmp_path: Path) -> None:
    """By these names and arguments, of itself; and the class is as it was afterwards."""
    methods = {"file_exists": ["self", "filepath", "trainer"], "_link_checkpoint": ["trainer", "filepath", "linkpath"]}
    for name, arguments in methods.items():
        found = getattr(ModelCheckpoint, name, None)
        assert found is not None, RENAMED.format(name)
        assert list(inspect.signature(found).parameters) == arguments, RENAMED.format(name)
    before = {name: ModelCheckpoint.__dict__[name] for name in methods}
    asked: list[str] = []
    linked: list[tuple[str, str]] = []

    def leaves(path: str) -> bool | None:
        asked.append(Path(path).name)
        return None

    def link_later(path: str, link: str) -> bool:
        linked.append((Path(path).name, Path(link).name))
        return True

    put_back = private.count_files_under_way(leaves, link_later)
    try:
        trainer(ModelCheckpoint(tmp_path, save_last="link"), enable_checkpointing=True).fit(Net())
    finally:
        put_back()
    assert set(asked) == {"epoch=0-step=4.ckpt", "last.ckpt"}, RENAMED.format("file_exists")
    assert linked == [("epoch=0-step=4.ckpt", "last.ckpt")], RENAMED.format("_link_checkpoint")
    assert ModelCheckpoint.file_exists is before["file_exists"]
    assert ModelCheckpoint._link_checkpoint is before["_link_checkpoint"].__func__


def test_csv_rows_with_a_step_of_the_users_own_lie_where_the_rows_around_them_do() -> None:
    """`self.log("step", epoch)` gives a row another axis. Rows of LearningRateMonitor have no epoch."""
    from dlrover_hooks.integrations.lightning.output_names import rows_before

    def row(step: int, epoch: str = "", **more: str) -> dict[str, str]:
        return {"step": str(step), "epoch": epoch, **more}

    first = [row(0), row(0, "0"), row(1), row(1, "0"), row(9000, mine="a"), row(2), row(2, "1"), row(1, mine="b")]
    rest = [row(3), row(3, "1"), row(9001, mine="c"), row(2, mine="d"), row(4), row(4, "1")]
    assert rows_before(first + rest, 3) == first
    assert rows_before(first + rest, 5) == first + rest
    assert rows_before([row(step) for step in range(5)], 3) == [row(step) for step in range(3)]
