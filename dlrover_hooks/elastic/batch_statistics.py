"""Batch statistics: small buffers that a forward changes on each rank by itself, and DDP then takes from rank 0.

Parameters and optimizer state are the same on all ranks. These are not, between two steps, so a lone image of another
rank has the wrong ones. Rank 0 notes them as it goes (`drawn`), and all put them back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from dlrover_hooks.rng.rank_journal import Statistics

EACH_BYTES, ALL_BYTES = 64 << 10, 2 << 20
"""Larger buffers are taken for constants. Models with more of the small ones (ResNet-152 has 0.6 MB) have them from the
image. Taking 159 of them (ResNet-50) costs 0.2 ms, twice a step."""


class BatchStatistics:
    """Of models in host memory. `take` on the thread that steps, or while it waits; `put_back` before training."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        modules = [module for model in models for module in model.modules()]
        self._buffers = [(index, one._buffers) for index, one in enumerate(modules) if one._buffers]
        nbytes = sum(len(name) + tensor.nbytes + 16 for name, tensor in self._small())
        self.nbytes = nbytes if nbytes <= ALL_BYTES else 0
        """Of what is taken, at most."""

    def take(self) -> Statistics:
        """As they are now."""
        if not self.nbytes:
            return ()
        return tuple((name, ctypes.string_at(one.data_ptr(), one.nbytes)) for name, one in self._small())

    @torch.no_grad()
    def put_back(self, taken: Statistics) -> bool:
        """All of them, or none where the models have others."""
        here = dict(self._small())
        if [(name, len(data)) for name, data in taken] != [(name, one.nbytes) for name, one in here.items()]:
            return False
        for name, data in taken:
            here[name].copy_(torch.frombuffer(bytearray(data), dtype=here[name].dtype).view(here[name].shape))
        return True

    def _small(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, buffers in self._buffers:
            for name, one in buffers.items():
                if one is not None and _plain(one) and 0 < one.nbytes <= EACH_BYTES:
                    yield f"{index}.{name}", one


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous()
