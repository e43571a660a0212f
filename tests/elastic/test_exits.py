"""A script that ends its own process, and errors that are nobody else's: what the others make of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.elastic.crew import Crew, steps_of
from tests.elastic.test_recovery import EPOCHS, STEPS

Crews = Callable[..., Crew]
pytestmark = pytest.mark.deep


def test_exit_code_0_of_all_is_their_end(crew: Crews) -> None:
    """`sys.exit(0)` in the training function: nobody is lost, no round breaks, and nothing is started again."""
    one = crew(3, 3)
    for rank in range(3):
        one.start(rank, at=("stepped", 5), what="exit")
    one.ended()
    view = one.view()
    assert [(member.gone, member.exit_code) for member in view.members] == [("exited", 0)] * 3
    assert (view.failures, view.finished) == (0, False)


def test_exit_code_0_of_one_breaks_the_round_of_the_others(crew: Crews, calm: str) -> None:
    """They say so themselves, once they have waited for it in a collective; the job counts it as a failure."""
    one = crew(3, 3)
    one.start(0)
    one.start(1, at=("fetched", 5), what="exit")
    one.start(2)
    one.replace(1, "w1", "again")
    one.ended()
    assert steps_of(one) == [5]
    one.check(STEPS, EPOCHS)
    assert one.end() == calm
    assert one.view().failures == 1


def test_a_users_error_of_torchs_class_is_not_taken_for_a_peers(crew: Crews) -> None:
    """All connections are open, so nobody waits for the master to say that a peer is lost."""
    one = crew(1, 2)
    one.options = {"fault_s": 3600}
    one.start(0)
    one.start(1, at=("fetched", 5), what="own")
    one.ended()
    (failed,) = one.events("failed")
    assert (failed["who"], failed["text"]) == ("w1", "a user's error, of torch's class")
    assert [row["world"] for row in one.events("trained")] == [1]
    one.check(STEPS, EPOCHS)
