"""`dlrover-hooks ckpt export`: what stock loaders make of it, so that uninstalling us loses nothing."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from click.testing import CliRunner, Result
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.utils.data import DataLoader, TensorDataset

from dlrover_hooks.checkpoint.state import pytree
from dlrover_hooks.checkpoint.state.safetensors_header import Inside, WholeTensor
from dlrover_hooks.checkpoint.state.safetensors_layout import TensorSpec, plan
from dlrover_hooks.checkpoint.storage import generations
from dlrover_hooks.checkpoint.tensors import torch_backend
from dlrover_hooks.cli import main
from dlrover_hooks.data.loader import elastic_loader
from dlrover_hooks.integrations.accelerate import ElasticAccelerator
from dlrover_hooks.integrations.lightning import ElasticCallback
from dlrover_hooks.integrations.torch import AsyncCheckpointer
from dlrover_hooks.protocol import Generation, Manifest
from dlrover_hooks.pytorch import export
from tests.images import image_with

pytestmark = pytest.mark.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def exported(form: str, url: str | Path, dest: str | Path, *more: str) -> Result:
    return CliRunner().invoke(main.main, ["ckpt", "export", "--to", form, str(url), str(dest), *more])


class Tied(nn.Module):
    """The same weight under two names, a buffer, and bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
        self.short = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x))) + self.short.sum()


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(12, 4)), batch_size=4)


def trained(job: str, url: Path, epochs: int = 1, **more: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Three steps an epoch under `AsyncCheckpointer`, durable at `url`."""
    torch.manual_seed(1)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader = elastic_loader(data(), optimizer=optimizer)
    with AsyncCheckpointer(
        model=model, optimizer=optimizer, loader=loader, job=job, save_to=str(url), save_every=1, **more
    ):
        for _ in loader.epochs(epochs):
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
    return model, optimizer


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_dtype_that_hugging_face_has_not_is_named(job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hint was to make room."""
    plain = Tied.__init__

    def with_phase(self: Tied) -> None:
        plain(self)
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex128))

    monkeypatch.setattr(Tied, "__init__", with_phase)
    trained(job, tmp_path / "ck")
    refused = exported("hf", tmp_path / "ck", tmp_path / "hf")
    assert refused.exit_code != 0
    assert "phase (torch.complex128)" in refused.output
    assert "--to torch" in refused.output
    assert "room" not in refused.output
    assert exported("torch", tmp_path / "ck", tmp_path / "x.pt").exit_code == 0


def test_torch_dcp_and_hugging_face_read_a_plain_loop(job: str, tmp_path: Path) -> None:
    """Model and optimizer as they were, through torch.load(weights_only=True), DCP's reader, and safetensors."""
    url = tmp_path / "ck"
    model, optimizer = trained(job, url)

    assert exported("torch", url, tmp_path / "x.pt").output == f"step 3 of job {job} is in {tmp_path / 'x.pt'}\n"
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert found["dlrover_hooks"]["step"] == 3
    other = Tied()
    other.load_state_dict(found["model"])
    assert equal(dict(other.state_dict()), dict(model.state_dict()))
    twin = torch.optim.AdamW(other.parameters(), lr=0.5)
    twin.load_state_dict(found["optimizer"])
    assert str(twin.state_dict()) == str(optimizer.state_dict())

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert exported("dcp", url, tmp_path / "dcp").exit_code == 0
    assert [str(one.message) for one in warned if one.category is UserWarning] == []
    wanted = {"model": Tied().state_dict(), "step": 0}
    dcp.load(wanted, storage_reader=dcp.FileSystemReader(tmp_path / "dcp"), no_dist=True)
    assert equal(dict(wanted["model"]), dict(model.state_dict()))
    assert wanted["step"] == 3

    assert exported("hf", url, tmp_path / "hf").exit_code == 0
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["model.safetensors"]
    assert (tmp_path / "hf" / "model.safetensors").stat().st_mode == (tmp_path / "x.pt").stat().st_mode
    assert equal(load_file(tmp_path / "hf" / "model.safetensors"), dict(model.state_dict()))


