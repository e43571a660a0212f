"""Other savers, each as its own documentation has it called. What is timed is how long the training thread is held up."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch.distributed.checkpoint.stateful import STATE_DICT_TYPE

Call = Callable[[], Any]


class TorchSave:
    """`torch.save` to a file, the page cache included: it is not even durable."""

    def __init__(self, state: dict[str, Any], folder: Path) -> None:
        self._state, self._path = state, folder / "torch.pt"

    def save(self) -> None:
        torch.save(self._state, self._path)

    def settle(self) -> None:
        self._path.unlink()

    def close(self) -> None: ...


class DcpAsync:
    """`torch.distributed.checkpoint.async_save`, default stager, one gloo rank."""

    def __init__(self, state: STATE_DICT_TYPE, folder: Path) -> None:
        self._state, self._path = state, folder / "dcp"
        store = dist.FileStore(str(folder / "store"), 1)
        dist.init_process_group("gloo", rank=0, world_size=1, store=store)

    def save(self) -> None:
        self._future = dcp.async_save(self._state, checkpoint_id=self._path)

    def settle(self) -> None:
        getattr(self._future, "upload_completion", self._future).result()
        shutil.rmtree(self._path)

    def close(self) -> None:
        dist.destroy_process_group()


class LightningAsync:
    """Lightning's `AsyncCheckpointIO` around its plain one."""

    def __init__(self, state: dict[str, Any], folder: Path) -> None:
        self._state, self._path = state, folder / "lightning.ckpt"
        self._io = AsyncCheckpointIO(TorchCheckpointIO())

    def save(self) -> None:
        self._io.save_checkpoint(self._state, self._path)

    def settle(self) -> None:
        assert self._io._executor is not None
        self._io._executor.submit(lambda: None).result()  # its one thread is done with all before
        self._path.unlink()

    def close(self) -> None:
        self._io.teardown()
