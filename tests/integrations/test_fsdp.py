"""DL-90, DL-91: FSDP2 state is saved shard by shard and comes back bit-equal at any world size and layout.

Real ranks over gloo, real keepers; one life is in fsdp_cases.py.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from dlrover_hooks.integrations.dcp import FlashReader
from tests import ranks
from tests.e2e.master_process import LiveMaster
from tests.integrations.fsdp_cases import build, digest, train

CASES = Path(__file__).with_name("fsdp_cases.py")


def life(world: int, master: LiveMaster | None, **given: Any) -> dict[str, Any]:
    """What rank 0 reports; all ranks saw the same."""
    found = ranks.run([sys.executable, str(CASES), json.dumps(given)], world, master, timeout_s=100)
    assert len(found) == world
    assert all(one == found[0] for one in found)
    return found[0]


def near(ours: list[float], theirs: list[float]) -> bool:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-12


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def read_by_stock_tools(folder: Path, digests: dict[str, str]) -> None:
    """Stock safetensors, stock DCP, and stock DCP through our reader; the files hold Python state, too."""
    (home,) = folder.glob("step-*")
    files = sorted(home.glob("*.safetensors"))
    assert len(files) == 5
    rows = [load_file(file)["state.model.0.weight"].shape[0] for file in files[:4]]
    assert sum(rows) == 7
    assert "state.model.2.weight" not in load_file(files[4])  # 3 rows over 5 ranks: an empty shard would stop DCP
    for reader in (HuggingFaceStorageReader(str(home)), FlashReader(str(folder))):
        model = {name: torch.zeros_like(value) for name, value in build("plain").state_dict().items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about running without a process group
            dcp.load({"state": {"model": model}}, storage_reader=reader)
        found = {f"model.{name}": digest(value) for name, value in model.items()}
        assert found == {name: one for name, one in digests.items() if name in found}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_4_3_5_1(job: str, tmp_path: Path, live_master: LiveMaster) -> None:
    """FSDP2 at 4, 3 and 5 ranks out of memory, then a plain model out of storage; a reference run agrees."""
    calm = train(f"{job}-calm", "plain", 10)
    four = life(4, live_master, job=job, kind="fsdp", upto=3)
    three = life(3, live_master, job=job, kind="fsdp", upto=5)
    assert three["source"] == "memory"
    assert three["first"] > 0
    assert three["seen"][str(three["first"])] == four["seen"][str(three["first"])]
    five = life(5, live_master, job=job, kind="fsdp", upto=8, finish=True, save_to=str(tmp_path))
    assert five["source"] == "memory"
    assert five["seen"][str(five["first"])] == three["seen"][str(five["first"])]
    one = life(1, None, job=f"{job}-other", kind="plain", upto=10, resume=str(tmp_path))
    assert (one["source"], one["first"]) == ("storage", 8)
    assert one["seen"]["8"] == five["seen"]["8"]
    assert near(one["weights"], calm["weights"])
    read_by_stock_tools(tmp_path, five["seen"]["8"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_layouts_and_weights(job: str, live_master: LiveMaster) -> None:
    """DDP to HSDP, where files and images hold replicas, to DDP; then a run that begins with those weights alone."""
    ddp = life(2, live_master, job=job, kind="ddp", upto=2)
    hsdp = life(4, live_master, job=job, kind="fsdp", mesh=[2, 2], upto=4)
    assert hsdp["source"] == "memory"
    assert hsdp["seen"][str(hsdp["first"])] == ddp["seen"][str(hsdp["first"])]
    again = life(2, live_master, job=job, kind="ddp", upto=6)
    assert again["seen"][str(again["first"])] == hsdp["seen"][str(again["first"])]
