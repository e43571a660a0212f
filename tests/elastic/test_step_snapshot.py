"""The small set: what a fault leaves half changed is put back exactly, or it is said why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from dlrover_hooks import rng
from dlrover_hooks.elastic.step_snapshot import SMALL_BYTES, StepSnapshot
from dlrover_hooks.errors import RoundEnded


class Made:
    """A model with all that changes outside of an optimizer's step."""

    def __init__(self, *more: nn.Module) -> None:
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), *more)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.schedule = StepLR(self.optimizer, 1, 0.5)
        self.refused = False
        self.small = StepSnapshot([self.model], [self.optimizer], self.extra, self.check)

    def extra(self) -> list[dict[str, Any]]:
        return [self.schedule.state_dict()]

    def check(self) -> None:
        if self.refused:
            raise RoundEnded("broken")

    def forward(self) -> torch.Tensor:
        return self.model(torch.randn(8, 4)).square().mean()

    def step(self) -> None:
        self.forward().backward()
        self.optimizer.step()
        self.schedule.step()

    def state(self) -> list[Any]:
        return [value.tolist() for value in self.model.state_dict().values()] + [
            self.optimizer.param_groups[0]["lr"], self.optimizer.state_dict()["state"][0]["momentum_buffer"].tolist(),
        ]  # fmt: skip


@pytest.fixture
def made() -> Any:
    one = Made()
    yield one
    one.small.close()


def test_a_step_that_fails_half_way_is_undone(made: Made) -> None:
    """Batch statistics do not even raise their version."""
    made.step()
    made.small.keep(1, rng.take())
    before, extra, random = made.state(), made.extra(), torch.get_rng_state()
    made.forward().backward()
    made.schedule.step()
    assert made.state() != before
    assert made.small.roll_back() == ""
    assert made.state() == before
    assert made.small.extra == extra
    assert torch.equal(made.small.random.state()["torch"], random)
    assert made.small.step == 1


def test_a_buffer_that_was_replaced_comes_back(made: Made) -> None:
    made.step()
    made.small.keep(1, rng.take())
    before = made.state()
    made.model[1].running_mean = torch.ones(4)
    assert made.small.roll_back() == ""
    assert made.state() == before


def test_a_step_that_was_begun_cannot_be_undone(made: Made) -> None:
    made.step()
    made.small.keep(1, rng.take())
    made.step()
    assert "step was begun" in made.small.roll_back()


def test_weights_changed_by_hand_are_noticed(made: Made) -> None:
    made.step()
    made.small.keep(1, rng.take())
    with torch.no_grad():
        next(made.model.parameters()).mul_(2)
    assert "changed outside" in made.small.roll_back()


def test_large_buffers_are_not_copied_but_watched() -> None:
    large, table = nn.Identity(), torch.zeros(SMALL_BYTES // 4 + 1)
    large.register_buffer("table", table)
    made = Made(large)
    made.step()
    made.small.keep(1, rng.take())
    assert made.small.roll_back() == ""
    table.add_(1)
    assert "no parameter" in made.small.roll_back()
    made.small.close()


def test_a_module_with_a_state_of_its_own_is_not_vouched_for() -> None:
    class Own(nn.Identity):
        def get_extra_state(self) -> int:
            return 1

    made = Made(Own())
    made.step()
    made.small.keep(1, rng.take())
    assert "Own" in made.small.roll_back()
    made.small.close()


def test_no_step_is_made_in_a_broken_round(made: Made) -> None:
    """What an aborted collective left in the gradients must not reach the weights."""
    made.step()
    made.small.keep(1, rng.take())
    before = made.state()
    made.forward().backward()
    made.refused = True
    with pytest.raises(RoundEnded):
        made.optimizer.step()
    assert made.small.roll_back() == ""
    assert made.state() == before


def test_before_the_first_step_there_is_nothing(made: Made) -> None:
    assert "no step" in made.small.roll_back()


def test_weights_that_are_swapped_without_a_trace(made: Made) -> None:
    """As averaged ones are for a validation."""
    made.step()
    made.small.keep(1, rng.take(), swaps=True)
    assert made.small.roll_back() == ""
    weight = next(made.model.parameters())
    kept = weight.detach().clone()
    weight.data.mul_(2)
    assert "a parameter was changed" in made.small.roll_back()
    weight.data.copy_(kept)
    assert made.small.roll_back() == ""
