"""Saves behind the step from a CUDA device: whole and of their step, or they do not count. Needs a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.e2e.kept import Kept
from tests.e2e.test_overlapped_writer import Run, same

pytestmark = [
    pytest.mark.usefixtures("runtime"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


class OnDevice(Run):
    """Its model and optimizer are on the device."""

    def loss(self) -> torch.Tensor:
        self.model.cuda()
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(8, 1024, device="cuda")).square().mean()
        loss.backward()
        return loss


def _cpu(value: object) -> object:
    if isinstance(value, dict):
        return {key: _cpu(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_cpu(one) for one in value]
    return value.cpu() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "fused"])
def test_what_is_saved_from_a_device_is_of_its_step(kept: Kept, mode: str, optimizer: str) -> None:
    kept.keeper()
    run = OnDevice(kept.trainer(mode=mode), optimizer, frozen=2)
    for number in range(1, 8):
        saved = run.save(number)
        run.step()
        assert saved is not None
        assert same(run.loaded(kept), _cpu(saved))
    assert run.engine.skipped == 0


@pytest.mark.parametrize(
    "change",
    [lambda one: nn.init.zeros_(one), lambda one: setattr(one, "data", one.data + 1)],
    ids=["in place", "swap"],
)
def test_weights_on_a_device_changed_by_hand_are_noticed(kept: Kept, change: Callable[[torch.Tensor], object]) -> None:
    """Also when the step follows at once: the host does not wait for the copy before it."""
    kept.keeper()
    run = OnDevice(kept.trainer(mode="lazy"))
    run.save(1)
    change(run.first.weight)
    run.step()
    run.engine.wait_copied()
    assert "was changed outside of an optimizer's step" in str(run.engine.error)
    saved = run.save(2)
    assert same(run.loaded(kept), _cpu(saved))
