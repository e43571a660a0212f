"""`ElasticFabric`: what is Fabric's own, beside the adapter contract."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from dlrover_hooks import protocol as p
from dlrover_hooks.data.loader import elastic_loader
from dlrover_hooks.errors import UsageError
from dlrover_hooks.integrations.fabric import ElasticFabric, SetUpLoader
from tests.contracts.trial import Given, Numbers, Setup, loss_of

pytestmark = pytest.mark.filterwarnings("ignore")


def elastic(job: str, **shared: Any) -> Any:
    return ElasticFabric(Fabric(accelerator="cpu", devices=1), job=job, save_every=1, **shared)


def test_inside_a_window_nothing_acts(job: str) -> None:
    """Step, schedule and clipping come once in a window of two, zeroing never inside; the loop knows nothing of it."""
    made, fabric = Setup(Given(job=job, samples=16, noise=False)), elastic(job, global_batch_size=4)
    model, optimizer, schedule = fabric.setup(made.net, made.optimizer, scheduler=made.schedule)
    loader = fabric.setup_dataloaders(made.train)
    clipped = 0
    for batch in loader:
        optimizer.zero_grad()
        fabric.backward(loss_of(model, *batch))
        clipped += fabric.clip_gradients(model, optimizer, max_norm=10.0) is not None
        optimizer.step()
        schedule.step()
    assert (fabric.step, schedule.last_epoch, clipped) == (4, 4, 4)
    schedule.step()  # after the loop, once an epoch: acts
    assert schedule.last_epoch == 5
    assert "step" not in schedule.state_dict()
    fabric.finish()
    fabric.finish()


def test_parts_set_up_one_by_one_are_restored(job: str) -> None:
    """`setup_module`, `setup_optimizers`, `include`: each gets its state in the call."""

    def life(until: int) -> tuple[Any, list[float], int]:
        made, fabric = Setup(Given(job=job, noise=False)), elastic(job)
        model = fabric.setup_module(made.net)
        optimizer = fabric.setup_optimizers(made.optimizer)
        fabric.include(made.schedule)
        began = [value for one in made.net.state_dict().values() for value in one.flatten().tolist()]
        lr = made.schedule.last_epoch
        loader = fabric.setup_dataloaders(made.train)
        for batch in loader:
            if fabric.step == until:
                break
            fabric.backward(loss_of(model, *batch))
            optimizer.step()
            made.schedule.step()
            optimizer.zero_grad()
        fabric.close(p.Departure.FAILED)
        ended = [value for one in made.net.state_dict().values() for value in one.flatten().tolist()]
        return began, ended, lr

    _, ended, _ = life(4)
    began, _, lr = life(5)
    assert began == ended
    assert lr == 4


class Count:
    """An object with a state of its own."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class OtherCount(Count):
    """Of another class."""


def test_objects_are_found_by_class(job: str) -> None:
    """Included in another order after a restart; one of a class that the checkpoint does not have is refused."""

    def life(*objects: Count, until: int) -> Any:
        made, fabric = Setup(Given(job=job, noise=False)), elastic(job)
        model, optimizer = fabric.setup(made.net, made.optimizer)
        fabric.include(*objects)
        restored = [one.value for one in objects]
        for batch in fabric.setup_dataloaders(made.train):
            if fabric.step == until:
                break
            fabric.backward(loss_of(model, *batch))
            optimizer.step()
            for value, one in enumerate(objects, 1):
                one.value = value
        fabric.close()
        return fabric.restored, restored

    assert life(Count(), OtherCount(), until=3) == (None, [0, 0])
    restored, values = life(OtherCount(), Count(), until=4)
    assert restored.generation.step in (1, 2, 3)
    assert values == [2, 1]
    with pytest.raises(UsageError, match="of kind 'object'"):
        life(Count(), Count(), until=5)


def test_weights_of_a_run_without_a_model(job: str) -> None:
    """It is said by name; no KeyError."""
    made, fabric = Setup(Given(job=job, noise=False)), elastic(job)
    optimizer, loader = fabric.setup_optimizers(made.optimizer), fabric.setup_dataloaders(made.train)
    for batch in loader:
        if fabric.step == 2:
            break
        loss_of(made.net, *batch).backward()
        optimizer.step()
    fabric.close(p.Departure.FAILED)
    with pytest.raises(UsageError, match=r"holds no weights of a model: its parts are optimizer") as refused:
        elastic(job, resume="weights").setup_module(made.net)
    assert "resume='never'" in refused.value.hint


