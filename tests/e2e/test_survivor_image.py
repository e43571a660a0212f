"""Lone images: survivors of a broken round keep their last step so that every rank can go on with it."""

from __future__ import annotations

import os
import signal
import threading

import msgspec
import pytest

from dlrover_hooks.checkpoint.ipc.keeper_messages import Hashed
from dlrover_hooks.checkpoint.save import segment_client
from dlrover_hooks.protocol import Generation, Held, Restore, Source
from tests.e2e.kept import RUN, Kept, state
from tests.waiting import WAIT_S, until

pytestmark = pytest.mark.usefixtures("runtime")


def lying(kept: Kept) -> set[tuple[int, int, int]]:
    """Step, rank and world size of what the keeper holds."""
    held: tuple[Held, ...] = kept.trainer(9).held()
    return {(one.generation.step, one.rank, one.world_size) for one in held}


def test_any_rank_of_any_world_goes_on_with_a_lone_image(kept: Kept) -> None:
    """Made by rank 2 of 3, beside its own image of the same step; loaded by both of two. Nobody votes for it."""
    kept.keeper()
    third = kept.trainer(2)
    third.begin(RUN, 1, 2, 3)
    third.save(4, state(4))
    assert kept.notice(Hashed).world_size == 3
    assert third.save_lone(4, {"state": {"step": 44, "w": state(44)["state"]["w"]}}, WAIT_S)
    until(lambda: lying(kept) == {(4, 2, 3), (4, 0, 1)}, "both images")
    for rank in range(2):
        survivor = kept.trainer(rank)
        survivor.begin(RUN, 2, rank, 2)
        found = survivor.load(Restore(Generation(1, 4, RUN), 1, Source.MEMORY))
        assert found.tree["state"]["step"] == 44
        assert (found.tree["state"]["w"] == 44).all()
    third.save(5, state(5))
    assert third.error is None
    assert (kept.notice(Hashed).generation.step, kept.notices.qsize()) == (5, 0), "the lone one was told of, too"


def test_it_takes_the_place_of_what_others_have_no_more(kept: Kept) -> None:
    """All slots hold steps that may become complete: the oldest gives way, but never the newest complete one."""
    kept.keeper()
    first = kept.trainer(0)
    first.begin(RUN, 1, 0, 2)
    first.generations.votes = True
    for step in (1, 2, 3):
        assert first.save(step, state(step)) is not None
        if step == 1:
            first.complete(Generation(1, 1, RUN))
    assert first.save(4, state(4)) is None
    assert first.save_lone(4, {"state": state(4)["state"]}, WAIT_S)
    until(lambda: lying(kept) == {(1, 0, 2), (3, 0, 2), (4, 0, 1)}, "the oldest is gone")


def test_memory_that_is_not_ready_yet_is_waited_for(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round may break before its first save, while the keeper is slow: else its last step would be lost."""
    monkeypatch.setattr(segment_client, "PREPARE_WAIT_S", 0.05)
    keeper = kept.keeper()
    first = kept.trainer(0)
    first.begin(RUN, 1, 0, 2)
    first.take_seat()
    os.kill(keeper.pid, signal.SIGSTOP)

    def wake_keeper() -> None:
        try:
            until(lambda: first.skipped > 1, "saves that find no memory")
        finally:
            os.kill(keeper.pid, signal.SIGCONT)

    waking = threading.Thread(target=wake_keeper)
    waking.start()
    try:
        assert first.save_lone(1, {"state": state(1)["state"]}, WAIT_S)
        assert first.skipped > 1, "no save was made before the keeper went on"
    finally:
        waking.join()
    assert lying(kept) == {(1, 0, 1)}
    os.kill(keeper.pid, signal.SIGSTOP)
    first.prepare(8 << 20)
    assert not first.save_lone(2, {"state": state(2, 1 << 20)["state"]}, 0.2)
    os.kill(keeper.pid, signal.SIGCONT)
    assert "the memory is being prepared" in str(first.error)


def test_nothing_is_waited_for_once_the_job_is_left(kept: Kept) -> None:
    """An exception that ends the process may pass the hook that keeps the last step: a wait would last 30 s."""
    kept.keeper()
    first = kept.trainer(0)
    first.begin(RUN, 1, 0, 2)
    assert first.save(1, state(1)) is not None
    first.close()
    assert not first.save_lone(1, {"state": state(1)["state"]}, WAIT_S)
    assert first.skipped == 1


def test_whom_the_master_names_answers_for_leases_though_local_rank_0_is_gone(kept: Kept) -> None:
    """Else nobody says which samples are in the model, and they are trained again."""
    kept.keeper()
    for rank in range(3):
        trainer = kept.trainer(rank)
        trainer.begin(RUN, 1, rank, 3)
        trainer.save(4, {**state(4), "leases": {"own": {"data": f"{rank}"}}})
        kept.notice(Hashed)
    survivor = kept.trainer(1)
    survivor.begin(RUN, 2, 0, 2)
    choice = Restore(Generation(1, 4, RUN), 3, Source.MEMORY)
    assert survivor.load(choice).leases == ()
    named = survivor.load(msgspec.structs.replace(choice, answers=(0, 1, 2)))
    assert [part["own"]["data"] for part in named.leases] == ["0", "1", "2"]
