"""What is changed while it is copied is noticed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dlrover_hooks.checkpoint.memory.memcpy import Copier
from dlrover_hooks.checkpoint.save import cuda_copy
from dlrover_hooks.checkpoint.save.optimizer_gate import CELL_BYTES, ByteSamples, Traces
from dlrover_hooks.checkpoint.save.overlap_policy import EAGER, LAZY, Mode
from dlrover_hooks.checkpoint.save.overlapped_writer import LazyWriter

SIZES = (5, 64, 8 * CELL_BYTES + 3, 100)


@pytest.mark.parametrize("native", [None, False])
def test_two_cells_in_a_row_are_noticed_for_certain(native: bool | None) -> None:
    """An expert of a stack, a slice of a fused weight: what is not the whole tensor."""
    tensors = [np.zeros(size, np.uint8) for size in SIZES]
    samples = ByteSamples([one.ctypes.data for one in tensors], SIZES, Copier(native=native))
    copies = [one.copy() for one in tensors]
    where = np.asarray([one.ctypes.data for one in copies], np.uint64)
    for at in (0, 1, 3 * CELL_BYTES - 1, 6 * CELL_BYTES + 3):
        samples.take()
        assert samples.differing(where) is None
        copies[2][at : at + 2 * CELL_BYTES] = 7
        assert samples.differing(where) == 2
        copies[2][:] = 0
        samples.move()


@pytest.mark.parametrize("index", range(len(SIZES)))
def test_a_tensor_that_is_changed_is_named(index: int) -> None:
    tensors = [np.zeros(size, np.uint8) for size in SIZES]
    samples = ByteSamples([one.ctypes.data for one in tensors], SIZES, Copier())
    samples.take()
    copies = [one + (place == index) for place, one in enumerate(tensors)]
    assert samples.differing(np.asarray([one.ctypes.data for one in copies], np.uint64)) == index


def test_what_a_step_changes_is_told_from_what_was_changed_before_it() -> None:
    """On CUDA the host is in the step while the copy goes on: the traces are compared ahead of it."""
    for by_hand, found in ((None, None), (1, 1)):
        tensors = [torch.zeros(3) for _ in range(3)]
        traces = Traces(tensors)
        if by_hand is not None:
            tensors[by_hand].add_(1.0)
        assert traces.changed() == found  # at the gate
        tensors[0].add_(1.0)  # the step
        assert traces.changed() == found  # on the copying thread


def test_a_swapped_tensor_is_noticed() -> None:
    tensors = [torch.zeros(3) for _ in range(3)]
    traces = Traces(tensors)
    tensors[2].data = torch.ones(3)
    assert traces.changed() == 2


def test_a_tensor_of_inference_mode_does_not_hide_the_others() -> None:
    with torch.inference_mode():
        without = torch.zeros(3)
    tensors = [torch.zeros(3), without, torch.zeros(3)]
    traces = Traces(tensors)
    tensors[2].add_(1.0)
    assert traces.changed() == 2


def test_a_step_that_is_captured_in_a_graph_ends_lazy_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replays call no hook: nothing would wait for a copy."""
    writer = LazyWriter(Mode(LAZY), lambda _: None, tuple)
    weight = torch.nn.Parameter(torch.zeros(3))
    weight.grad = torch.ones(3)
    optimizer = torch.optim.SGD([weight], 0.1)
    try:
        optimizer.step()
        assert writer.mode.next() == LAZY
        monkeypatch.setattr(cuda_copy, "capturing", lambda: True)
        optimizer.step()
        monkeypatch.undo()
        assert writer.mode.next() == EAGER
    finally:
        writer.close()
