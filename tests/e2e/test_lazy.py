"""DL-90: saves behind the step are whole and of their step, or they do not count. Real keeper, real optimizers."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from dlrover_hooks.checkpoint import wire
from dlrover_hooks.checkpoint.checkpointer import Checkpointer
from dlrover_hooks.checkpoint.lazy import LazyWriter
from dlrover_hooks.protocol import Restore, Source
from tests.e2e.kept import WAIT_S, Kept, segment, until

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, max_iter=3),
}


pytestmark = pytest.mark.usefixtures("runtime")


@pytest.fixture
def kept(kept: Kept) -> Kept:
    kept.keeper()
    return kept


class Run:
    """A small training loop that saves before each step, as adapters do, and remembers what it saved."""

    def __init__(self, engine: Checkpointer, optimizer: str = "adam", frozen: int = 0) -> None:
        torch.manual_seed(0)
        base = [nn.Linear(1024, 1024).requires_grad_(False) for _ in range(frozen)]
        self.model = nn.Sequential(*base, nn.Linear(1024, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))
        trained = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer, self.engine = OPTIMIZERS[optimizer](trained), engine
        self.engine.parameters = self.model.parameters
        self.closure = optimizer == "lbfgs"
        self.step()  # the gate learns of the optimizer

    @property
    def first(self) -> nn.Linear:
        return cast(nn.Linear, self.model[0])

    @property
    def third(self) -> nn.Linear:
        return cast(nn.Linear, self.model[2])

    def state(self) -> dict[str, Any]:
        return {"state": {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}}

    def save(self, number: int) -> dict[str, Any] | None:
        tree = self.state()
        before = copy.deepcopy(tree["state"])
        return before if self.engine.save(number, tree, behind=True) is not None else None

    def loss(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(8, 1024)).square().mean()
        loss.backward()
        return loss

    def step(self) -> None:
        if self.closure:
            self.optimizer.step(self.loss)  # type: ignore[arg-type]
        else:
            self.loss()
            self.optimizer.step()

    def loaded(self, kept: Kept) -> dict[str, Any]:
        generation = kept.notice(wire.Hashed).generation
        self.engine.complete(generation)
        return self.engine.load(Restore(generation, 1, Source.MEMORY)).tree["state"]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.fixture
def held_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Copies behind the step wait for this event (or the end of the test)."""
    go, fill = threading.Event(), LazyWriter.fill

    def slow(self: LazyWriter, shot: Any, target: Any, places: Any, *, alone: bool = False) -> None:
        if alone:
            assert go.wait(WAIT_S)
        fill(self, shot, target, places, alone=alone)

    monkeypatch.setattr(LazyWriter, "fill", slow)
    yield go
    go.set()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_is_saved_behind_the_step_is_of_its_step(kept: Kept, optimizer: str) -> None:
    """Parameters, moments, batch norm's buffers, and the counters of steps, bit for bit, whatever optimizer steps."""
    run = Run(kept.trainer(mode="lazy"), optimizer)
    for number in range(1, 6):
        saved = run.save(number)
        run.step()
        assert saved is not None
        assert same(run.loaded(kept), saved)
    assert run.engine.skipped == 0


def test_forward_and_backward_go_on_and_the_step_waits(kept: Kept, held_back: threading.Event) -> None:
    run = Run(kept.trainer(mode="lazy"))
    saved = run.save(1)
    run.loss()  # changes batch norm's buffers while the copy has not begun
    weight = copy.deepcopy(run.first.weight)
    stepping = threading.Thread(target=run.optimizer.step)
    stepping.start()
    stepping.join(0.2)
    assert stepping.is_alive()
    assert torch.equal(run.first.weight, weight)
    held_back.set()
    stepping.join(WAIT_S)
    assert not torch.equal(run.first.weight, weight)
    assert same(run.loaded(kept), saved)


def test_with_a_closure_it_runs_before_the_wait(kept: Kept, held_back: threading.Event) -> None:
    """Lightning's whole forward and backward run inside of `step`: a gate ahead of them would hide nothing."""
    run = Run(kept.trainer(mode="lazy"))
    saved, ran = run.save(1), threading.Event()

    def closure() -> torch.Tensor:
        loss = run.loss()
        ran.set()
        return loss

    stepping = threading.Thread(target=run.optimizer.step, args=(closure,))
    stepping.start()
    assert ran.wait(WAIT_S)
    stepping.join(0.2)
    assert stepping.is_alive()
    held_back.set()
    stepping.join(WAIT_S)
    assert same(run.loaded(kept), saved)


def _raw(tensor: torch.Tensor) -> None:
    tensor.detach().numpy()[:] += 1.0


