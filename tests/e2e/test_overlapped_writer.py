"""Saves behind the step are whole and of their step, or they do not count. Real keeper, real optimizers."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from dlrover_hooks.checkpoint.checkpointer import Checkpointer
from dlrover_hooks.checkpoint.ipc import keeper_messages
from dlrover_hooks.checkpoint.save import copy_thread
from dlrover_hooks.checkpoint.save.overlapped_writer import LazyWriter
from dlrover_hooks.checkpoint.tensors import torch_backend
from dlrover_hooks.protocol import Restore, Source
from tests.e2e.kept import Kept, segment
from tests.waiting import WAIT_S, until

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
        generation = kept.notice(keeper_messages.Hashed).generation
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


def test_a_moving_average_is_never_of_two_steps(kept: Kept, held_back: threading.Event) -> None:
    """No optimizer's step changes it, so it is copied before `save` returns; its update does not wait either."""
    run = Run(kept.trainer(mode="lazy"))
    average: Any = AveragedModel(run.model, use_buffers=True)
    average.update_parameters(run.model)
    run.step()
    state = run.state
    run.state = lambda: {"state": {**state()["state"], "average": average.state_dict()}}
    saved = run.save(1)
    average.update_parameters(run.model)
    assert saved is not None
    assert not same(saved["average"], average.state_dict())
    held_back.set()
    assert same(run.loaded(kept), saved)
    assert run.engine.skipped == 0


def test_weights_that_are_swapped_are_saved_as_they_were(kept: Kept, held_back: threading.Event) -> None:
    run = Run(kept.trainer(mode="lazy"))
    saved = run.save(1)
    run.first.weight.data = run.first.weight.data + 1.0
    held_back.set()
    assert same(run.loaded(kept), saved)


GIVES_BACK = """
import sys, threading, torch, uuid
from dlrover_hooks.checkpoint.save import copy_thread as aside
from dlrover_hooks.checkpoint.save.copy_thread import CopyThread
from dlrover_hooks.checkpoint.checkpointer import Checkpointer
from dlrover_hooks.checkpoint.save.overlapped_writer import LazyWriter

go, fill, wait, drain, given_up = threading.Event(), LazyWriter.fill, CopyThread.wait, CopyThread.drain, sys.argv[2]
aside.WAIT_S = 0.0 if given_up else 60.0

def held_back(self, shot, target, places, *, alone=False):
    if alone:
        go.wait()
    fill(self, shot, target, places, alone=alone)

def waits(self):
    if saved and not given_up:
        go.set()
    wait(self)

def drains(self):
    go.set()
    drain(self)

model = torch.nn.Linear(4096, 4096)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
LazyWriter.fill, CopyThread.wait, CopyThread.drain, saved = held_back, waits, drains, []
engine = Checkpointer(sys.argv[1], "node", 0, mode="lazy", start_keeper=False)
optimizer.step()
engine.begin(uuid.uuid4().hex, 1, 0, 1)
saved.append(engine.save(1, {"state": {"model": model.state_dict()}}, behind=True))
if given_up:
    engine.wait_copied()
model.weight.untyped_storage().resize_(0)
go.set()
engine.wait_copied()
print("alive", engine.skipped, torch.UntypedStorage.resize_ is torch._C.StorageBase.resize_)
engine.close()
"""


@pytest.mark.deep
@pytest.mark.parametrize("given_up", ["", "given up"])
def test_a_storage_that_is_resized_under_the_copy_waits_for_it(kept: Kept, given_up: str) -> None:
    """What FSDP does to free parameters: the copy would read memory that is unmapped, and the process would die.

    Also where the optimizer waits for that copy no more.
    """
    command = [sys.executable, "-W", "error", "-c", GIVES_BACK, "job", given_up]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("alive ")
    assert done.stdout.endswith("True\n"), "torch's own method is back"


