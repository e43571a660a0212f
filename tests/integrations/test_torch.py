"""`AsyncCheckpointer` and `elastic_loader` in a plain loop: broken off anywhere, the run ends as if nothing happened.

Real keepers, real process groups; the loop is in torch_cases.py.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from dlrover_hooks.checkpoint.storage import generations
from dlrover_hooks.data.leased.shard_dataset import ShardDataset
from dlrover_hooks.data.loader import elastic_loader
from dlrover_hooks.errors import UsageError
from dlrover_hooks.integrations.torch import AsyncCheckpointer
from dlrover_hooks.protocol import Departure
from dlrover_hooks.pytorch.even_batches import EvenLoader
from tests import ranks
from tests.contracts.spawn import plan, spawn as spawn_trials
from tests.contracts.trial import Own
from tests.e2e.master_process import LiveMaster
from tests.integrations import torch_cases
from tests.integrations.torch_cases import SAMPLES, Crash, Noisy, train
from tests.waiting import until

CASES = Path(__file__).with_name("torch_cases.py")
WARM = ("torch._dynamo", "tests.integrations.torch_cases", "tests.contracts.torch_trial")
EXACT = ("step", "lr", "weights", "moments", "rng")
Seen = list[tuple[int, int, int]]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def exactly_once(before: Seen, first: int, after: Seen, epochs: int = 2) -> bool:
    """What was trained before the restored step, and all after it."""
    seen = [(epoch, one) for epoch, step, one in before if step < first] + [(e, one) for e, _, one in after]
    return Counter(seen) == Counter((epoch, one) for epoch in range(epochs) for one in range(SAMPLES))


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return [key for key in EXACT if ours[key] != theirs[key]] == []


@pytest.mark.parametrize(
    "at", [("forward", 1), ("forward", 10), ("forward", 11), ("stepped", 5), ("scheduled", 10), ("scheduled", 21)]
)
def test_an_exception_anywhere_and_resume_is_bit_equal(job: str, at: tuple[str, int]) -> None:
    """Weights, moments, scheduler and random state; 11 steps an epoch, so 10 and 21 are an epoch's last ones."""
    calm = train(f"{job}-calm")
    assert exactly_once([], 0, calm["seen"])
    with pytest.raises(Crash):
        train(job, at=at)
    after = train(job, seed=8)
    assert after["source"] == "memory"
    assert after["first"] == at[1]
    assert after["seen"][0][1] == at[1]
    assert same(after, calm)


def test_a_resume_is_said_once_where_everybody_sees_it(job: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Crash):
        train(job, at=("forward", 5))
    assert [record for record in caplog.records if "resumes" in record.message] == []
    train(job)
    (said,) = (record for record in caplog.records if "resumes" in record.message)
    assert said.levelname == "WARNING"
    assert "step 5" in said.message
    assert "memory" in said.message


@pytest.mark.parametrize("broken_off", [Crash, KeyboardInterrupt, SystemExit])
def test_a_run_broken_off_is_durable_at_once_and_says_how_to_go_on(
    job: str,
    tmp_path: Path,
    broken_off: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its keeper waits ten minutes for a successor, but the machine may go before."""
    monkeypatch.setattr(torch_cases, "Crash", broken_off)
    with pytest.raises(broken_off):
        train(job, at=("forward", 5), save_to=str(tmp_path), persist_every="1h")
    (said,) = (record.message for record in caplog.records if "go on" in record.message)
    assert re.search(
        f"(step .|checkpoint|one\\)) is in memory for 10 min, and is being written to {tmp_path}; start", said
    )
    until(lambda: generations.scan(str(tmp_path), None, job).manifests, "a commit")
    after = train(job, save_to=str(tmp_path))
    assert 0 < after["first"] <= 5


def test_workers_that_would_train_alone_are_refused(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started as two, but no process group: neither would hear of the other's gradients."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = elastic_loader(DataLoader(Noisy(), 2, shuffle=True), optimizer=optimizer)
    with pytest.raises(UsageError, match="no process group: each would train alone"):
        AsyncCheckpointer(model=model, optimizer=optimizer, loader=loader, job=job)


@pytest.mark.parametrize("beside", [ShardDataset(range(8), name="b"), Noisy()])
def test_leased_data_with_another_loader_under_ddp_is_refused(job: str, beside: Any) -> None:
    """One weight for two shares would be wrong for one of them."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loaders = [
            elastic_loader(DataLoader(data, 2), optimizer=optimizer, name="b")
            for data in (ShardDataset(range(8), name="a"), beside)
        ]
        with pytest.raises(UsageError, match="leased dataset 'a': DistributedDataParallel weighs"):
            AsyncCheckpointer(model=model, optimizer=optimizer, loader=loaders, job=job)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("data", [Noisy(), ShardDataset(range(8))])
