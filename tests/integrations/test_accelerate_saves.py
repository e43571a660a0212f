"""`ElasticAccelerator.save_state`: Accelerate's own folders, written behind the step."""

from __future__ import annotations

import os
import random
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file

from dlrover_hooks.errors import StorageFailed
from dlrover_hooks.integrations.accelerate import ElasticAccelerator
from dlrover_hooks.integrations.accelerate.async_save import AsyncSaves
from tests.contracts.trial import Given, Setup, loss_of
from tests.disks import small_disk
from tests.e2e.master_process import LiveMaster
from tests.integrations.test_lightning_io import same
from tests.ranks import run

pytestmark = [pytest.mark.usefixtures("fresh_accelerate"), pytest.mark.filterwarnings("ignore")]


class Average:
    """An object of the user's: a moving average, with a tensor that changes in place."""

    def __init__(self) -> None:
        self.mean, self.seen = torch.zeros(3), [0]

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.seen = state["mean"], state["seen"]


class Run:
    def __init__(self, job: str, elastic: bool = True, **options: Any) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        made = Setup(Given(job=job, samples=16, noise=False))
        inner = Accelerator(cpu=True, **options)
        self.accelerator: Any = ElasticAccelerator(inner, job=job) if elastic else inner
        self.average = Average()
        schedule = torch.optim.lr_scheduler.StepLR(made.optimizer, 1)
        self.model, self.optimizer, self.schedule, _ = self.accelerator.prepare(
            made.net, made.optimizer, schedule, made.train
        )
        self.accelerator.register_for_checkpointing(self.average)
        self.batch = (torch.stack([made.train.dataset[one][0] for one in range(4)]), torch.arange(4))

    def step(self) -> None:
        self.accelerator.backward(loss_of(self.model, *self.batch))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.average.mean += 1
        self.average.seen.append(1)

    def hold(self) -> threading.Event:
        """What is saved from here on waits behind this event."""
        from dlrover_hooks.integrations.accelerate.async_save import AsyncSaves

        gate = threading.Event()
        self.accelerator._saves = AsyncSaves(self.accelerator.accelerator)
        self.accelerator._saves._behind.add("held", lambda: gate.wait(60))
        return gate


def seed() -> None:
    torch.manual_seed(7)
    random.seed(7)


def test_the_folder_is_accelerates_own_of_the_moment_of_the_call(job: str, tmp_path: Path) -> None:
    """Same files, same content as without us, random state included, whatever happens while it is written."""
    for name in ("theirs", "ours"):
        run = Run(f"{job}-{name}", elastic=name == "ours")
        gate = run.hold() if name == "ours" else None
        run.step()
        seed()
        assert str(run.accelerator.save_state(str(tmp_path / name))) == str(tmp_path / name)
        run.step()
        torch.rand(3)
        random.random()
        if gate is not None:
            assert not (tmp_path / "ours").exists()
            gate.set()
            run.accelerator.wait_for_saves()
            run.accelerator.close()
    ours, theirs = ({*os.listdir(tmp_path / name)} for name in ("ours", "theirs"))
    assert ours == theirs | {"elastic_data.json"}
    assert same(load_file(tmp_path / "ours/model.safetensors"), load_file(tmp_path / "theirs/model.safetensors"))
    for name in theirs - {"model.safetensors", "random_states_0.pkl"}:
        mine, yours = (torch.load(tmp_path / which / name, weights_only=False) for which in ("ours", "theirs"))
        assert same(mine, yours), name
    mine, yours = (torch.load(tmp_path / which / "random_states_0.pkl", weights_only=False)
                   for which in ("ours", "theirs"))  # fmt: skip
    assert mine["random_state"] == yours["random_state"]
    assert torch.equal(mine["torch_manual_seed"], yours["torch_manual_seed"])
    plain = Run(f"{job}-plain", elastic=False)
    plain.accelerator.load_state(str(tmp_path / "ours"))
    assert plain.average.seen == [0, 1]


def test_load_state_waits_for_what_is_being_written(job: str, tmp_path: Path) -> None:
    run = Run(job)
    run.step()
    weights = [one.tolist() for one in run.model.parameters()]
    run.accelerator.save_state(str(tmp_path / "saved"))
    run.step()
    run.accelerator.load_state(str(tmp_path / "saved"))
    assert [one.tolist() for one in run.model.parameters()] == weights
    assert run.average.seen == [0, 1]
    run.accelerator.close()


