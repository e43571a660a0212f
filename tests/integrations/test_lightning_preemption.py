"""Preemption under a real Trainer: Lightning's own handlers are taken over, the fit leaves at a step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.plugins.environments import SLURMEnvironment

from dlrover_hooks.config import runtime_dir
from dlrover_hooks.integrations.lightning import ElasticCallback
from dlrover_hooks.worker.preemption import Preempted
from tests.integrations.test_lightning import Net, exactly_once, fit, surviving
from tests.waiting import until

pytestmark = pytest.mark.filterwarnings("ignore")


class Raise(Callback):
    """Sends this process a signal while step `at` is trained; the step ends once the reporter thread has acted on it.

    Of steps of a millisecond all could be made before that.
    """

    def __init__(self, at: int = 3, number: signal.Signals = signal.SIGTERM) -> None:
        self.at, self.number = at, number

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.at:
            signal.raise_signal(self.number)
            (elastic,) = (one for one in trainer.callbacks if isinstance(one, ElasticCallback))
            assert elastic.session is not None
            gate = elastic.session.parting._preemption.gate
            until(lambda: gate._promised or gate._step is not None, "the promise to pass no further step boundary")


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """The user's own handler of SIGTERM, and what it heard."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGTERM, before)


def preempted(elastic: ElasticCallback, *callbacks: Callback, **options: Any) -> tuple[Net, Preempted]:
    model = Net()
    with pytest.raises(Preempted) as left:
        fit(model, elastic, callbacks=callbacks, **options)
    assert left.value.code == 75
    return model, left.value


def test_the_fit_leaves_and_goes_on(job: str, tmp_path: Path, heard: list[int]) -> None:
    """Durable at the step where it left; every sample once; the user's handler is called, and is back after it."""
    theirs, told = signal.getsignal(signal.SIGTERM), list[Preempted]()
    save: dict[str, Any] = {"job": job, "save_to": str(tmp_path / "saved")}
    before, gone = preempted(ElasticCallback(**save, on_preempt=told.append), Raise())
    assert (gone.reason, gone.durable, gone.mine) == ("SIGTERM", True, True)
    assert told == [gone]
    assert heard == [signal.SIGTERM]
    signal.raise_signal(signal.SIGTERM)
    assert len(heard) == 2, "as if we had not been there"
    after, elastic = Net(), ElasticCallback(**save)
    fit(after, elastic)
    assert after.seen[0][1] == gone.step
    assert exactly_once(surviving(before, after))
    assert signal.getsignal(signal.SIGTERM) == theirs


def test_in_memory_only(job: str) -> None:
    """Without a save_to the step is whole in memory, and the next start takes it from there."""
    before, gone = preempted(ElasticCallback(job=job), Raise(number=signal.SIGUSR1))
    assert (gone.reason, gone.durable) == ("SIGUSR1", False)
    after = Net()
    fit(after, ElasticCallback(job=job))
    assert exactly_once(surviving(before, after))


def test_slurm_requeues_once(job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Lightning would requeue by itself we do, after the save; its own handler is gone."""
    program = tmp_path / "scontrol"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    number = f"{os.getpid()}{time.time_ns()}"
    values = {
        "SLURM_JOB_ID": number,
        "SLURM_NTASKS": "1",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    environment = SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGHUP)
    elastic = ElasticCallback(job=job)
    _, gone = preempted(elastic, Raise(number=signal.SIGHUP), plugins=[environment], default_root_dir=tmp_path)
    assert gone.reason == "SIGHUP"
    os.unlink(os.path.join(runtime_dir(), f"requeued-{number}-0"))
    assert (tmp_path / "called").read_text() == f"requeue {number}\n"
    assert not list(tmp_path.glob("*.ckpt")), "Lightning saved nothing by itself"


def test_signals_can_be_left_alone(job: str, monkeypatch: pytest.MonkeyPatch, heard: list[int]) -> None:
    """DLROVER_HOOKS_PREEMPT_SIGNALS=none: nothing is taken over."""
    monkeypatch.setenv("DLROVER_HOOKS_PREEMPT_SIGNALS", "none")

    class Look(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            assert "_HandlersCompose" in repr(signal.getsignal(signal.SIGTERM))

    fit(Net(), ElasticCallback(job=job), callbacks=(Look(),))