@pytest.mark.parametrize(
    "change",
    [lambda one: one.data.add_(1.0), _raw, lambda one: nn.init.zeros_(one)],
    ids=["data", "numpy", "in place"],
)
def test_weights_changed_by_hand_are_noticed(
    kept: Kept, held_back: threading.Event, change: Callable[[torch.Tensor], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The save does not count, it is said which tensor and what to do, and saves are eager from then on."""
    run = Run(kept.trainer(mode="lazy"))
    run.save(1)
    change(run.first.weight)
    held_back.set()
    with caplog.at_level(logging.WARNING):
        run.engine.wait_copied()
    assert run.engine.skipped == 1
    assert "state.model.0.weight was changed outside of an optimizer's step" in str(run.engine.error)
    assert "wait_copied()" in str(run.engine.error)
    assert "saves are eager from here on" in caplog.text
    saved = run.save(2)
    change(run.first.weight)
    assert same(run.loaded(kept), saved)
    assert run.engine.error is None


def test_weights_that_are_swapped_are_saved_as_they_were(kept: Kept, held_back: threading.Event) -> None:
    run = Run(kept.trainer(mode="lazy"))
    saved = run.save(1)
    run.first.weight.data = run.first.weight.data + 1.0
    held_back.set()
    assert same(run.loaded(kept), saved)


def test_a_tensor_of_another_form_at_the_same_address_is_noticed(kept: Kept) -> None:
    """Names and addresses are all that a lazy save looks at before it returns; the rest is asked before it counts."""
    run = Run(kept.trainer(mode="lazy"))
    for number in (1, 2):
        run.save(number)
        run.loaded(kept)
    run.first.weight.data = run.first.weight.data.view(32, 2048)
    assert run.save(3) is not None
    run.engine.wait_copied()
    assert "another form" in str(run.engine.error)
    saved = run.save(4)
    assert same(run.loaded(kept), saved)


def test_an_eager_save_of_another_form_is_laid_out_anew(kept: Kept) -> None:
    run = Run(kept.trainer(mode="eager"))
    for number, shape in enumerate(((64, 1024), (64, 1024), (32, 2048), (32, 2048), (64, 1024)), 1):
        run.first.weight.data = run.first.weight.data.view(shape)
        saved = run.save(number)
        assert same(run.loaded(kept), saved)
    assert run.engine.skipped == 0


def test_wait_copied_lets_weights_be_changed(kept: Kept) -> None:
    run = Run(kept.trainer(mode="lazy"))
    saved = run.save(1)
    run.engine.wait_copied()
    run.first.weight.data.zero_()
    assert same(run.loaded(kept), saved)


def test_a_keeper_that_dies_under_the_copy_costs_that_save_alone(kept: Kept, held_back: threading.Event) -> None:
    run = Run(kept.trainer(mode="lazy"))
    run.save(1)
    old = kept.keeper_pid()
    kept.kill(old)
    held_back.set()
    run.step()
    assert run.engine.skipped == 1
    kept.keeper()
    saved = None
    while saved is None:  # its line is tried again after a pause
        saved = run.save(2)
        run.step()
    assert same(run.loaded(kept), saved)


class Counted:
    """Bytes that were copied, by save."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nbytes, fill = 0, LazyWriter.fill

        def counting(writer: LazyWriter, shot: Any, target: Any, places: Any, *, alone: bool = False) -> None:
            self.nbytes += sum(shot.recipe.places[place][1] for place in places)
            fill(writer, shot, target, places, alone=alone)

        monkeypatch.setattr(LazyWriter, "fill", counting)

    def take(self) -> int:
        taken, self.nbytes = self.nbytes, 0
        return taken


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_frozen_parameters_are_copied_once_for_each_slot(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """LoRA's base weights: 24 MB of them in the slot stay there; the adapter's 0.8 MB are copied."""
    run, copied = Run(kept.trainer(mode=mode), frozen=6), Counted(monkeypatch)
    sizes = []
    for number in range(1, 9):
        saved = run.save(number)
        run.step()
        sizes.append(copied.take())
        loaded = run.loaded(kept)
        assert same(loaded, saved)
    assert min(sizes[:3]) > 24e6
    assert max(sizes[3:]) < 12e6


def test_a_frozen_parameter_that_is_changed_is_copied(kept: Kept) -> None:
    run = Run(kept.trainer(mode="eager"), frozen=6)
    for number in range(1, 6):
        run.save(number)
        run.loaded(kept)
    with torch.no_grad():
        run.third.weight.add_(1.0)
    for number in range(6, 9):
        saved = run.save(number)
        assert same(run.loaded(kept), saved)


def test_damage_in_what_was_not_copied_is_found_and_mended(kept: Kept) -> None:
    run = Run(kept.trainer(mode="eager"), frozen=6)
    for number in range(1, 4):
        run.save(number)
        run.loaded(kept)
    memory = segment(kept.keeper_pid())
    for slot in range(3):
        np.frombuffer(memory.view(slot), np.uint8)[12 << 20] ^= 1
    memory.close()
    run.save(4)
    assert "chunk" in until(lambda: run.engine.damaged, "the keeper tells of the damage").reason
    saved = run.save(5)
    assert same(run.loaded(kept), saved)