def test_large_models_become_several_files_with_an_index(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = tmp_path / "ck"
    model, _ = trained(job, url)
    monkeypatch.setattr(export, "FILE_BYTES", 100)
    exported("hf", url, tmp_path / "hf")
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == model.state_dict().keys()
    files = {name: load_file(tmp_path / "hf" / name) for name in set(index["weight_map"].values())}
    assert len(files) == 3
    assert equal({key: files[name][key] for key, name in index["weight_map"].items()}, dict(model.state_dict()))


def test_what_accelerate_saved_is_found(job: str, tmp_path: Path) -> None:
    """Its cut keeps models in a list of parts."""
    torch.manual_seed(1)
    net = nn.Linear(4, 1)
    accelerator: Any = ElasticAccelerator(Accelerator(cpu=True), job=job, save_every=1, save_to=str(tmp_path / "ck"))
    model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), data())
    for _ in accelerator.epochs(1):
        for (x,) in loader:
            optimizer.zero_grad()
            accelerator.backward(model(x).square().mean())
            optimizer.step()
    accelerator.finish()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    assert exported("hf", tmp_path / "ck", tmp_path / "hf").exit_code == 0
    assert equal(load_file(tmp_path / "hf" / "model.safetensors"), dict(net.state_dict()))
    assert exported("torch", tmp_path / "ck", tmp_path / "x.pt").exit_code == 0
    assert torch.load(tmp_path / "x.pt", weights_only=True)["step"] == 3


class Net(LightningModule):
    def __init__(self, width: int = 3, rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer, self.rate = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.5), nn.Linear(width, 1)), rate

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.rate)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def trainer(epochs: int, *callbacks: Any, **more: Any) -> Trainer:
    given = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False} | more
    return Trainer(max_epochs=epochs, enable_model_summary=False, callbacks=list(callbacks), **given)


def on(path: Path) -> dict[str, torch.Tensor]:
    """Weights after stock Lightning went on from `path` to the third epoch, without us."""
    seed_everything(5, verbose=False)
    model, theirs = Net(width=5), trainer(3, enable_checkpointing=False)
    theirs.fit(model, data(), ckpt_path=path, weights_only=True)
    assert theirs.global_step == 9
    return dict(model.state_dict())


def test_stock_lightning_goes_on_from_an_exported_checkpoint(job: str, tmp_path: Path) -> None:
    """As from one that it wrote itself at the same step: weights, moments, schedule, epoch, hyper-parameters."""
    seed_everything(1, verbose=False)
    first = trainer(
        2, ElasticCallback(job=job, save_to=str(tmp_path / "ck"), save_every=1), ModelCheckpoint(tmp_path / "own")
    )
    model = Net(width=5)
    first.fit(model, data())
    first.save_checkpoint(tmp_path / "own.ckpt")
    assert exported("lightning", tmp_path / "ck", tmp_path / "ours.ckpt").exit_code == 0
    assert equal(on(tmp_path / "ours.ckpt"), on(tmp_path / "own.ckpt"))
    loaded = Net.load_from_checkpoint(tmp_path / "ours.ckpt", weights_only=True)
    assert loaded.hparams == {"width": 5, "rate": 0.1}
    assert equal(dict(loaded.state_dict()), dict(model.state_dict()))
    assert exported("hf", tmp_path / "ck", tmp_path / "hf").exit_code == 0
    assert equal(load_file(tmp_path / "hf" / "model.safetensors"), dict(model.state_dict()))


def shard(url: str, rank: int, height: int = 4) -> Any:
    """Rows 2 x rank and following of a tensor of 3 columns, as FSDP2 leaves them to each rank."""
    which, rows = Generation(0, 7, "a" * 32), torch.arange(12.0).view(4, 3)[2 * rank : 2 * rank + 2].contiguous()
    spec = TensorSpec("state.model.w", "F32", (2, 3), 24, (2 * rank, 0), WholeTensor((height, 3), "F32", sharded=True))
    layout = plan([spec])
    skeleton = msgspec.Raw(pytree.flatten({"model": {"w": rows}}, where="state").skeleton)
    image = memoryview(image_with(layout, Inside(which, rank, 2, {"state": skeleton}), rows.numpy().tobytes()))
    return generations.write_shard(url, None, which, rank, 2, [image], len(image), job="sharded")


def test_shards_of_all_ranks_become_whole_tensors(tmp_path: Path) -> None:
    url = str(tmp_path / "ck")
    files = (shard(url, 0), shard(url, 1))
    generations.commit(url, None, Manifest("sharded", Generation(0, 7, "a" * 32), 2, files, 1.0), 2)
    assert exported("hf", url, tmp_path / "hf").exit_code == 0
    assert torch.equal(load_file(tmp_path / "hf" / "model.safetensors")["w"], torch.arange(12.0).view(4, 3))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    url = str(tmp_path / "ck")
    files = (shard(url, 0, height=6), shard(url, 1, height=6))
    generations.commit(url, None, Manifest("sharded", Generation(0, 7, "a" * 32), 2, files, 1.0), 2)
    done = exported("hf", url, tmp_path / "hf")
    assert done.exit_code == 1
    assert "do not hold all of tensor state.model.w" in done.output


