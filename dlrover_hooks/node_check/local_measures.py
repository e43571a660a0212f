"""What a node measures by itself: matrix products, copies, a disk, its own network. Runs in a process of its own.

Each measurement takes about a second. Accelerators are those of `torch.accelerator` (torch 2.6 or newer), of any make.
Without one the CPU is measured, without torch with NumPy.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from dlrover_hooks.node_check.pair_transfer import NBYTES, TransferListener, dial
from dlrover_hooks.protocol import MeasureKind, Secret

_BUDGET_S = 0.5
"""Spent on repetitions of one measurement, after a first one that counts for nothing."""
_CPU_SIZE, _DEVICE_SIZE = 1024, 4096
"""Rows of the square matrices. Products of the first take some 40 ms on two cores, of the second 10 ms on a GPU."""
_HOST_BYTES, _DEVICE_BYTES = 64 << 20, 256 << 20
"""More than the caches hold."""
_DISK_BYTES, _DISK_S, _BLOCK_BYTES = 64 << 20, 2.0, 4 << 20
"""Written to the disk: so many bytes, or what it takes in that time, block by block."""
_LOOPBACK_S = 20.0


class MeasureTask(NamedTuple):
    """One measurement that can be made. `run` returns the speed, or raises the reason why there is none."""

    kind: MeasureKind
    what: str
    model: str
    run: Callable[[], float]


def tasks(folder: str) -> Iterator[MeasureTask]:
    """The measurements of this node, in order. Each is to be run before the next is asked for."""
    if importlib.util.find_spec("torch") is not None:
        yield from _by_torch()
    else:
        yield MeasureTask(MeasureKind.COMPUTE, "cpu", "cpu", _numpy_products)
    yield MeasureTask(MeasureKind.MEMORY, "host", "host", _host_copies)
    disk = _Disk(folder)
    yield MeasureTask(MeasureKind.DISK_WRITE, folder, "", disk.write)
    if disk.written:
        yield MeasureTask(MeasureKind.DISK_READ, folder, "", disk.read)
    disk.close()
    yield MeasureTask(MeasureKind.LOOPBACK, "127.0.0.1", "", _loopback)


def _rate(amount: float, once: Callable[[], object]) -> float:
    """`amount` by the median time of `once`, repeated for `_BUDGET_S` seconds."""
    once()
    spent: list[float] = []
    while sum(spent) < _BUDGET_S:
        began = time.perf_counter()
        once()
        spent.append(time.perf_counter() - began)
    return amount / statistics.median(spent)


# ---- compute and memory ----------------------------------------------------------------------------------------------


def _by_torch() -> Iterator[MeasureTask]:
    import torch

    accelerator: Any = getattr(torch, "accelerator", None)
    if accelerator is None or not accelerator.is_available():
        yield MeasureTask(MeasureKind.COMPUTE, "cpu", "cpu", lambda: _torch_products(torch, "cpu", lambda: None))
        return
    kind = accelerator.current_accelerator().type
    for index in range(accelerator.device_count()):
        device = f"{kind}:{index}"
        # torch.accelerator has no name of a device; a back end's own module may have one
        name_of = getattr(torch.get_device_module(kind), "get_device_name", None)
        model = str(name_of(index)) if name_of is not None else kind

        def synchronize(index: int = index) -> None:
            accelerator.synchronize(index)

        def products(device: str = device, synchronize: Callable[[], None] = synchronize) -> float:
            return _torch_products(torch, device, synchronize)

        def copies(device: str = device, synchronize: Callable[[], None] = synchronize) -> float:
            return _torch_copies(torch, device, synchronize)

        yield MeasureTask(MeasureKind.COMPUTE, device, model, products)
        yield MeasureTask(MeasureKind.MEMORY, device, model, copies)


def _torch_products(torch: Any, device: str, synchronize: Callable[[], None]) -> float:
    """FLOP/s of float32 products. Raises ArithmeticError if a product is wrong.

    The factors are 0, 1 and 2, so that the product is exact in float32 and TF32. It is compared with one vector
    (Freivalds, 1977), in float64 on the CPU.
    """
    size = _CPU_SIZE if device == "cpu" else _DEVICE_SIZE
    left, right = (torch.randint(0, 3, (size, size)).float() for _ in range(2))
    there = left.to(device), right.to(device)
    product = there[0] @ there[1]

    def once() -> None:
        torch.matmul(*there, out=product)
        synchronize()

    speed = _rate(2.0 * size**3, once)
    ones = torch.ones(size, dtype=torch.float64)
    if not torch.equal(product.cpu().double() @ ones, left.double() @ (right.double() @ ones)):
        raise ArithmeticError("a matrix product is wrong")
    return speed


def _torch_copies(torch: Any, device: str, synchronize: Callable[[], None]) -> float:
    source = torch.zeros(_DEVICE_BYTES, dtype=torch.uint8, device=device)
    sink = torch.empty_like(source)

    def once() -> None:
        sink.copy_(source)
        synchronize()

    return _rate(_DEVICE_BYTES, once)


def _numpy_products() -> float:
    """As `_torch_products`, on the CPU."""
    chance = np.random.default_rng(0)
    left, right = (chance.integers(0, 3, (_CPU_SIZE, _CPU_SIZE)).astype(np.float32) for _ in range(2))
    product = np.empty_like(left)
    speed = _rate(2.0 * _CPU_SIZE**3, lambda: np.matmul(left, right, out=product))
    ones = np.ones(_CPU_SIZE)
    if not np.array_equal(product @ ones, left @ (right @ ones)):
        raise ArithmeticError("a matrix product is wrong")
    return speed


def _host_copies() -> float:
    source = np.zeros(_HOST_BYTES, dtype=np.uint8)
    sink = np.empty_like(source)
    source[:] = 1  # pages of zeros are all one page
    return _rate(_HOST_BYTES, lambda: np.copyto(sink, source))


# ---- disk and network ------------------------------------------------------------------------------------------------


class _Disk:
    """A file without a name in `folder`: the kernel removes it however this process ends."""

    def __init__(self, folder: str) -> None:
        self._folder, self._file, self.written = folder, None, 0
        self._block = np.random.default_rng(0).bytes(_BLOCK_BYTES)

    def write(self) -> float:
        """Bytes per second until they are durable, by the median time of a block."""
        self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - `close` does
        spent: list[float] = []
        while len(spent) * _BLOCK_BYTES < _DISK_BYTES and sum(spent) < _DISK_S:
            began = time.perf_counter()
            self._write_block()
            os.fsync(self._file.fileno())
            spent.append(time.perf_counter() - began)
        self.written = len(spent)
        return _BLOCK_BYTES / statistics.median(spent)

    def _write_block(self) -> None:
        assert self._file is not None
        left = memoryview(self._block)
        while left:
            left = left[self._file.write(left) :]

    def read(self) -> float:
        """Bytes per second, likewise, from the disk if the file system drops its cache. Raises OSError for others."""
        assert self._file is not None
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._file.seek(0)
        spent, buffer = list[float](), bytearray(_BLOCK_BYTES)
        for _ in range(self.written):
            began, filled = time.perf_counter(), 0
            while filled < _BLOCK_BYTES:
                filled += self._file.readinto(memoryview(buffer)[filled:]) or _short(filled)
            spent.append(time.perf_counter() - began)
            if buffer != self._block:
                raise OSError("the bytes that were read are not those that were written")
        return _BLOCK_BYTES / statistics.median(spent)

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            self._file.close()


def _short(filled: int) -> int:
    raise OSError(f"the file ends after {filled} bytes of a block")


def _loopback() -> float:
    secret = Secret("loopback")
    with TransferListener("127.0.0.1", 0, secret) as listener:
        return dial("127.0.0.1", listener.port, secret, 0, "itself", _LOOPBACK_S, nbytes=8 * NBYTES).speed
