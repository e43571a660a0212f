"""ElasticAccelerator: windows of accumulation are exact, wherever the loop zeroes, clips or leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dlrover_hooks.data.loader import elastic_loader
from tests.contracts.trial import Given, Setup, loss_of
from tests.integrations.test_accelerate import Run, close_to

pytestmark = [
    pytest.mark.usefixtures("fresh_accelerate"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.*", "ignore:'set_vital' is deprecated"),
]


def single(samples: int, size: int, epochs: int = 1, stop: int | None = None) -> list[float]:
    """Weights of a plain loop over whole batches of `size`, in the same order; `stop`: samples after which to leave."""
    made = Setup(Given(job="", samples=samples, noise=False))
    order = elastic_loader(made.train).sampler.order
    data = [made.train.dataset[index] for index in range(samples)]
    for epoch in range(epochs):
        ids = order.indices(epoch, torch.arange(samples).numpy()).tolist()[:stop]
        for at in range(0, len(ids), size):
            rows = [data[one] for one in ids[at : at + size]]
            made.optimizer.zero_grad()
            x, index = torch.stack([row for row, _ in rows]), torch.tensor([one for _, one in rows])
            loss_of(made.net, x, index).backward()
            made.optimizer.step()
    return [value for tensor in made.net.state_dict().values() for value in tensor.flatten().tolist()]


@pytest.mark.parametrize("order", ["first", "last"])
@pytest.mark.parametrize("context", [True, False])
def test_a_loop_written_without_accumulation_accumulates_exactly(job: str, order: str, context: bool) -> None:
    """`global_batch_size` alone makes windows of 4: with or without `accumulate()`, wherever gradients are zeroed; the
    last window is short (12 micro-batches, the last of one sample) and flushed.
    """
    run = Run(job, global_batch_size=10)
    for _ in run.accelerator.epochs(1):
        for batch in run.loader:
            if order == "first":
                run.optimizer.zero_grad()
            if context:
                with run.accelerator.accumulate(run.model):
                    run.backward(batch)
                    run.optimizer.step()
            else:
                run.backward(batch)
                run.optimizer.step()
            if order == "last":
                run.optimizer.zero_grad()
    run.accelerator.finish()
    assert run.accelerator.step == 3
    assert close_to(run.weights(), single(23, 10))


def test_the_tail_is_flushed(job: str) -> None:
    """10 micro-batches at accumulation 4 are 3 steps; with an unregistered loader Accelerate made 2."""
    run = Run(job, samples=20, accumulate=4)
    for batch in run.loader:
        with run.accelerator.accumulate(run.model):
            run.backward(batch)
            run.optimizer.step()
            run.optimizer.zero_grad()
    run.accelerator.finish()
    assert run.accelerator.step == 3
    assert close_to(run.weights(), single(20, 8))


def test_a_window_that_is_left_belongs_to_no_step(job: str) -> None:
    """`break` in mid-window: its gradients must not leak into the first step of the next epoch."""
    run = Run(job, samples=16, accumulate=2)
    for _ in run.accelerator.epochs(2):
        for number, batch in enumerate(run.loader, 1):
            with run.accelerator.accumulate(run.model):
                run.backward(batch)
                run.optimizer.step()
                run.optimizer.zero_grad()
            if number == 3:
                break
    run.accelerator.finish()
    assert run.accelerator.step == 2
    assert close_to(run.weights(), single(16, 4, epochs=2, stop=4))


def test_clipping_waits_for_the_whole_gradient(job: str) -> None:
    run = Run(job, samples=16, accumulate=2)
    for number, batch in enumerate(run.loader, 1):
        run.backward(batch)
        grads: list[Any] = [one.grad for one in run.made.net.parameters()]
        before = [grad.clone() for grad in grads]
        norm = run.accelerator.clip_grad_norm_(run.model.parameters(), 1e-3)
        run.accelerator.clip_grad_value_(run.model.parameters(), 1e-9 if number % 2 else 1.0)
        assert norm > 1e-3
        same = all(torch.equal(a, b) for a, b in zip(before, grads, strict=True))
        assert same == bool(number % 2)
        run.optimizer.step()
        run.optimizer.zero_grad()
    run.accelerator.finish()
