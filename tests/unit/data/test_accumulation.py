"""A loop written without accumulation, where a step has several micro-batches: the same steps, to rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from dlrover_hooks.data.loader import ElasticLoader, elastic_loader
from dlrover_hooks.errors import UsageError
from dlrover_hooks.integrations.torch import AsyncCheckpointer

G = 12


@pytest.fixture(autouse=True)
def _no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """AsyncCheckpointer without a seat in a job: it hands `extra` on all the same."""
    monkeypatch.setenv("DLROVER_HOOKS_DISABLE", "1")


class Run:
    """A model, its optimizer and its loader. 35 samples: an epoch ends with a short step, whose last micro-batch is
    shorter still.
    """

    def __init__(self, batch_size: int, **options: Any) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.03)
        data = TensorDataset(torch.randn(35, 4).double(), torch.randn(35, 1).double())
        inner = DataLoader(data, batch_size, shuffle=True)
        self.loader: ElasticLoader = elastic_loader(inner, optimizer=self.optimizer, global_batch_size=G, **options)
        self.steps = 0
        self.optimizer.register_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        self.steps += 1

    def loss(self, batch: Any) -> torch.Tensor:
        return mse_loss(self.model(batch[0]), batch[1])

    def weights(self) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])


Loop = Callable[[Run, Any], None]


def zero_first(run: Run, batch: Any) -> None:
    loss = run.loss(batch)
    run.optimizer.zero_grad()
    loss.backward()
    run.optimizer.step()


def zero_last(run: Run, batch: Any) -> None:
    run.loss(batch).backward()
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=False)


def of_the_model(run: Run, batch: Any) -> None:
    run.model.zero_grad()
    run.loss(batch).backward()
    run.optimizer.step()


def clipped(run: Run, batch: Any) -> None:
    run.loss(batch).backward()
    clip_grad_norm_(run.model.parameters(), 0.1)
    run.optimizer.step()
    run.optimizer.zero_grad()


def scaled_by_hand(run: Run, batch: Any) -> None:
    run.loss(batch).backward()
    for parameter in run.model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)
    run.optimizer.step()
    run.optimizer.zero_grad()


def by_closure(run: Run, batch: Any) -> None:
    def closure() -> float:
        run.optimizer.zero_grad()
        loss = run.loss(batch)
        loss.backward()
        return loss.item()

    assert run.optimizer.step(closure) is not None


def in_two_backwards(run: Run, batch: Any) -> None:
    (run.loss(batch) / 2).backward()
    (run.loss(batch) / 2).backward()
    run.optimizer.step()
    run.optimizer.zero_grad()


def with_a_gradient_of_its_own(run: Run, batch: Any) -> None:
    (first, *_) = torch.autograd.grad(run.loss(batch), list(run.model.parameters()), create_graph=True)
    (run.loss(batch) + first.square().mean()).backward()
    run.optimizer.step()
    run.optimizer.zero_grad()


def assigned(run: Run, batch: Any) -> None:
    parameters = list(run.model.parameters())
    for parameter, grad in zip(parameters, torch.autograd.grad(run.loss(batch), parameters), strict=True):
        parameter.grad = grad
    run.optimizer.step()


def trained(loop: Loop, batch_size: int) -> tuple[int, torch.Tensor]:
    run = Run(batch_size)
    for _ in run.loader.epochs(2):
        for batch in run.loader:
            loop(run, batch)
    return run.steps, run.weights()


@pytest.mark.parametrize(
    "loop", [zero_first, zero_last, of_the_model, clipped, scaled_by_hand, by_closure, in_two_backwards, assigned]
)
@pytest.mark.parametrize("batch_size", [6, 4])
def test_the_same_steps_in_several_micro_batches(loop: Loop, batch_size: int) -> None:
    steps, weights = trained(loop, G)
    again, same = trained(loop, batch_size)
    assert steps == again == 6
    assert (weights - same).abs().max() < 1e-12


def test_a_gradient_that_is_asked_for_is_not_weighed() -> None:
    """`torch.autograd.grad` does not accumulate: what it returns is the loop's."""
    run = Run(6)
    for batch in run.loader:
        alone = torch.autograd.grad(run.loss(batch), list(run.model.parameters()))
        copied = [parameter.detach().clone().requires_grad_() for parameter in run.model.parameters()]
        names = [name for name, _ in run.model.named_parameters()]
        loss = mse_loss(
            torch.func.functional_call(run.model, dict(zip(names, copied, strict=True)), batch[0]), batch[1]
        )
        assert all(map(torch.equal, alone, torch.autograd.grad(loss, copied)))
        with_a_gradient_of_its_own(run, batch)
    assert run.steps == 3