def test_a_copy_that_hangs_costs_saves_but_not_the_run(
    kept: Kept, held_back: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The optimizer waits for a fixed time and in proportion to the bytes, once: that save is lost."""
    run = Run(kept.trainer(mode="lazy"))
    nbytes = 3 * 4 * (1024 * 64 + 64)
    monkeypatch.setattr(copy_thread, "WAIT_S", 0.1)
    monkeypatch.setattr(copy_thread, "COPY_BYTES_PER_S", nbytes / 0.1)
    assert run.save(1) is not None
    run.step()
    writer = cast(LazyWriter, run.engine._writer)
    assert 0.2 <= writer.aside.waited_s < WAIT_S / 2
    assert "that save is given up" in caplog.text
    assert run.save(2) is None
    assert "has not ended yet" in str(run.engine.error)
    run.step()
    assert 0.2 <= writer.aside.waited_s < WAIT_S / 2
    monkeypatch.setattr(copy_thread, "WAIT_S", WAIT_S)
    held_back.set()
    until(lambda: run.engine.skipped == 2, "the end of the copy")
    saved = until(lambda: run.save(3), "a save")
    assert same(run.loaded(kept), saved)


def test_memory_that_is_given_up_under_the_copy_is_read_to_the_end(kept: Kept, held_back: threading.Event) -> None:
    """The optimizer's state moves (offloading), and nobody else has what is being copied: that save does not count."""
    run = Run(kept.trainer(mode="lazy"))
    moments = run.optimizer.state[run.first.weight]
    moments["exp_avg"].data = torch.zeros(64, 64 << 10)  # 16 MB: given back to the system at once
    assert run.save(1) is not None
    moments["exp_avg"].data = torch.zeros(64, 1024)
    held_back.set()
    run.engine.wait_copied()
    assert "state.optimizer" in str(run.engine.error)
    saved = run.save(2)
    assert same(run.loaded(kept), saved)


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_a_tensor_of_another_form_at_the_same_address_is_laid_out_anew(kept: Kept, mode: str) -> None:
    """A lazy save looks at all forms in one pass before it returns, an eager one at the latest while it copies."""
    if mode == "lazy" and (torch_backend._look is None or torch_backend._EXCHANGE is None):
        pytest.skip("no C helper, or a torch that does not tell it: see the next test")
    run = Run(kept.trainer(mode=mode))
    for number, shape in enumerate(((64, 1024), (64, 1024), (32, 2048), (32, 2048), (64, 1024)), 1):
        run.first.weight.data = run.first.weight.data.view(shape)
        saved = run.save(number)
        assert same(run.loaded(kept), saved)
    assert run.engine.skipped == 0


def test_a_tensor_of_another_form_at_the_same_address_is_noticed(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python, names, addresses and sizes are all that it looks at; the rest is asked before the copy counts."""
    monkeypatch.setattr(torch_backend, "_look", None)
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


def test_a_slot_holds_nothing_until_its_copy_has_ended(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, or whatever else ends a slot's first copy: nobody takes frozen weights for copied that never were."""
    run = Run(kept.trainer(mode="eager"), frozen=6)
    run.save(1)
    run.loaded(kept)

    def end(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    for number in range(2, 6):
        with monkeypatch.context() as patch:
            patch.setattr(LazyWriter, "fill", end)
            with pytest.raises(KeyboardInterrupt):
                run.save(number)
        saved = run.save(number)
        assert same(run.loaded(kept), saved)


def test_a_save_that_is_laid_out_again_copies_what_is_frozen(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one core that is noticed before anything is copied, in a slot that has never been filled."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    run = Run(kept.trainer(mode="eager"), frozen=6)
    square = run.third.weight
    for number in range(1, 6):
        if number == 3:
            square.data = square.data.t()
        saved = run.save(number)
        assert same(run.loaded(kept), saved)
    assert run.engine.skipped == 0


@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.parametrize(
    "change",
    [lambda one: one.data.add_(0.01 * torch.randn(1024, 1024)), lambda one: one.data[123:127].fill_(7.0)],
    ids=["merged", "some rows"],
)
def test_frozen_parameters_changed_without_a_version_are_never_restored_as_they_were(
    kept: Kept, mode: str, change: Callable[[torch.Tensor], None], caplog: pytest.LogCaptureFixture
) -> None:
    """What peft's merge and ReLoRA do. A lazy save that meets it does not count; nothing frozen is left out again."""
    run = Run(kept.trainer(mode=mode), frozen=4)
    for number in range(1, 9):
        if number in (5, 7):
            change(run.third.weight)
        saved = run.save(number)
        run.engine.wait_copied()
        if mode == "lazy" and number == 5:
            assert "state.model.2.weight was changed, and its version does not tell" in str(run.engine.error)
        else:
            assert same(run.loaded(kept), saved)
        run.step()
    assert run.engine.skipped == (mode == "lazy")
    assert caplog.text.count("frozen parameters are copied at every save from here on") == 1


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