def test_numbered_folders_and_their_limit(job: str, tmp_path: Path) -> None:
    """Whatever is there is whole, and no more than `total_limit`."""
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    run = Run(job, project_config=project)
    for number in range(4):
        run.step()
        target = run.accelerator.save_state()
        assert target == tmp_path / "checkpoints" / f"checkpoint_{number}"
    run.accelerator.wait_for_saves()
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_2", "checkpoint_3"]
    assert os.listdir(tmp_path) == ["checkpoints"]
    run.accelerator.load_state()
    assert len(run.average.seen) == 5
    project.iteration = 3
    with pytest.raises(ValueError, match="already exists"):
        run.accelerator.save_state()
    run.accelerator.close()


def test_a_folder_is_replaced_at_once_and_keeps_what_the_user_put_there(job: str, tmp_path: Path) -> None:
    run, target = Run(job), tmp_path / "saved"
    for _ in range(2):
        run.step()
        run.accelerator.save_state(str(target))
        run.accelerator.wait_for_saves()
        (target / "notes").write_text("mine")
    assert (target / "notes").read_text() == "mine"
    run.accelerator.load_state(str(target))
    assert len(run.average.seen) == 3
    assert os.listdir(tmp_path) == ["saved"]
    run.accelerator.close()


def test_a_folders_name_is_no_pattern(job: str, tmp_path: Path) -> None:
    """What a dead process left of `exp[1]` goes; what another run is writing of `exp1` stays."""
    left, others = tmp_path / ".exp[1].dead-1.behind.tmp", tmp_path / ".exp1.alive-1.behind.tmp"
    for folder in (left, others):
        folder.mkdir()
    run = Run(job)
    run.step()
    run.accelerator.save_state(str(tmp_path / "exp[1]"))
    run.accelerator.close()
    assert (tmp_path / "exp[1]/model.safetensors").exists()
    assert others.exists()
    assert not left.exists()


def test_a_save_that_fails_is_raised_at_the_next_verb_and_leaves_nothing(job: str, tmp_path: Path) -> None:
    run = Run(job)
    (tmp_path / "file").write_text("")
    run.accelerator.save_state(str(tmp_path / "good"))
    run.accelerator.wait_for_saves()
    gate = run.hold()
    run.accelerator.save_state(str(tmp_path / "saved"))
    (tmp_path / "saved").write_text("a file, all of a sudden")
    gate.set()
    with pytest.raises(StorageFailed, match=r"cannot write .*/saved"):
        run.accelerator.wait_for_saves()
    assert sorted(os.listdir(tmp_path)) == ["file", "good", "saved"]
    run.accelerator.close()


def test_what_cannot_be_copied_is_written_within_the_step(
    job: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Stubborn(Average):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("not me")

    run = Run(job)
    run.average.seen = [Stubborn()]  # pyright: ignore[reportAttributeAccessIssue]
    for name in ("a", "b"):
        with pytest.raises(StorageFailed, match="pickle"):  # Accelerate itself cannot, either: a local class
            run.accelerator.save_state(str(tmp_path / name))
    assert caplog.text.count("within the step") == 1
    assert os.listdir(tmp_path) == []
    run.accelerator.close()


@pytest.mark.deep
def test_ranks_make_one_folder(job: str, tmp_path: Path, live_master: LiveMaster) -> None:
    """Each writes its own random state; the folder appears once all have. Stock Accelerate reads it."""
    command = [sys.executable, "-m", "tests.integrations.accelerate_saves_trial", str(tmp_path / "saved"), job]
    ranks = run(command, 2, live_master, timeout_s=200)
    names = sorted(os.listdir(tmp_path / "saved"))
    assert names == ["elastic_data.json", "model.safetensors", "optimizer.bin", "random_states_0.pkl",
                     "random_states_1.pkl"]  # fmt: skip
    weights = load_file(tmp_path / "saved" / "model.safetensors")
    for rank in ranks:
        states = torch.load(tmp_path / "saved" / f"random_states_{rank['rank']}.pkl", weights_only=False)
        assert states["torch_manual_seed"].tolist() == rank["random"]
        assert all(weights[name].tolist() == rank[f"module.{name}"] for name in weights)
    assert not [name for name in os.listdir(tmp_path) if "behind" in name]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk_is_called_by_its_name(tmp_path: Path) -> None:
    """Whatever the library that wrote says of it."""
    with small_disk(tmp_path / "disk") as disk:
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(torch.nn.Linear(256, 256))
        saves = AsyncSaves(accelerator)
        saves.save(disk / "state", safe_serialization=False)
        with pytest.raises(StorageFailed, match=r"cannot write .*state: No space left on device") as failed:
            saves.close()
        assert "free some space" in failed.value.hint
        assert [path.name for path in disk.iterdir()] == ["filler"]
