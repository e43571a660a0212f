"""`FlashStager` and `FlashWriter` under stock torch.distributed.checkpoint."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import get_state_dict

from dlrover_hooks.checkpoint.storage import generations
from dlrover_hooks.errors import NoCheckpoint, SaveToBusy, UnsupportedState, UsageError
from dlrover_hooks.integrations.dcp import FlashReader, FlashStager, FlashWriter, saved_values
from tests.images import read_back
from tests.integrations.dcp_trial import model_and_optimizer, step
from tests.ranks import run

pytestmark = pytest.mark.filterwarnings("ignore")
TRIAL = [sys.executable, "-m", "tests.integrations.dcp_trial"]
WARM = ("torch._dynamo", "torch.distributed.fsdp", "dlrover_hooks.integrations.dcp")


def save(url: Path | str, state: dict[str, Any], step: int, **options: Any) -> FlashWriter:
    writer = FlashWriter(url, step=step, **options)
    dcp.save(state, storage_writer=writer, no_dist=True)
    return writer


def whole(url: Path | str) -> list[int]:
    return [manifest.generation.step for manifest in generations.scan(str(url), None, None).manifests]


@pytest.mark.deep
@pytest.mark.parametrize("world", [2, 3])
def test_stock_dcp_reads_what_sharded_ranks_wrote_behind_the_step(tmp_path: Path, world: int) -> None:
    """FSDP2 over gloo, uneven shards; the parameters are spoilt as soon as `async_save` has returned."""
    (weights,) = run([*TRIAL, str(tmp_path)], world, timeout_s=200, warm=WARM)
    found = generations.scan(str(tmp_path), None, None)
    assert [manifest.generation.step for manifest in found.manifests] == [3, 2]
    manifest = found.manifests[0]
    for rank in range(world):
        read_back(str(tmp_path), manifest, rank)  # every hash is right
    folder = str(tmp_path / generations.folder(manifest.generation))
    for reader in (HuggingFaceStorageReader(folder), FlashReader(tmp_path)):
        model, optimizer = model_and_optimizer()
        step(model, optimizer)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": {"state": optimizer_state["state"]}}
        dcp.load(state, storage_reader=reader, no_dist=True)
        assert {name: tensor.tolist() for name, tensor in state["model"].items()} == weights
        assert all(float(one["step"]) == 3 for one in state["optimizer"]["state"].values())
    values = saved_values(tmp_path)
    assert values["loop.epoch"] == 3
    assert values["loop.seen"] == (1, {2: "b"})
    assert saved_values(tmp_path, step=2)["loop.epoch"] == 2
    assert any("param_groups" in name for name in values)


def test_a_generation_exists_once_it_is_whole(tmp_path: Path) -> None:
    """A rank that fails leaves nothing to be found; the older one stays."""
    save(tmp_path, {"a": torch.ones(3)}, 1)
    with pytest.raises(CheckpointException) as caught:
        save(tmp_path, {"a": torch.ones(3), "b": threading.Lock()}, 2)
    assert any(isinstance(error[0], UnsupportedState) for error in caught.value.failures.values())
    assert whole(tmp_path) == [1]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.arange(6).reshape(2, 3).t(),
        torch.ones(2, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.ones(2, dtype=torch.complex64).conj() * 1j,
    ],
)
def test_odd_tensors_come_back(tmp_path: Path, tensor: torch.Tensor) -> None:
    writer = save(tmp_path, {"odd": tensor, "other": torch.ones(1)}, 1)
    assert writer.folder is not None
    (name,) = (name for name in os.listdir(writer.folder) if name.endswith(".safetensors"))
    assert torch.equal(load_file(f"{writer.folder}/{name}")["odd"], tensor)


def test_a_step_saved_again_is_the_newer_one(tmp_path: Path) -> None:
    for value, number in ((1, 5), (2, 6), (3, 5)):
        save(tmp_path, {"value": value, "a": torch.ones(1)}, number, keep=9)
    assert saved_values(tmp_path)["value"] == 3
    assert whole(tmp_path) == [5, 6, 5]
    assert saved_values(tmp_path, step=6)["value"] == 2
    with pytest.raises(NoCheckpoint, match="step 7; whole ones: 5, 6, 5"):
        saved_values(tmp_path, step=7)


def test_any_storage_will_do() -> None:
    save("memory://dcp", {"a": torch.ones(3), "text": "x"}, 1)
    assert saved_values("memory://dcp") == {"text": "x"}


def test_another_jobs_tree_is_left_alone(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.ones(1)}, 1, job="one")
    with pytest.raises(CheckpointException) as caught:
        save(tmp_path, {"a": torch.ones(1)}, 2, job="two")
    assert any(isinstance(error[0], SaveToBusy) for error in caught.value.failures.values())


def test_a_cached_plan_is_refused(tmp_path: Path) -> None:
    """Its names are those of the save before."""

    def planned(number: int) -> None:
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save({"a": torch.ones(1)}, storage_writer=FlashWriter(tmp_path, step=number), planner=planner, no_dist=True)

    planned(1)
    with pytest.raises(CheckpointException) as caught:
        planned(2)
    assert any(isinstance(error[0], UsageError) for error in caught.value.failures.values())


def test_values_that_are_no_plain_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException) as caught:
        save(tmp_path, {"a": torch.ones(1), "lock": threading.Lock()}, 1)
    assert any("lock is a _thread.lock" in str(error[0]) for error in caught.value.failures.values())


def test_the_stager_works_with_dcps_own_writer(tmp_path: Path) -> None:
    stager, state = FlashStager(), {"a": torch.ones(1000), "n": [1]}
    for value in (1, 2, 3):
        state["a"].fill_(value)
        future: Any = dcp.async_save(state, checkpoint_id=tmp_path / str(value), async_stager=stager, no_dist=True)
        state["a"].fill_(-1)
        future.result()
        loaded = {"a": torch.zeros(1000)}
        dcp.load(loaded, checkpoint_id=tmp_path / str(value), no_dist=True)
        assert (loaded["a"] == value).all()
    stager.close()
