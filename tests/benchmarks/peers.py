"""Other savers, as their own documentation has them called. Timed is how long the training thread is held up."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from dlrover_hooks.integrations.lightning.async_checkpoint_io import FlashCheckpointIO
from dlrover_hooks.pytorch.dcp_writer import FlashStager, FlashWriter


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

    def __init__(self, state: dict[str, Any], folder: Path) -> None:
        self._state, self._path = state, folder / "dcp"
        store = dist.FileStore(str(folder / "store"), 1)
        dist.init_process_group("gloo", rank=0, world_size=1, store=store)

    def save(self) -> None:
        self._future: Any = dcp.async_save(self._state, checkpoint_id=self._path)

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


class FlashIO:
    """Ours in the place of Lightning's: the same stock file, atomic and durable."""

    def __init__(self, state: dict[str, Any], folder: Path) -> None:
        self._state, self._path = state, folder / "flash.ckpt"
        self._io = FlashCheckpointIO()

    def save(self) -> None:
        self._io.save_checkpoint(self._state, self._path)

    def settle(self) -> None:
        self._io.load_checkpoint(self._path, weights_only=True)  # waits for what is under way
        self._path.unlink()

    def close(self) -> None:
        self._io.teardown()


class FlashDcp:
    """`async_save` with our stager and our writer."""

    def __init__(self, state: dict[str, Any], folder: Path) -> None:
        self._state, self._url, self._step = state, str(folder / "tree"), 0
        self._stager = FlashStager()

    def save(self) -> None:
        self._step += 1
        writer = FlashWriter(self._url, step=self._step, job="bench", keep=1)
        self._future: Any = dcp.async_save(self._state, storage_writer=writer, async_stager=self._stager)

    def settle(self) -> None:
        getattr(self._future, "upload_completion", self._future).result()
        del self._future

    def close(self) -> None:
        self._stager.close()
