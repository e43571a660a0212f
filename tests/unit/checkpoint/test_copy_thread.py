"""The thread that copies during a step outlives its jobs' errors."""

from __future__ import annotations

import threading

from dlrover_hooks.checkpoint.save.copy_thread import CopyThread
from dlrover_hooks.errors import CheckpointError


def begun(aside: CopyThread) -> CheckpointError | None:
    """The error of `begin`."""
    try:
        aside.begin(lambda: None, 0)
    except CheckpointError as error:
        return error
    return None


def test_a_job_that_raises_fails_the_next_begin_and_not_the_copies_after_it() -> None:
    """The thread died of it: each later save waited its deadline for a copy that nobody made."""

    def divide() -> None:
        raise ZeroDivisionError("unforeseen")

    aside, copied = CopyThread(), threading.Event()
    try:
        aside.begin(divide, 0)
        aside.wait()
        error = next(filter(None, (begun(aside) for _ in range(1000))), None)  # it may be kept after `wait` returned
        assert "ZeroDivisionError: unforeseen" in str(error)
        aside.begin(copied.set, 0)
        assert copied.wait(60.0)
        assert not aside.given_up
    finally:
        aside.close()