def test_a_loader_that_is_not_elastic_is_refused(job: str, data: Any, several: bool) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain: Any = DataLoader(data, 2)
    with pytest.raises(UsageError, match="loader=DataLoader is not elastic"):
        AsyncCheckpointer(model=model, optimizer=optimizer, loader=[plain] if several else plain, job=job)


def test_a_batch_that_the_loader_does_not_have_is_refused(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be ignored: the loader has shared the samples out before. The environment speaks to the loader."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def start(loader: Any, size: int) -> None:
        shared: dict[str, Any] = {"model": model, "optimizer": optimizer, "job": job, "global_batch_size": size}
        AsyncCheckpointer(loader=loader, **shared).close(Departure.FAILED)

    with pytest.raises(UsageError, match="global_batch_size=6 comes too late for loader 'train': it was made with 2"):
        start(elastic_loader(DataLoader(Noisy(), 2), optimizer=optimizer), 6)
    with pytest.raises(UsageError, match="each micro-batch of leased data is a step"):
        start(elastic_loader(cast(Any, DataLoader(ShardDataset(range(8)), 2)), optimizer=optimizer), 6)
    start(elastic_loader(DataLoader(Noisy(), 2), optimizer=optimizer, global_batch_size=6), 6)
    monkeypatch.setenv("DLROVER_HOOKS_GLOBAL_BATCH_SIZE", "6")
    assert elastic_loader(DataLoader(Noisy(), 2)).sampler.plan.micro_batches == 3
    assert elastic_loader(DataLoader(Noisy(), 2), global_batch_size=4).sampler.plan.micro_batches == 2
    monkeypatch.setenv("DLROVER_HOOKS_GLOBAL_BATCH_SIZE", "many")
    with pytest.raises(UsageError, match="DLROVER_HOOKS_GLOBAL_BATCH_SIZE='many'"):
        elastic_loader(DataLoader(Noisy(), 2))


def test_leased_data_is_even_already() -> None:
    lent: Any = elastic_loader(DataLoader(ShardDataset(range(8)), 2))
    with pytest.raises(UsageError, match="LeasedLoader"):
        EvenLoader(lent)


def test_epochs_counts_over_restarts(job: str) -> None:
    """Three lives, one total: `range(n)` would train 2 + 2 + 2."""
    for at in (("forward", 4), ("forward", 15)):
        with pytest.raises(Crash):
            train(job, at=at)
    last = train(job)
    assert {epoch for epoch, _, _ in last["seen"]} == {1}
    assert last["step"] == 22


def run(
    world: int, master: LiveMaster | None = None, **given: Any
) -> tuple[list[int | None], list[dict[str, Any]], str]:
    """Exit codes, what each rank that ended well found, and all they said on stderr."""
    processes = ranks.started([sys.executable, str(CASES), json.dumps(given)], world, master, warm=WARM)
    outputs = ranks.ended(processes, 50)
    return [one.returncode for one in processes], ranks.reported(outputs), "".join(errors for _, errors in outputs)


def noted(folder: Path) -> Seen:
    """What all processes saw, from the lines they wrote in each step."""
    lines = [line for file in folder.glob("ids.*") for line in file.read_text().splitlines()]
    return [(epoch, step, one) for epoch, step, one in map(json.loads, lines)]


def test_kill_9_and_resume_is_bit_equal(job: str, tmp_path: Path) -> None:
    calm = train(f"{job}-calm")
    codes, _, errors = run(1, job=job, at=("stepped", 13), kill=True, ids=str(tmp_path / "ids"))
    assert codes == [-signal.SIGKILL], errors
    after = train(job, seed=8)
    assert after["source"] == "memory"
    assert 0 < after["first"] <= 13
    assert exactly_once(noted(tmp_path), after["first"], after["seen"])
    assert same(after, calm)


def test_two_ranks_killed_and_resumed_are_bit_equal(job: str, tmp_path: Path, live_master: LiveMaster) -> None:
    """Rank 1 is shot in mid-epoch, rank 0 fails in its all-reduce; both come back."""
    codes, calm, errors = run(2, live_master, job=f"{job}-calm")
    assert codes == [0, 0], errors
    assert calm[0]["step"] == 12
    given: dict[str, Any] = {"job": job, "ids": str(tmp_path / "ids")}
    codes, _, errors = run(2, live_master, **given, at=("forward", 8), kill=True, crash_rank=1)
    assert codes[1] == -signal.SIGKILL, errors
    assert codes[0] != 0
    before = noted(tmp_path)
    codes, after, errors = run(2, live_master, job=job, seed=8)
    assert codes == [0, 0], errors
    first = after[0]["first"]
    assert 0 < first <= 8
    assert {one["source"] for one in after} == {"memory"}
    assert exactly_once(before, first, [one for rank in after for one in rank["seen"]])
    assert all(same(ours, theirs) for ours, theirs in zip(after, calm, strict=True))


@pytest.mark.deep
def test_two_ranks_shrink_to_one_and_see_every_id_once(job: str, tmp_path: Path, live_master: LiveMaster) -> None:
    """The global batch stays: one rank accumulates what two had shared."""
    given: dict[str, Any] = {"job": job, "ids": str(tmp_path / "ids")}
    codes, _, errors = run(2, live_master, **given, at=("forward", 3), kill=True, crash_rank=1)
    assert codes[1] == -signal.SIGKILL, errors
    before = noted(tmp_path)
    codes, after, errors = run(1, live_master, job=job)
    assert codes == [0], errors
    assert after[0]["source"] == "memory"
    assert 0 < after[0]["first"] <= 3
    assert after[0]["step"] == 12
    assert exactly_once(before, after[0]["first"], after[0]["seen"])


@pytest.mark.deep
def test_disabled_two_ranks_still_share_the_samples(job: str) -> None:
    """No seat, no cut; but the loader gives unequal shares of a short step, so DDP must know their weights."""
    given, environ = {"noise": False, "samples": 21}, {"DLROVER_HOOKS_DISABLE": "1"}
    (one,) = spawn_trials(1, [plan("one", job, given | {"accumulate": 4}, [None], environ=environ)], None, ["torch"])
    two = spawn_trials(2, [plan("two", job, given | {"accumulate": 2}, [None], environ=environ)], None, ["torch"])
    assert not two[0]["active"]
    assert max(abs(a - b) for a, b in zip(two[0]["weights"], one["weights"], strict=True)) < 1e-12


def test_an_exception_ends_the_thread_of_the_leases(job: str) -> None:
    """Every thread has an owner that ends it."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = elastic_loader(DataLoader(ShardDataset(Noisy()), batch_size=2))

    before = set(threading.enumerate())  # a fit of Keras that another test broke off has threads until it is collected

    def names() -> set[str]:
        return {thread.name for thread in set(threading.enumerate()) - before}

    def train_one() -> None:
        with AsyncCheckpointer(model=model, optimizer=optimizer, loader=loader, job=job):
            for _ in loader:
                assert "dlrover-hooks-leases" in names()
                raise Crash

    with pytest.raises(Crash):
        train_one()
    assert "dlrover-hooks-leases" not in names()


def test_closing_twice_and_a_finished_job(job: str, tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = elastic_loader(DataLoader(Noisy(), batch_size=2), optimizer=optimizer)
    made = AsyncCheckpointer(str(tmp_path), model=model, optimizer=optimizer, loader=loader, job=job)
    for x, _ in loader:
        model(x).sum().backward()
        optimizer.step()
    made.finish()
    made.finish()
    made.close()
    assert loader.before_batch == []
    assert json.loads((tmp_path / "latest.json").read_text())


@pytest.mark.parametrize("second", [False, True])
def test_dtypes_come_back_exactly(job: str, second: bool) -> None:
    """fp32 moments of a bf16 parameter: torch's own `load_state_dict` would cast them to bf16. The optimizer whose
    steps count, and one in `extra`.
    """

    def build() -> tuple[nn.Linear, torch.optim.Optimizer, Any, dict[str, Any]]:
        model = nn.Linear(4, 1, dtype=torch.bfloat16)
        optimizers = [torch.optim.SGD([one], lr=0.1) for one in (model.weight, model.bias)]
        counts, other = reversed(optimizers) if second else optimizers
        loader = elastic_loader(DataLoader(Noisy(), batch_size=2), optimizer=counts)
        return model, optimizers[0], loader, {"model": model, "optimizer": counts, "extra": [other]}

    model, optimizer, loader, given = build()
    optimizer.state[model.weight] = {"m": torch.full(model.weight.shape, 1 / 3), "step": torch.tensor(4.0)}

    def train() -> None:
        with AsyncCheckpointer(loader=loader, job=job, save_every=1, **given):
            for number, (x, _) in enumerate(loader):
                if number == 2:
                    raise Crash
                model(x.bfloat16()).sum().backward()
                for one in (given["optimizer"], *given["extra"]):
                    one.step()

    with pytest.raises(Crash):
        train()
    saved = [parameter.detach().clone() for parameter in model.parameters()]
    again, other, loader, given = build()
    made = AsyncCheckpointer(loader=loader, job=job, **given)
    try:
        assert made.step == 2
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), saved, strict=True))
        state = other.state[again.weight]
        assert state["m"].dtype is state["step"].dtype is torch.float32
        assert torch.equal(state["m"], torch.full((1, 4), 1 / 3))
    finally:
        made.close()


@pytest.mark.parametrize("beside", [None, "first", "last"])
def test_a_loader_with_a_state_of_its_own_is_kept_with_the_step(job: str, beside: str | None) -> None:
    """Alone, or zipped with an elastic one in either order: each number is trained once, over a fault in mid-step."""
    seen: list[int] = []

    def life(crash: int) -> int:
        own, model = Own(), nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loaders: list[Any] = [own]
        if beside is not None:
            loaders.insert(beside == "last", elastic_loader(DataLoader(cast(Any, range(80)), 2), optimizer=optimizer))
        given = loaders if beside else own
        with AsyncCheckpointer(model=model, optimizer=optimizer, loader=given, job=job, save_every=1) as checkpoints:
            del seen[checkpoints.step :]
            for batches in zip(*loaders, strict=False):
                number = int(batches[loaders.index(own)])
                model(torch.tensor([[float(number)]])).square().mean().backward()
                if checkpoints.step + 1 == crash:
                    raise KeyError(crash)
                optimizer.step()
                optimizer.zero_grad()
                seen.append(number)
                if checkpoints.step == 9:
                    break
        return checkpoints.step

    for crash in (4, 7):
        with pytest.raises(KeyError):
            life(crash)
    assert life(0) == 9
    assert seen == list(range(9))