@pytest.mark.parametrize("first", [True, False])
def test_schedulers_come_before_or_after_the_loader(first: bool) -> None:
    """They wrap the optimizer's step. Given to AsyncCheckpointer they step where a step ends, as averages do."""
    found = []
    for batch_size in (G, 4):
        run = Run(batch_size)
        if first:
            run.loader.detach()
            run.optimizer = torch.optim.SGD(run.model.parameters(), 0.1)
            schedule = StepLR(run.optimizer, 2, 0.5)
            run.loader.attach(run.optimizer)
        else:
            schedule = StepLR(run.optimizer, 2, 0.5)
        average = AveragedModel(run.model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=2)
        with AsyncCheckpointer(
            model=run.model, optimizer=run.optimizer, loader=run.loader, extra=[schedule, average, scaler]
        ):  # fmt: skip
            for _ in run.loader.epochs(2):
                for batch in run.loader:
                    scaler.scale(run.loss(batch)).backward()
                    scaler.unscale_(run.optimizer)
                    clip_grad_norm_(run.model.parameters(), 0.1)
                    scaler.step(run.optimizer)
                    scaler.update()
                    schedule.step()
                    average.update_parameters(run.model)
                    run.optimizer.zero_grad()
        rest = torch.cat([one.flatten() for one in average.parameters()])
        found.append((schedule.get_last_lr(), schedule.last_epoch, scaler.get_scale(), int(average.n_averaged)))
        found.append(torch.cat([run.weights(), rest.detach()]))
    assert found[0] == found[2]
    assert (found[1] - found[3]).abs().max() < 1e-12


def test_two_optimizers_are_held_back_together() -> None:
    """Each has its share of the parameters."""
    found = []
    for batch_size in (G, 4):
        run = Run(batch_size)
        other = nn.Linear(1, 1).double()
        second = torch.optim.SGD(other.parameters(), 0.1)
        with AsyncCheckpointer(model=run.model, optimizer=run.optimizer, loader=run.loader, extra=[second]):
            for _ in run.loader.epochs(2):
                for batch in run.loader:
                    run.optimizer.zero_grad()
                    second.zero_grad()
                    (other(run.model(batch[0])).square().mean() + run.loss(batch)).backward()
                    run.optimizer.step()
                    second.step()
        found.append(torch.cat([run.weights(), other.weight.detach().flatten()]))
    assert (found[0] - found[1]).abs().max() < 1e-12


def sometimes(run: Run, batch: Any) -> None:
    run.loss(batch).backward()
    if run.loader.step_ends:
        run.optimizer.step()
        run.optimizer.zero_grad()


def twice(run: Run, batch: Any) -> None:
    for _ in range(2):
        zero_first(run, batch)


def not_at_the_end(run: Run, batch: Any) -> None:
    run.loss(batch).backward()
    if not run.loader.step_ends:
        run.optimizer.step()


def skips(run: Run, batch: Any) -> None:
    if not run.loader.step_ends:
        zero_first(run, batch)


def by_the_micro_batch(run: Run, batch: Any) -> None:
    zero_first(run, batch)
    run.optimizer.param_groups[0]["lr"] *= 0.9


def in_turns(run: Run, batch: Any) -> None:
    """As in a GAN: the second loss sees what the first step has changed."""
    zero_first(run, batch)
    run.loss(batch).backward()


