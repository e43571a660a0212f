"""A sampler that fails, or hangs, costs its figures and nothing else."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace

import pytest

from dlrover_hooks.vitals import background_sample
from dlrover_hooks.vitals.background_sample import BackgroundSample
from tests.waiting import until


def made(find, **more) -> BackgroundSample[int]:
    return BackgroundSample("test-sample", find, where="rank 0 of job test", what="the device", **more)


def test_the_newest_sample_counts() -> None:
    numbers = iter(range(1000))
    sample = made(lambda: lambda: next(numbers), every_s=0.001)
    assert sample.value is None
    sample.start()
    until(lambda: (sample.value or 0) > 2, "newer samples")
    sample.stop(60)
    assert not sample._thread.alive


def test_an_error_is_logged_once_and_then_there_is_no_value(caplog: pytest.LogCaptureFixture) -> None:
    tries: list[int] = []

    def fail() -> int:
        tries.append(1)
        raise RuntimeError(f"the device is gone ({len(tries)})")

    sample = made(lambda: fail, every_s=0.001)
    with caplog.at_level(logging.WARNING, "dlrover_hooks"):
        sample.start()
        until(lambda: len(tries) > 3, "further samples")
        sample.stop(60)
    assert sample.value is None
    assert [record.getMessage() for record in caplog.records] == [
        "rank 0 of job test: the device cannot be sampled: RuntimeError: the device is gone (1)"
    ]


def test_a_search_that_fails_ends_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("no library")

    sample = made(fail)
    with caplog.at_level(logging.WARNING, "dlrover_hooks"):
        sample.start()
        until(lambda: not sample._thread.alive, "the end of the thread")
    assert "no library" in caplog.text
    sample.stop(60)


def test_nothing_to_sample_ends_the_thread() -> None:
    sample = made(lambda: None)
    sample.start()
    until(lambda: not sample._thread.alive, "the end of the thread")
    assert sample.value is None


def test_a_sample_of_a_driver_that_hangs_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the owner does not wait for it."""
    hangs, answers = threading.Event(), threading.Event()
    samples = iter([1, 2])

    def ask() -> int:
        found = next(samples)
        if found == 2:
            hangs.set()
            answers.wait()
        return found

    now = 1000.0
    monkeypatch.setattr(background_sample, "time", SimpleNamespace(monotonic=lambda: now))
    sample = made(lambda: ask, every_s=0.001)
    sample.start()
    assert hangs.wait(60)
    assert sample.value == 1
    now += 1.0
    assert sample.value is None
    sample.stop(0.0)
    assert sample._thread.alive
    answers.set()
    until(lambda: not sample._thread.alive, "the end of the thread")