def test_what_cannot_be_exported_is_said(job: str, tmp_path: Path) -> None:
    """Another form, another step, a place that is taken, damage: each in one line, and nothing is left behind."""
    url = tmp_path / "ck"
    trained(job, url)
    done = exported("lightning", url, tmp_path / "x.ckpt")
    assert done.exit_code == 78
    assert "was not saved by Lightning" in done.output
    done = exported("torch", url, tmp_path / "x.pt", "--step", "99")
    assert done.exit_code == 78
    assert f"no step 99 is at {url}\nHINT: the newest other whole one is --step 3; there are steps 3\n" in done.output
    for dest, said in {
        tmp_path / "no" / "x.pt": f"there is no folder {tmp_path / 'no'}\nHINT: make that folder first\n",
        url / "x.pt": "lies in the checkpoint tree",
        next(url.glob("step-*")) / "x.pt": "lies in the checkpoint tree",
    }.items():
        done = exported("torch", url, dest)
        assert (done.exit_code, said in done.output) == (78, True), done.output
    (tmp_path / "taken").write_text("mine")
    done = exported("torch", url, tmp_path / "taken")
    assert done.exit_code == 78
    assert (tmp_path / "taken").read_text() == "mine"
    (file,) = url.glob("step-*/shard-*")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    done = exported("torch", url, tmp_path / "x.pt")
    assert done.exit_code == 1
    assert "chunk 0 does not match its hash\nHINT: no other generation there is whole\n" in done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ck", "taken"]
    assert not list(url.glob("step-*/reading-*"))


@pytest.mark.parametrize("form", ["torch", "dcp", "hf"])
@pytest.mark.parametrize("error", [OSError(28, "full"), KeyboardInterrupt()], ids=["full disk", "Ctrl-C"])
def test_an_export_is_whole_or_not_there(
    form: str, error: BaseException, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(job, tmp_path / "ck")
    write = export._FORMS[form]

    def late(*args: Any) -> None:
        write(*args)
        raise error

    monkeypatch.setitem(export._FORMS, form, late)
    done = exported(form, tmp_path / "ck", tmp_path / "out")
    if isinstance(error, OSError):
        assert f"cannot write {tmp_path / 'out'}: No space left on device\nHINT: " in done.output
    assert done.exit_code == (1 if isinstance(error, OSError) else 130)
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]


def test_what_is_newer_and_damaged_is_named(job: str, tmp_path: Path) -> None:
    trained(job, tmp_path / "ck", keep=9, persist_every=1)
    assert len(steps(tmp_path / "ck")) > 1
    (newest,) = (tmp_path / "ck").glob("step-0000000003-*/shard-*")
    newest.write_bytes(newest.read_bytes()[:-1])
    done = exported("torch", tmp_path / "ck", tmp_path / "x.pt")
    assert done.exit_code == 0
    assert done.stderr.startswith(f"passed over: {newest.parent}: {newest.name}: expected ")
    done = exported("torch", tmp_path / "ck", tmp_path / "y.pt", "--step", "3")
    assert f"step 3 at {tmp_path / 'ck'} is not whole: {newest.name}: expected" in done.output
    assert "HINT: the newest other whole one is --step " in done.output


def steps(url: Path) -> list[int]:
    return sorted(one.generation.step for one in generations.scan(str(url), None, None).manifests)


def test_rules_of_retention_reach_the_commit(job: str, tmp_path: Path) -> None:
    """From the keyword to the storage, over three runs of a script; the environment says it in one text, too."""
    for epochs in (1, 2, 3):
        trained(job, tmp_path / "ruled", epochs, keep="last=1,every_steps=3")
        trained(f"{job}-plain", tmp_path / "plain", epochs, keep=1)
    assert steps(tmp_path / "ruled") == [3, 6, 9]
    assert steps(tmp_path / "plain") == [9]


def test_what_another_job_starts_from_is_not_removed_meanwhile(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`resume=URL` leaves a note there while it loads, and takes it away."""
    trained(job, tmp_path / "ck")
    seen: list[int] = []
    load = torch_backend.load

    def watched(*args: Any) -> Any:
        seen.append(len(list((tmp_path / "ck").glob("step-*/reading-*"))))
        return load(*args)

    monkeypatch.setattr(torch_backend, "load", watched)
    trained(f"{job}-other", tmp_path / "other", 2, resume=str(tmp_path / "ck"))
    assert seen == [1]
    assert list((tmp_path / "ck").glob("step-*/reading-*")) == []
    assert steps(tmp_path / "other") == [6]