def between(run: Run, batch: Any) -> None:
    run.loss(batch).backward()
    run.optimizer.zero_grad()
    run.loss(batch).backward()
    run.optimizer.step()


@pytest.mark.parametrize(
    ("loop", "line"),
    [
        (sometimes, 'accumulation="manual"'),
        (twice, "step() of all optimizers then"),
        (not_at_the_end, "after each batch"),
        (skips, "after each batch"),
        (by_the_micro_batch, "if loader.step_ends: scheduler.step()"),
        (in_turns, "step() of all optimizers then"),
        (between, "ahead of the first backward"),
    ],
)
def test_what_cannot_be_made_right_is_refused_with_the_line_to_write(loop: Loop, line: str) -> None:
    run = Run(4)
    with pytest.raises(UsageError) as caught:
        first_step(run, lambda batch: loop(run, batch))
    assert line in str(caught.value.hint)
    assert run.steps == 0


def first_step(run: Run, body: Callable[[Any], None]) -> None:
    """What is wrong is found in the first step, or when the batch after it is requested."""
    for batch in run.loader:
        body(batch)
        if run.loader.sampler.progress.yielded > 3:
            return


def test_an_optimizer_that_evaluates_several_times_is_refused() -> None:
    run = Run(4)
    run.loader.detach()
    run.optimizer = torch.optim.LBFGS(run.model.parameters())
    run.loader.attach(run.optimizer)
    with pytest.raises(UsageError, match="evaluates its closure more than once"):
        first_step(run, lambda batch: by_closure(run, batch))


def test_an_unknown_scheduler_is_refused() -> None:
    run = Run(4)
    schedule = StepLR(run.optimizer, 100)

    def body(batch: Any) -> None:
        zero_first(run, batch)
        schedule.step()

    AsyncCheckpointer(model=run.model, optimizer=run.optimizer, loader=run.loader)
    with pytest.raises(UsageError) as caught:
        first_step(run, body)
    assert "extra=[scheduler]" in str(caught.value.hint)


def test_an_unknown_scaler_is_refused() -> None:
    run, scaler = Run(4), torch.amp.GradScaler("cpu")

    def train() -> None:
        with AsyncCheckpointer(model=run.model, optimizer=run.optimizer, loader=run.loader):
            for batch in run.loader:
                scaler.scale(run.loss(batch)).backward()
                scaler.step(run.optimizer)
                scaler.update()

    with pytest.raises(UsageError) as caught:
        train()
    assert "extra=[scaler]" in str(caught.value.hint)


def test_by_hand_nothing_is_held_back() -> None:
    """Weights of the plain loop, made by the loop itself."""
    run = Run(4, accumulation="manual")
    for _ in run.loader.epochs(2):
        for batch in run.loader:
            scale = run.loader.loss_scale * run.loader.weight / run.loader.sampler.plan.micro_batches
            (run.loss(batch) * scale).backward()
            if run.loader.step_ends:
                run.optimizer.step()
                run.optimizer.zero_grad()
    steps, weights = trained(zero_last, G)
    assert run.steps == steps
    assert (run.weights() - weights).abs().max() < 1e-12


def test_gradients_of_a_step_that_is_broken_off_are_dropped() -> None:
    run, alone = Run(4), Run(4)
    for batch in run.loader:
        zero_last(run, batch)
        break
    for one in (run, alone):
        for batch in one.loader:
            zero_last(one, batch)
    assert run.steps == alone.steps == 3
    assert torch.equal(run.weights(), alone.weights())
    assert not any(parameter._backward_hooks for parameter in run.model.parameters())


def test_a_step_of_one_micro_batch_is_left_alone() -> None:
    """No hooks on parameters, no gradient moved: the loop is torch's own."""
    run = Run(G)
    for batch in run.loader:
        run.loss(batch).backward()
        assert all(parameter.grad is not None for parameter in run.model.parameters())
        assert not any(parameter._post_accumulate_grad_hooks for parameter in run.model.parameters())
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert run.steps == 3
