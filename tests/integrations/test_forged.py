"""A checkpoint whose hashes match, but whose state no save ever wrote, is damaged: the one before is taken."""

from __future__ import annotations

import json
import logging
import os
import shutil
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dlrover_hooks.checkpoint.memory.checksums import digests
from dlrover_hooks.checkpoint.restore import generation_loader, stored_image
from dlrover_hooks.checkpoint.state.safetensors_header import OURS, header_end
from dlrover_hooks.checkpoint.storage.catalog import MANIFEST
from dlrover_hooks.checkpoint.storage.stall_guard import StallGuard
from dlrover_hooks.protocol import Manifest
from tests.integrations.torch_cases import Crash, train
from tests.ranks import left_of, named_job
from tests.waiting import until


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def without(*path: str | int) -> Callable[[dict[str, Any]], None]:
    def change(skeletons: dict[str, Any]) -> None:
        at: Any = skeletons
        for key in path[:-1]:
            at = at[key]
        del at[path[-1]]

    return change


def other(value: Any, *path: str | int) -> Callable[[dict[str, Any]], None]:
    def change(skeletons: dict[str, Any]) -> None:
        at: Any = skeletons
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value

    return change


FORGED: dict[str, Callable[[dict[str, Any]], None]] = {
    "no state": without("state"),
    "no data": without("data"),
    "half a random state": other({"$tuple": [3, {"$tuple": [1, 2]}, None]}, "rank", "rng", "python"),
    "a dataset that is a number": other(1, "data", "train"),
    "a state that is a list": other([], "state"),
    "a step below 0": other(-5, "state", "step"),
    "a model that is a list": other([], "state", "model"),
    "no optimizer": without("state", "optimizer"),
    "an optimizer without state": without("state", "optimizer", "state"),
    "a group without parameters": other([{"lr": 0.1}], "state", "optimizer", "param_groups"),
    "moments that are a list": other([1, 2], "state", "optimizer", "state", "0.weight"),
    "extra that is a number": other(1, "state", "extra"),
    "no bucket order": without("state", "bucket_order"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two durable generations: one of a launch that crashes, and the last one."""
    url = tmp_path_factory.mktemp("forged") / "saved"
    with named_job("forged-origin") as job:
        with pytest.raises(Crash):
            train(job, at=("forward", 5), save_to=str(url), persist_every=1, keep=2)
        until(lambda: list(url.glob(f"step-*/{MANIFEST}")), "a durable generation")
        train(job, save_to=str(url), persist_every=1, keep=2)
        until(lambda: not left_of(job), "the end of the keeper, which writes no more")
    assert len(list(url.glob(f"step-*/{MANIFEST}"))) == 2
    return url


def forge(home: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what the generation in `home` says of the state; all its hashes match."""
    (file,) = home.glob("shard-*")
    data = file.read_bytes()
    end = header_end(data, len(data))
    header = json.loads(data[8:end])
    inside = json.loads(header["__metadata__"][OURS])
    change(inside["skeletons"])
    header["__metadata__"][OURS] = json.dumps(inside)
    text = json.dumps(header, separators=(",", ":")).encode()
    data = struct.pack("<Q", end - 8) + text.ljust(end - 8) + data[end:]
    file.write_bytes(data)
    manifest = msgspec.json.decode((home / MANIFEST).read_bytes(), type=Manifest)
    (row,) = manifest.files
    rows = (msgspec.structs.replace(row, chunks=digests(memoryview(data))),)
    (home / MANIFEST).write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, files=rows)))


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED.keys())
def test_a_forged_state_is_corrupt_and_the_generation_before_is_taken(
    saved: Path, tmp_path: Path, job: str, change: Callable[[dict[str, Any]], None], caplog: pytest.LogCaptureFixture
) -> None:
    here = tmp_path / "saved"
    shutil.copytree(saved, here)
    older, newer = sorted(here.glob("step-*"))
    forge(newer, change)
    step = int(older.name.split("-")[1])
    with caplog.at_level(logging.WARNING, "dlrover_hooks"), pytest.raises(Crash):
        train(job, at=("forward", step), resume=str(here))
    assert "cannot load" in caplog.text
    assert f"resumes step {step} " in caplog.text


def test_a_generation_whose_read_stands_still_is_passed_over(
    saved: Path, tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a mount whose server is gone. The generation before is read."""
    here, released, read_at = tmp_path / "saved", threading.Event(), stored_image._read_at
    shutil.copytree(saved, here)
    older, newer = sorted(here.glob("step-*"))

    def hangs(fd: int, start: int, pieces: list[memoryview]) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(newer)):
            released.wait(60)
        read_at(fd, start, pieces)

    monkeypatch.setattr(stored_image, "READS", StallGuard(stall_s=0.2))
    monkeypatch.setattr(generation_loader, "READS", stored_image.READS)
    monkeypatch.setattr(stored_image, "_read_at", hangs)
    step = int(older.name.split("-")[1])
    try:
        with caplog.at_level(logging.WARNING, "dlrover_hooks"), pytest.raises(Crash):
            train(job, at=("forward", step), resume=str(here))
    finally:
        released.set()
    assert "nothing moved for 0.2 s" in caplog.text
    assert f"resumes step {step} " in caplog.text
