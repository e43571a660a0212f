"""What may change between save and resume, as docs/resume.md says. Real keepers, one process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.utils.data import DataLoader

from dlrover_hooks.data.loader import elastic_loader
from dlrover_hooks.errors import NoCheckpoint, UsageError
from dlrover_hooks.integrations.torch import AsyncCheckpointer
from dlrover_hooks.protocol import Departure
from dlrover_hooks.pytorch.state_dict import refuse_other_class
from tests.e2e.master_process import LiveMaster
from tests.integrations.torch_cases import Crash, Noisy

Build = Callable[[], nn.Module]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def net(seed: int = 0, wide: int = 8) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, wide), nn.Linear(wide, 1))


def start(job: str, model: nn.Module, **shared: Any) -> tuple[AsyncCheckpointer, torch.optim.Optimizer, Any]:
    parameters = [one for one in model.parameters() if one.is_floating_point() or one.is_complex()]
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    loader = elastic_loader(DataLoader(Noisy(), batch_size=2), optimizer=optimizer)
    shared.setdefault("save_every", 1)
    made = AsyncCheckpointer(model=model, optimizer=optimizer, loader=loader, job=job, **shared)
    return made, optimizer, loader


def run(job: str, model: nn.Module, steps: int = 2, **shared: Any) -> None:
    """Train `steps` steps, then crash."""
    made, optimizer, loader = start(job, model, **shared)

    def train() -> None:
        with made:
            for number, (x, _) in enumerate(loader):
                if number == steps:
                    raise Crash
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()

    with pytest.raises(Crash):
        train()


def resume(job: str, model: nn.Module, **shared: Any) -> tuple[int, torch.optim.Optimizer]:
    made, optimizer, _ = start(job, model, **shared)
    made.close(Departure.STOPPED)
    return made.step, optimizer


def equal(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_weights_alone(job: str) -> None:
    """Step, optimizer and data begin from 0; a run that was not saved yet must not go on from a random start."""
    saved = net()
    run(job, saved)
    again = net(seed=1)
    step, optimizer = resume(job, again, resume="weights")
    assert (step, len(optimizer.state)) == (0, 0)
    assert equal(again, saved)


def test_weights_of_another_job(job: str, tmp_path: Path) -> None:
    saved = net()
    made, optimizer, loader = start(f"{job}-first", saved, save_to=str(tmp_path))
    with made:
        for x, _ in loader:
            saved(x).sum().backward()
            optimizer.step()
    again = net(seed=1)
    assert resume(job, again, resume=f"weights:{tmp_path}")[0] == 0
    assert equal(again, saved)


def test_weights_begin_a_run_that_is_resumed(
    job: str, tmp_path: Path, live_master: LiveMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that dies goes on with the new run, not with the weights again; one that dies too early gets them."""
    saved = net()
    made, optimizer, loader = start(f"{job}-first", saved, save_to=str(tmp_path))
    with made:
        for x, _ in loader:
            saved(x).sum().backward()
            optimizer.step()
    monkeypatch.setenv("DLROVER_HOOKS_MASTER", live_master.url)
    monkeypatch.setenv("DLROVER_HOOKS_TOKEN", live_master.token or "")
    tuned = net(seed=1)
    run(job, tuned, steps=0, resume=f"weights:{tmp_path}")
    assert equal(tuned, saved)
    tuned = net(seed=2)
    run(job, tuned, steps=3, resume=f"weights:{tmp_path}")
    again = net(seed=3)
    step, optimizer = resume(job, again, resume=f"weights:{tmp_path}")
    assert (step, len(optimizer.state)) == (3, 4)
    assert equal(again, tuned)
    assert not equal(again, saved)


def test_weights_that_are_not_there(job: str, tmp_path: Path) -> None:
    for word in ("weights", f"weights:{tmp_path}"):
        with pytest.raises(NoCheckpoint, match="weights"):
            resume(job, net(), resume=word)


