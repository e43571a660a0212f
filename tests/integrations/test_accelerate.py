"""`ElasticAccelerator`: what is Accelerate's own, beside the adapter contract."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from dlrover_hooks import protocol as p
from dlrover_hooks.data.leased.shard_dataset import ShardDataset
from dlrover_hooks.data.loader import elastic_loader
from dlrover_hooks.errors import UsageError
from dlrover_hooks.integrations.accelerate import ElasticAccelerator
from dlrover_hooks.integrations.accelerate.accelerator import PreparedLoader, _keep_pace
from dlrover_hooks.integrations.torch import AsyncCheckpointer
from tests.contracts.trial import Crash, Given, Numbers, Setup, loss_of

pytestmark = [
    pytest.mark.usefixtures("fresh_accelerate"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.*", "ignore:'set_vital' is deprecated"),
]


class Run:
    """A script's objects, prepared."""

    def __init__(self, job: str, *, samples: int = 23, accumulate: int = 1, **shared: Any) -> None:
        self.made = Setup(Given(job=job, samples=samples, noise=False))
        inner = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        self.accelerator: Any = ElasticAccelerator(inner, job=job, save_every=1, **shared)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            self.made.net, self.made.optimizer, self.made.train
        )
        self.seen: list[int] = []

    def backward(self, batch: Any) -> None:
        self.seen += batch[1].tolist()
        self.accelerator.backward(loss_of(self.model, *batch))

    def weights(self) -> list[float]:
        return [value for tensor in self.made.net.state_dict().values() for value in tensor.flatten().tolist()]


def close_to(ours: list[float], theirs: list[float]) -> bool:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-12


def test_registered_objects_scheduler_and_rest_are_restored_in_order(job: str) -> None:
    class Counter_:
        def __init__(self) -> None:
            self.n = 0

        def state_dict(self) -> dict[str, int]:
            return {"n": self.n}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.n = state["n"]

    def life(crash: int | None) -> tuple[Any, Counter_, Any]:
        run, counter = Run(job), Counter_()
        run.accelerator.register_for_checkpointing(counter)
        schedule = run.accelerator.prepare(run.made.schedule)
        begun = counter.n, schedule.get_last_lr()
        for batch in run.loader:
            if run.accelerator.step == crash:
                break
            run.backward(batch)
            run.optimizer.step()
            schedule.step()
            run.optimizer.zero_grad()
            counter.n += 1
        run.accelerator.close(p.Departure.FAILED)
        return begun, counter, schedule.get_last_lr()

    _, first, lr = life(4)
    begun, _, _ = life(5)
    assert begun == (4, lr)
    assert first.n == 4


def test_only_the_weights_and_only_of_its_own_kind(job: str) -> None:
    """Step, optimizer and data begin from 0 (resume="weights"). Another adapter's checkpoint is refused."""
    first = Run(job)
    for batch in first.loader:
        if first.accelerator.step == 2:
            break
        first.backward(batch)
        first.optimizer.step()
        first.optimizer.zero_grad()
    first.accelerator.close(p.Departure.FAILED)
    kept = first.weights()
    again = Run(job, resume="weights")
    assert again.accelerator.step == 0
    assert again.weights() == kept
    assert not again.optimizer.state
    again.accelerator.close(p.Departure.FAILED)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = elastic_loader(DataLoader(range(4)), optimizer=optimizer)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"not saved by AsyncCheckpointer: it holds bucket_orders"):
        AsyncCheckpointer(model=model, optimizer=optimizer, loader=loader, job=job)


