"""What a background thread raises is seen: in the log, once, and by its owner's next call."""

from __future__ import annotations

import gc
import logging
import os
import queue
import signal
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from dlrover_hooks.errors import CheckpointError, HooksError, Stale
from dlrover_hooks.host.background_thread import BackgroundThread, OnError

WAIT_S = 60.0
WHERE = "job j, rank 3"
Start = Callable[..., BackgroundThread]


@pytest.fixture(name="start")
def _start() -> Iterator[Start]:
    made = list[BackgroundThread]()

    def start(run: Callable[[], object], **options: object) -> BackgroundThread:
        made.append(BackgroundThread("test-thread", run, where=WHERE, **options))  # pyright: ignore[reportArgumentType]
        made[-1].start()
        return made[-1]

    yield start
    assert all([one.stop(WAIT_S) for one in made])


def divide() -> None:
    raise ZeroDivisionError("by nothing")


def test_an_error_is_raised_at_the_owners_next_call_and_only_there(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    thread = start(divide)
    assert thread.join(WAIT_S)
    with pytest.raises(HooksError, match=r"job j, rank 3: the thread test-thread met ZeroDivisionError: by noth"):
        thread.check()
    thread.check()
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert WHERE in record.message
    assert record.exc_info is not None


def test_an_error_of_this_library_keeps_its_class_and_others_get_the_owners(start: Start) -> None:
    def outdated() -> None:
        raise Stale("too old", hint="go")

    thread = start(outdated)
    assert thread.join(WAIT_S)
    with pytest.raises(Stale, match="too old"):
        thread.check()
    thread = start(divide, kind=CheckpointError)
    assert thread.join(WAIT_S)
    with pytest.raises(CheckpointError, match="ZeroDivisionError"):
        thread.check()


def test_sys_exit_in_a_thread_is_an_error_too(start: Start) -> None:
    def leave() -> None:
        raise SystemExit(3)

    thread = start(leave)
    assert thread.join(WAIT_S)
    with pytest.raises(HooksError, match="met SystemExit: 3"):
        thread.check()


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_with_again_s_it_goes_on_and_logs_the_same_error_once(
    start: Start, on_error: OnError, caplog: pytest.LogCaptureFixture
) -> None:
    """It is raised, or with "warn" only logged."""
    turns, third, over = list[int](), threading.Event(), threading.Event()

    def run() -> None:
        turns.append(1)
        if len(turns) < 3:
            divide()
        third.set()
        over.wait(WAIT_S)

    thread = start(run, on_error=on_error, again_s=0.0, wake=over.set)
    assert third.wait(WAIT_S)
    assert thread.alive
    assert [record.levelno for record in caplog.records].count(logging.ERROR) == 1
    if on_error == "raise":
        with pytest.raises(HooksError, match="ZeroDivisionError"):
            thread.check()
    thread.check()
    assert thread.stop(WAIT_S)
    assert not thread.alive


def test_the_pause_after_an_error_ends_with_stop_and_run_may_finish_its_work(start: Start) -> None:
    failed, turns = threading.Event(), list[int]()

    def run() -> None:
        turns.append(1)
        divide()

    thread = start(run, again_s=600.0, failed=lambda _: failed.set())
    assert failed.wait(WAIT_S)
    assert thread.stop(WAIT_S)
    assert len(turns) == 2, "once more after `stop`, and not a third time"


def test_who_waits_for_its_results_is_woken_and_an_error_in_that_is_logged(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes: queue.SimpleQueue[HooksError] = queue.SimpleQueue()

    def failed(error: HooksError) -> None:
        outcomes.put(error)
        raise ValueError("in the report")

    thread = start(divide, failed=failed)
    assert "ZeroDivisionError" in str(outcomes.get(timeout=WAIT_S))
    assert thread.join(WAIT_S)
    assert "could not report its error" in caplog.text
    with pytest.raises(HooksError, match="ZeroDivisionError"):
        thread.check()


def test_stop_has_a_deadline(start: Start) -> None:
    over = threading.Event()
    thread = start(lambda: over.wait(WAIT_S))
    assert not thread.stop(0.01)
    assert thread.alive
    over.set()
    assert thread.stop(WAIT_S)


def test_stop_wakes_what_waits_for_something_else(start: Start) -> None:
    jobs: queue.SimpleQueue[None] = queue.SimpleQueue()
    thread = start(jobs.get, wake=lambda: jobs.put(None))
    assert thread.stop(WAIT_S)


def test_stop_on_the_thread_itself_does_not_wait(start: Start) -> None:
    results: queue.SimpleQueue[bool] = queue.SimpleQueue()
    ready: queue.SimpleQueue[BackgroundThread] = queue.SimpleQueue()
    thread = start(lambda: results.put(ready.get(timeout=WAIT_S).stop(WAIT_S)))
    ready.put(thread)
    assert results.get(timeout=WAIT_S) is False
    assert thread.stop(WAIT_S)


def test_one_that_never_started_is_stopped_at_once() -> None:
    thread = BackgroundThread("test-thread", divide, where=WHERE)
    assert thread.stop(WAIT_S)
    assert not thread.started
    thread.check()


def test_the_kept_error_holds_nothing_of_what_the_thread_used(start: Start) -> None:
    class Memory:
        pass

    held = list[weakref.ref[Memory]]()

    def run() -> None:
        memory = Memory()
        held.append(weakref.ref(memory))
        try:
            divide()
        except ZeroDivisionError as error:
            raise Stale("not ours") from error

    logging.disable(logging.CRITICAL)  # pytest keeps records with their frames
    try:
        thread = start(run)
        assert thread.join(WAIT_S)
    finally:
        logging.disable(logging.NOTSET)
    gc.collect()
    assert held[0]() is None
    with pytest.raises(Stale):
        thread.check()


def test_a_forked_child_neither_waits_nor_raises(start: Start) -> None:
    """The lock of `stopping` is held by a thread that the child does not have."""
    failed, over = threading.Event(), threading.Event()

    def run() -> None:
        if not failed.is_set():
            divide()
        over.wait(WAIT_S)

    thread = start(run, again_s=0.0, failed=lambda _: failed.set(), wake=over.set)
    assert failed.wait(WAIT_S)
    with thread.stopping._cond:  # pyright: ignore[reportAttributeAccessIssue]
        child = os.fork()
        if not child:
            code = 1
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)  # a child that waits for the lock is killed
            try:
                thread.check()
                code = 0 if thread.stop(WAIT_S) and not thread.alive and thread.started else 2
            finally:
                os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(HooksError):
        thread.check()
