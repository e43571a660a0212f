"""A Lightning fit that outlives its round hears a signal in between: its teardown puts back older handlers."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.elastic.crew import Crew

WORKER = "tests.elastic.lightning_worker"
STEPS, EPOCHS = 16, 4


@pytest.mark.deep
def test_the_signal_comes_between_two_lives_of_a_fit(crew: Callable[..., Crew]) -> None:
    """It recovers, leaves at the next step, saved, and the last one stays."""
    one = crew(1, 3, pace_s=0.03)
    one.start(0, alone=True)
    one.start(1, alone=True, at=("fetched", 5), what="kill")
    one.start(2, alone=True, at=("begin", 0), what="hold", lives=[2])
    one.until(lambda: len(one.events("trouble")) == 2)
    one.send("w2", signal.SIGTERM)
    one.release()
    one.ended()
    first, last = (rows[0]["step"] for rows in one.restores().values())
    assert first == 5
    assert f"preempted (SIGTERM): left at step {last}, which is whole in memory" in one.zygote.log.read_text()
    one.check(STEPS, EPOCHS)
    assert [(row["who"], row["world"]) for row in one.events("trained")] == [("w0", 1)]
