"""Small buffers are taken and put back, bit for bit, or not at all."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dlrover_hooks.elastic import batch_statistics
from dlrover_hooks.elastic.batch_statistics import BatchStatistics


class Own(nn.Module):
    """Buffers of every sort. `twice` is a view of other memory, `none` none, `empty` without elements."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(size)
        self.register_buffer("brief", torch.rand(5).bfloat16())
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("none", None)
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("crossed", torch.rand(2, 3).t())
        self.register_buffer("mask", torch.rand(batch_statistics.EACH_BYTES // 4 + 1))


def small(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one for name, one in model.named_buffers() if name.split(".")[-1] not in ("empty", "crossed", "mask")}


def test_they_come_back_bit_for_bit() -> None:
    """Into another model; what is large or lies crosswise is left as it is."""
    one, other = Own(), Own()
    one.norm(torch.randn(8, 3))
    mask = other.get_buffer("mask").clone()
    taken = BatchStatistics([one]).take()
    assert BatchStatistics([other]).put_back(taken)
    assert len(taken) == len(small(one)) == 5
    assert all(torch.equal(small(one)[name], there) for name, there in small(other).items())
    assert torch.equal(other.get_buffer("mask"), mask)


def test_what_was_taken_does_not_change() -> None:
    model = Own()
    taken = BatchStatistics([model]).take()
    model.norm(torch.randn(8, 3))
    assert BatchStatistics([model]).take() != taken
    assert BatchStatistics([model]).put_back(taken)
    assert BatchStatistics([model]).take() == taken


@pytest.mark.parametrize("other", [[Own(4)], [nn.BatchNorm1d(3)], [nn.Linear(1, 1)], [Own(), Own()]])
def test_all_or_none(other: list[nn.Module]) -> None:
    """A model of another shape keeps its own."""
    before = [buffer.clone() for model in other for buffer in model.buffers()]
    assert not BatchStatistics(other).put_back(BatchStatistics([Own()]).take())
    assert all(map(torch.equal, before, (buffer for model in other for buffer in model.buffers())))


def test_too_many_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_statistics, "ALL_BYTES", 100)
    there = BatchStatistics([Own()])
    assert (there.nbytes, there.take()) == (0, ())
