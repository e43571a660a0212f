"""FSDP2 state is saved shard by shard and comes back bit-equal at any world size and layout.

Real ranks over gloo, real keepers; one life is in fsdp_cases.py.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from dlrover_hooks.cli import main
from dlrover_hooks.integrations.dcp import FlashReader
from tests import ranks
from tests.e2e.master_process import LiveMaster
from tests.integrations.fsdp_cases import build, digest, train

CASES = Path(__file__).with_name("fsdp_cases.py")
WARM = ("torch._dynamo", "tests.integrations.fsdp_cases")


def life(world: int, master: LiveMaster | None, **given: Any) -> dict[str, Any]:
    """What rank 0 reports; all ranks saw the same."""
    found = ranks.run([sys.executable, str(CASES), json.dumps(given)], world, master, timeout_s=200, warm=WARM)
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


@pytest.mark.deep
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


@pytest.mark.deep
def test_layouts_and_weights(job: str, live_master: LiveMaster) -> None:
    """DDP to HSDP, where files and images hold replicas, to DDP; then a run that begins with those weights alone."""
    ddp = life(2, live_master, job=job, kind="ddp", upto=2)
    hsdp = life(4, live_master, job=job, kind="fsdp", mesh=[2, 2], upto=4)
    assert hsdp["source"] == "memory"
    assert hsdp["seen"][str(hsdp["first"])] == ddp["seen"][str(hsdp["first"])]
    again = life(2, live_master, job=job, kind="ddp", upto=6)
    assert again["seen"][str(again["first"])] == hsdp["seen"][str(again["first"])]


def exported(form: str, url: Path, dest: Path) -> Path:
    found = CliRunner().invoke(main.main, ["ckpt", "export", "--to", form, str(url), str(dest)])
    assert found.exit_code == 0, found.output
    return dest


def digests_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {f"model.{name}": digest(value) for name, value in tensors.items()}


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_lies_beside_the_model_and_what_is_exported(job: str, tmp_path: Path, live_master: LiveMaster) -> None:
    """Two ranks; two optimizers and a sharded moving average; then by stock tools, and at three ranks."""
    two = life(2, live_master, job=job, kind="fsdp", upto=4, beside=True, finish=True, save_to=str(tmp_path / "ck"))
    kept = two["seen"]["4"]
    files = [load_file(file) for file in (tmp_path / "ck").glob("step-*/*.safetensors")]
    assert sorted(file["state.model.0.weight"].shape[0] for file in files) == [3, 4]
    model = {name: one for name, one in kept.items() if name.startswith("model.")}

    found = torch.load(exported("torch", tmp_path / "ck", tmp_path / "x.pt"), weights_only=True)
    plain = build("plain")
    plain.load_state_dict(found["model"])
    assert digests_of(plain.state_dict()) == model
    moments = found["optimizer"]["state"] | found["extra"][0]["state"]
    state = {f"optimizer.{name}.{key}": digest(one) for name, many in moments.items() for key, one in many.items()}
    assert state == {name: one for name, one in kept.items() if name.startswith("optimizer.")}

    wanted = {"model": build("plain").state_dict()}
    reader = dcp.FileSystemReader(exported("dcp", tmp_path / "ck", tmp_path / "dcp"))
    dcp.load(wanted, storage_reader=reader, no_dist=True)
    assert digests_of(wanted["model"]) == model

    assert digests_of(load_file(exported("hf", tmp_path / "ck", tmp_path / "hf") / "model.safetensors")) == model

    given: dict[str, Any] = {"job": f"{job}-other", "upto": 5, "beside": True, "resume": str(tmp_path / "ck")}
    three = life(3, live_master, kind="fsdp", **given)
    assert (three["source"], three["seen"]["4"]) == ("storage", kept)