def test_what_is_refused_is_not_said_to_be_resumed(job: str, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint of another adapter."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = elastic_loader(DataLoader(Numbers(6, False), 2), optimizer=optimizer)
    with AsyncCheckpointer(model=model, optimizer=optimizer, loader=loader, job=job, save_every=1) as made:
        for _ in loader:
            model(torch.ones(1)).sum().backward()
            optimizer.step()
        made.close(p.Departure.FAILED)
    with pytest.raises(UsageError, match="not saved by Accelerate, Fabric or Transformers"):
        Run(job)
    assert "resumes" not in caplog.text


def test_another_optimizer_is_refused_by_its_class(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it breaks in mid-step, for state of its own that is missing."""
    run = Run(job)
    for batch in run.loader:
        if run.accelerator.step == 2:
            break
        run.backward(batch)
        run.optimizer.step()
        run.optimizer.zero_grad()
    run.accelerator.close(p.Departure.FAILED)
    monkeypatch.setattr(torch.optim, "SGD", lambda parameters, lr, momentum: torch.optim.Adam(parameters, lr))
    with pytest.raises(UsageError, match=r"the optimizer was SGD \(has dampening.*here it is Adam \(has amsgrad"):
        Run(job)


def test_what_is_missing_on_resume_is_named(job: str) -> None:
    run = Run(job)
    schedule = run.accelerator.prepare(run.made.schedule)
    for batch in run.loader:
        if run.accelerator.step == 2:
            break
        run.backward(batch)
        run.optimizer.step()
        schedule.step()
    run.accelerator.close(p.Departure.FAILED)
    again = Run(job)
    with pytest.raises(UsageError, match="1 of kind 'scheduler', here are 0"):
        next(iter(again.loader))
    again.accelerator.close(p.Departure.FAILED)


def test_accelerates_own_checkpoint_holds_the_place_in_the_data(job: str, tmp_path: Path) -> None:
    """`save_state` in mid-epoch, `load_state` in a new run: each sample once."""
    run = Run(f"{job}-a")
    for number, batch in enumerate(run.loader, 1):
        run.backward(batch)
        run.optimizer.step()
        run.optimizer.zero_grad()
        if number == 5:
            run.accelerator.save_state(str(tmp_path))
            break
    run.accelerator.close(p.Departure.FAILED)
    again = Run(f"{job}-b")
    again.accelerator.load_state(str(tmp_path))
    assert close_to(again.weights(), run.weights())
    assert again.accelerator.skip_first_batches(again.loader, 5) is again.loader
    for batch in again.loader:
        again.seen += batch[1].tolist()
    again.accelerator.close()
    assert Counter(run.seen + again.seen) == Counter(range(23))


def test_the_scheduler_keeps_the_pace_of_the_first_start(job: str) -> None:
    """Accelerate steps a scheduler once per process: after two became one it must still make two steps."""
    run = Run(job)
    schedule = run.accelerator.prepare(
        torch.optim.lr_scheduler.LambdaLR(run.made.optimizer, lambda step: 1 / (1 + step))
    )
    assert isinstance(schedule, AcceleratedScheduler)
    _keep_pace(schedule, 2)
    rates = []
    for number, batch in enumerate(run.loader):
        run.backward(batch)
        run.optimizer.step()
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
        if number == 2:
            break
    run.accelerator.close()
    assert rates == pytest.approx([0.3 / 3, 0.3 / 5, 0.3 / 7])
    assert schedule.state_dict()["last_epoch"] == 6


def test_without_an_elastic_loader_the_next_forward_is_the_quiet_point(job: str) -> None:
    """A loader that keeps its own state has handed out the next batch by then: its place is that of the step."""

    def life(crash: int | None) -> tuple[list[int], list[float]]:
        made = Setup(Given(job=job, own=True, noise=False))
        accelerator: Any = ElasticAccelerator(Accelerator(cpu=True), job=job, save_every=1)
        model, optimizer, own = accelerator.prepare(made.net, made.optimizer, made.own)
        assert own is made.own
        seen: list[int] = []
        for epoch in accelerator.epochs(1):
            assert epoch == 0
            for ids in own:
                loss = loss_of(model, torch.full((1, 4), ids.item() / 40, dtype=torch.float64), ids)
                if accelerator.step == crash:
                    accelerator.close(p.Departure.FAILED)
                    return seen, []
                seen += ids.tolist()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                if ids.item() == 6:
                    break
        accelerator.end_training()
        return seen, [value for one in made.net.state_dict().values() for value in one.flatten().tolist()]

    lives = [life(crash) for crash in (2, 3, 6, None)]
    assert [seen for seen, _ in lives] == [[0, 1], [2], [3, 4, 5], [6]]


@pytest.mark.parametrize("crash", [2, 4, 5, 7])
def test_a_torchdata_loader_goes_on_in_its_epoch_or_the_next(job: str, crash: int) -> None:
    """Four steps an epoch: the fifth is cut behind an epoch's end, where the loader itself would yield nothing more."""

    def life(name: str, crash: int | None) -> list[tuple[int, int, int]]:
        torch.manual_seed(1)
        made = Setup(Given(job=name, noise=False))
        accelerator: Any = ElasticAccelerator(Accelerator(cpu=True), job=name, save_every=1)
        feed = StatefulDataLoader(Numbers(8, False), 2, shuffle=True)
        model, optimizer, feed = accelerator.prepare(made.net, made.optimizer, feed)
        seen: list[tuple[int, int, int]] = []
        for epoch in accelerator.epochs(2):
            for x, ids in feed:
                if accelerator.step == crash:
                    loss_of(model, x, ids)  # its forward is the step boundary
                    accelerator.close(p.Departure.FAILED)
                    return seen
                seen += [(epoch, accelerator.step, one) for one in ids.tolist()]
                accelerator.backward(loss_of(model, x, ids))
                optimizer.step()
                optimizer.zero_grad()
        accelerator.end_training()
        return seen

    assert life(job, crash) + life(job, None) == life(f"{job}-calm", None)


def test_everything_else_is_accelerates(job: str) -> None:
    run = Run(job, accumulate=2)
    assert run.accelerator.unwrap_model(run.model) is run.made.net
    assert run.accelerator.is_main_process
    run.accelerator.even_batches = False
    assert not run.accelerator.accelerator.even_batches
    run.loader.set_epoch(7)
    assert (len(run.loader), run.loader.total_batch_size, run.loader.total_dataset_length) == (12, 2, 23)
    assert run.accelerator.gradient_accumulation_steps == 2
    run.accelerator.end_training()
    run.accelerator.end_training()


def test_settings_that_cannot_work_are_refused(job: str) -> None:
    with pytest.raises(UsageError, match="save_evry"):
        ElasticAccelerator(Accelerator(cpu=True), save_evry=3)  # pyright: ignore[reportCallIssue]
    used = Accelerator(cpu=True)
    used.prepare(nn.Linear(1, 1))
    with pytest.raises(UsageError, match="prepared something"):
        ElasticAccelerator(used)


def test_split_batches_are_refused(job: str) -> None:
    from accelerate import DataLoaderConfiguration

    split = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
    accelerator = ElasticAccelerator(split, job=job)
    with pytest.raises(UsageError, match="split_batches"):
        accelerator.prepare(DataLoader(Numbers(8, False), 2, shuffle=True))
    accelerator.close()


def test_leased_data_does_not_go_back_with_a_checkpoint_of_the_users(
    job: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What the restored model lacks then must be said: nobody trains it again."""
    made = Setup(Given(job=job, leased=True, noise=False))
    accelerator: Any = ElasticAccelerator(Accelerator(cpu=True), job=job)
    accelerator.prepare(made.net, made.optimizer, made.train)
    accelerator.save_state(str(tmp_path))
    assert "leased" not in caplog.text
    accelerator.load_state(str(tmp_path))
    accelerator.close()
    assert "leased dataset 'train': the model goes back" in caplog.text


def test_what_was_prepared_is_prepared_once(job: str) -> None:
    """As with Accelerate. A second place of the loader in the cut would be that before the step, trained twice then."""

    def life(crash: int | None) -> list[int]:
        run = Run(job)
        again = run.accelerator.prepare(run.model, run.optimizer, run.loader)
        assert [*map(id, again)] == [id(run.model), id(run.optimizer), id(run.loader)]
        for batch in run.loader:
            if run.accelerator.step == crash:
                run.accelerator.close(p.Departure.FAILED)
                return run.seen
            run.backward(batch)
            run.optimizer.step()
            run.optimizer.zero_grad()
        run.accelerator.finish()
        return run.seen

    assert sorted(life(4) + life(None)) == list(range(23))


def test_leased_data_takes_no_other_training_loader_along(job: str) -> None:
    """Whichever comes first: the other's share of a step would have the wrong weight."""
    for turn in (1, -1):
        accelerator: Any = ElasticAccelerator(Accelerator(cpu=True), job=job)
        loaders = [DataLoader(ShardDataset(range(8)), 2), DataLoader(Numbers(8, False), 2, shuffle=True)]
        with pytest.raises(UsageError, match="leased dataset 'train'"):
            accelerator.prepare(*loaders[::turn])
        accelerator.close()


def test_which_loaders_are_for_training(job: str) -> None:
    """Shuffled ones; without one the first beside an optimizer; an evaluation loader alone never."""
    accelerator: Any = ElasticAccelerator(Accelerator(cpu=True), job=job)
    plain, shuffled = DataLoader(Numbers(8, False), 2), DataLoader(Numbers(8, False), 2, shuffle=True)
    kinds = [isinstance(one, PreparedLoader) for one in accelerator.prepare(plain, shuffled)]
    assert kinds == [False, True]
    assert not isinstance(accelerator.prepare(DataLoader(Numbers(8, False), 2)), PreparedLoader)
    net = nn.Linear(4, 1)
    first = DataLoader(Numbers(8, False), 2)
    made = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1), first, DataLoader(Numbers(8, False), 2))
    assert [isinstance(one, PreparedLoader) for one in made[2:]] == [True, False]
    accelerator.close()


def test_an_exception_in_the_loop_leaves_the_job_to_be_resumed(job: str) -> None:
    def life(crash: int | None) -> Run:
        run = Run(job)
        for batch in run.loader:
            if run.accelerator.step == crash:
                raise Crash
            run.backward(batch)
            run.optimizer.step()
        run.accelerator.finish()
        return run

    with pytest.raises(Crash) as crash:
        life(6)
    crash.value.__traceback__ = None
    del crash
    import gc

    gc.collect()  # the run is gone, its seat with it
    assert len(life(None).seen) == 23 - 12