def test_another_learning_rate_is_the_checkpoints(job: str) -> None:
    """What an optimizer's groups hold is state; to change it, change it after the restore."""
    run(job, net())
    model = net(seed=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.7)
    loader = elastic_loader(DataLoader(Noisy(), batch_size=2), optimizer=optimizer)
    with AsyncCheckpointer(model=model, optimizer=optimizer, loader=loader, job=job):
        assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: net(wide=9), r"model\.0\.weight was saved as \[8, 4\], here it is \[9, 4\].*2 in all|resume='never'"),
        (lambda: nn.Sequential(net()[0]), r"model\.1\.weight is in the checkpoint only"),
        (lambda: nn.Sequential(*net(), nn.Linear(1, 1)), r"model\.2\.weight is not in the checkpoint"),
        (lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(9))), r"; \d\d in all"),
    ],
    ids=["shape", "fewer", "more", "many"],
)
def test_another_model_is_refused_by_name(job: str, build: Build, words: str) -> None:
    """Nothing is dropped silently, and the model keeps what it had."""
    run(job, net())
    model = build()
    before = [one.detach().clone() for one in model.parameters()]
    with pytest.raises(UsageError, match=words) as caught:
        resume(job, model)
    assert "resume='never'" in caught.value.hint
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_another_optimizer_is_refused_by_its_class(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded. The state of an older version, without a class, is told by its options."""
    run(job, net())
    model = net(seed=1)
    before = [one.detach().clone() for one in model.parameters()]
    monkeypatch.setattr(torch.optim, "Adam", lambda parameters, lr: torch.optim.SGD(parameters, lr))
    words = r"does not fit: the optimizer was Adam \(has amsgrad, betas,.*\), here it is SGD \(has dampening, momentum"
    with pytest.raises(UsageError, match=words) as caught:
        resume(job, model)
    assert "resume='weights'" in caught.value.hint
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    sgd, old = torch.optim.SGD(model.parameters()), torch.optim.AdamW(model.parameters()).state_dict()
    with pytest.raises(UsageError, match="the optimizer was of another class"):
        refuse_other_class(sgd, old, None)
    newer = {"param_groups": [group | {"new": 1} for group in sgd.state_dict()["param_groups"]]}
    refuse_other_class(sgd, newer, None)
    refuse_other_class(sgd, newer, "SGD")


def test_parts_of_extra_are_found_by_class_and_optimizer(job: str) -> None:
    """In another order; another class is refused before anything is loaded."""

    def start(arrange: Callable[[list[Any]], list[Any]]) -> tuple[AsyncCheckpointer, list[Any]]:
        model = net()
        first, second = (torch.optim.SGD(one.parameters(), 0.1) for one in model)
        extra: list[Any] = [second, torch.optim.lr_scheduler.StepLR(first, 3)]
        loader = elastic_loader(DataLoader(Noisy(), batch_size=2), optimizer=first)
        return AsyncCheckpointer(model=model, optimizer=first, loader=loader, job=job, extra=arrange(extra)), extra

    def train() -> None:
        made, (_, schedule) = start(lambda extra: extra)
        with made:
            for x, _ in made._loaders[0]:
                if made.step == 2:
                    raise Crash
                made._whole.model(x).sum().backward()
                made._optimizer.step()
                schedule.last_epoch = 7

    with pytest.raises(Crash):
        train()
    again, (_, schedule) = start(lambda extra: extra[::-1])
    assert again.step in (1, 2)
    assert schedule.last_epoch == 7
    again.close()
    words = r"`extra` was SGD of 1.weight, StepLR of 0.weight; here it is StepLR of 0.weight, StepLR of 1.weight"
    with pytest.raises(UsageError, match=words):
        start(lambda extra: [extra[1], torch.optim.lr_scheduler.StepLR(extra[0], 3)])


class Schedules:
    """Two schedulers, each on an optimizer of its own, and two moving averages."""

    def __init__(self, job: str, arrange: Callable[[Schedules], Any]) -> None:
        model = net()
        optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in model]
        self.schedules = [torch.optim.lr_scheduler.StepLR(one, 3) for one in optimizers]
        self.averages = [torch.optim.swa_utils.AveragedModel(model) for _ in range(2)]
        self.loader = elastic_loader(DataLoader(Noisy(), batch_size=2), optimizer=optimizers[0])
        self.made = AsyncCheckpointer(
            model=model, optimizer=optimizers[0], loader=self.loader, job=job, extra=arrange(self)
        )

    def train(self) -> None:
        with self.made:
            for x, _ in self.loader:
                if self.made.step == 2:
                    raise Crash
                self.made._whole.model(x).sum().backward()
                self.made._optimizer.step()
                self.schedules[1].last_epoch = 7
                self.averages[1].n_averaged.fill_(7)


def test_parts_that_could_load_each_others_state_are_refused(job: str) -> None:
    """Two schedulers of one class are told apart by their optimizers; two moving averages need names."""
    with pytest.raises(UsageError, match="`extra` has 2 times AveragedModel") as caught:
        Schedules(job, lambda made: made.averages)
    assert 'extra={"teacher": teacher' in caught.value.hint
    with pytest.raises(Crash):
        Schedules(job, lambda made: made.schedules).train()
    again = Schedules(job, lambda made: made.schedules[::-1])
    assert [one.last_epoch for one in again.schedules] == [0, 7]
    again.made.close()


def test_parts_with_names_may_stand_in_any_order(job: str) -> None:
    with pytest.raises(Crash):
        Schedules(job, lambda made: dict(zip("ab", made.averages, strict=True))).train()
    again = Schedules(job, lambda made: {"b": made.averages[1], "a": made.averages[0]})
    assert again.made.step in (1, 2)
    assert [int(one.n_averaged) for one in again.averages] == [0, 7]
    again.made.close(Departure.FAILED)
    with pytest.raises(UsageError, match="`extra` was a, b; here it is a, c"):
        Schedules(job, lambda made: dict(zip("ac", made.averages, strict=True)))


def test_another_dtype_is_converted_with_one_warning(job: str, caplog: pytest.LogCaptureFixture) -> None:
    saved = net()
    run(job, saved)
    again = net(seed=1).to(torch.bfloat16)
    _, optimizer = resume(job, again)
    assert equal(again, saved.to(torch.bfloat16))
    (said,) = (one for one in caplog.records if "converted" in one.message)
    assert said.levelno == logging.WARNING
    assert "model.0.weight from torch.float32 to torch.bfloat16" in said.message
    moments = [state["exp_avg"].dtype for state in optimizer.state.values()]
    assert moments == [torch.float32] * 4  # the optimizer's own state stays what it was


def test_names_do_not_depend_on_compile(job: str) -> None:
    saved = net()
    run(job, saved)
    again = net(seed=1)
    resume(job, torch.compile(again, backend="eager"))  # pyright: ignore[reportArgumentType]
    assert equal(again, saved)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(x))


def test_tied_weights_are_stored_once_and_stay_tied(job: str, tmp_path: Path) -> None:
    saved = Tied()
    made, optimizer, loader = start(job, saved, save_to=str(tmp_path))
    with made:
        for x, _ in loader:
            saved(x).sum().backward()
            optimizer.step()
    (file,) = tmp_path.glob("step-*/*.safetensors")
    with safe_open(file, "pt") as opened:
        names = [name for name in opened.keys() if name.startswith("state.model.")]  # noqa: SIM118
    assert sorted(names) == ["state.model.one.bias", "state.model.one.weight", "state.model.other.bias"]
    again = Tied()
    resume(f"{job}-again", again, resume=str(tmp_path))
    assert equal(again, saved)
    assert again.one.weight is again.other.weight


ODD: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.randn(3, 5).t(),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.randn(1, 3).expand(4, 3),
    "scalar": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(0, 3),
    "bf16": lambda: torch.randn(3).bfloat16(),
    **{
        name: lambda name=name: torch.arange(-4.0, 4.0).to(getattr(torch, name))
        for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    },
    "bool": lambda: torch.tensor([True, False]),
    "complex64": lambda: torch.randn(3, dtype=torch.complex64),
    "complex128": lambda: torch.randn(2, 3, dtype=torch.complex128),
    "conjugate": lambda: torch.randn(3, dtype=torch.complex128).conj(),
    **{name: lambda name=name: torch.arange(5).to(getattr(torch, name)) for name in ("uint16", "uint32", "uint64")},
}


class Odd(nn.Module):
    def __init__(self, *, zero: bool = False) -> None:
        super().__init__()
        self.line = nn.Linear(4, 1)
        torch.manual_seed(3)
        for name, make in ODD.items():
            self.register_buffer(name, torch.zeros_like(make()) if zero else make())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x)


def test_odd_tensors_come_back_exactly(job: str) -> None:
    saved, again = Odd(), Odd(zero=True)
    run(job, saved)
    resume(job, again)
    for name in ODD:
        ours, theirs = getattr(again, name), getattr(saved, name)
        assert ours.dtype is theirs.dtype, name
        assert ours.shape == theirs.shape, name
        assert ours.tolist() == theirs.tolist() if "float8" not in name else torch.equal(ours.float(), theirs.float())