def test_which_loaders_are_for_training(job: str) -> None:
    fabric = elastic(job)
    plain, shuffled = DataLoader(Numbers(8, False), 2), DataLoader(Numbers(8, False), 2, shuffle=True)
    kinds = [isinstance(one, SetUpLoader) for one in fabric.setup_dataloaders(plain, shuffled)]
    assert kinds == [False, True]
    ordered = fabric.setup_dataloaders(elastic_loader(DataLoader(Numbers(8, False), 2), name="ordered"))
    assert [one for _, ids in ordered for one in ids.tolist()] == list(range(8))
    fabric.close()


def test_a_loader_is_set_up_once(job: str) -> None:
    fabric = elastic(job)
    loader = fabric.setup_dataloaders(DataLoader(Numbers(8, False), 2, shuffle=True))
    with pytest.raises(UsageError, match="loader 'train' was set up already"):
        fabric.setup_dataloaders(loader)
    fabric.close()


def test_loaders_of_one_loop_share_their_steps(job: str) -> None:
    """The second follows the first's number of micro-batches; one that cannot is refused."""
    fabric = elastic(job, global_batch_size=8)
    first, second = fabric.setup_dataloaders(
        DataLoader(Numbers(16, False), 2, shuffle=True), DataLoader(Numbers(16, False), 1, shuffle=True)
    )
    assert (first.sampler.plan.total, second.sampler.plan.global_batch_size) == (4, 4)
    with pytest.raises(UsageError, match="micro-batches in a step"):
        fabric.setup_dataloaders(elastic_loader(DataLoader(Numbers(8, False), 2, shuffle=True), name="third"))
    fabric.close()


def test_everything_else_is_fabrics(job: str) -> None:
    fabric = elastic(job)
    assert fabric.world_size == 1
    assert torch.equal(fabric.to_device(torch.ones(1)), torch.ones(1))
    assert list(fabric.epochs(2)) == [0, 1]


def test_a_closure_is_called_for_each_micro_batch(job: str) -> None:
    """`optimizer.step(closure)`: inside a window only the closure acts."""

    def trained(batch_size: int) -> list[float]:
        made = Setup(Given(job=f"{job}-{batch_size}", noise=False, samples=14))
        fabric = ElasticFabric(Fabric(accelerator="cpu", devices=1), job=f"{job}-{batch_size}", global_batch_size=4)
        model, optimizer = fabric.setup(made.net, made.optimizer)
        losses = 0
        for batch in fabric.setup_dataloaders(DataLoader(Numbers(14, False), batch_size, shuffle=True)):

            def closure(batch: Any = batch) -> float:
                optimizer.zero_grad()
                loss = loss_of(model, *batch)
                fabric.backward(loss)
                return loss.item()

            losses += optimizer.step(closure) is not None
        assert losses == -(-14 // batch_size)
        assert fabric.loop is not None
        assert fabric.step == 4
        fabric.close()
        return [value for one in made.net.state_dict().values() for value in one.flatten().tolist()]

    whole, parts = trained(4), trained(2)
    assert max(abs(one - other) for one, other in zip(whole, parts, strict=True)) < 1e-12


def test_a_training_that_is_not_elastic_is_said(job: str, caplog: pytest.LogCaptureFixture) -> None:
    made, fabric = Setup(Given(job=job)), elastic(job)
    model, optimizer = fabric.setup(made.net, made.optimizer)
    for batch in fabric.setup_dataloaders(DataLoader(Numbers(8, False), 2)):
        fabric.backward(loss_of(model, *batch))
        optimizer.step()
    (line,) = [record.getMessage() for record in caplog.records if "taken for evaluation" in record.getMessage()]
    assert "fabric.setup_dataloaders(elastic_loader(loader))" in line
    fabric.close()


def test_a_shuffled_loader_is_not_for_evaluation(job: str) -> None:
    made, fabric = Setup(Given(job=job)), elastic(job)
    fabric.setup(made.net, made.optimizer)
    train, val = (DataLoader(Numbers(8, False), 2, shuffle=True) for _ in range(2))
    train, val = fabric.setup_dataloaders(train, val)
    with torch.no_grad():
        next(iter(train))  # a look at a batch
        with pytest.raises(UsageError, match=r"loader 'train.1' is iterated without gradients"):
            list(val)
    fabric.close()
