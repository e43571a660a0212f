"""Memory is there before the save, and what prepares it never holds the training up. Real keeper processes."""

from __future__ import annotations

import os
import resource
import signal
import time

import pytest

from dlrover_hooks.checkpoint.ipc import keeper_client, keeper_messages
from dlrover_hooks.checkpoint.save import segment_client
from dlrover_hooks.checkpoint.save.segment_client import PREPARE_WAIT_S
from tests.e2e.kept import Kept, ended, memfds, state
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("runtime")


def test_a_save_into_prepared_memory_takes_no_page_fault(kept: Kept) -> None:
    """First touch of fresh shared memory costs eight times a copy; `prepare` has paid it on a thread."""
    kept.keeper()
    trainer = kept.trainer()
    assert not trainer.ready
    trainer.prepare(17 << 20)
    until(lambda: trainer.ready, "the memory")
    tree = state(1, 4 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    assert trainer.save(1, tree) is not None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 1000, "the image has 4096 pages"
    assert trainer.skipped == 0


def test_memory_under_way_skips_saves_and_blocks_none(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper is stopped meanwhile: `prepare` does not wait, a save PREPARE_WAIT_S, counted and said. A thread that
    waits for the keeper waits for minutes.
    """
    monkeypatch.setattr(segment_client, "PREPARE_WAIT_S", PREPARE_WAIT_S)
    keeper = kept.keeper()
    trainer = kept.trainer()
    trainer.take_seat()
    os.kill(keeper.pid, signal.SIGSTOP)
    began = time.monotonic()
    trainer.prepare(1 << 20)
    assert not trainer.ready
    assert trainer.save(1, state(1)) is None
    assert PREPARE_WAIT_S <= time.monotonic() - began < PREPARE_WAIT_S + 20.0
    assert trainer.skipped == 1
    assert "the memory is being prepared" in str(trainer.error)
    os.kill(keeper.pid, signal.SIGCONT)
    until(lambda: trainer.ready, "the memory")
    assert trainer.save(2, state(2)) is not None
    assert trainer.error is None
    kept.notice(keeper_messages.Hashed)


def test_a_larger_segment_is_prepared_beside_the_old_one(kept: Kept) -> None:
    """Saves go on; the old pages live until a generation in the new ones is memory-complete."""
    keeper = kept.keeper()
    trainer = kept.trainer()
    trainer.save(1, state(1))
    old = kept.notice(keeper_messages.Hashed).generation
    trainer.complete(old)
    trainer.prepare(8 << 20)
    trainer.save(2, state(2))
    kept.notice(keeper_messages.Hashed)
    until(lambda: trainer.ready and len(memfds(keeper.pid)) == 2, "the second segment")
    trainer.save(3, state(3, 1 << 20))
    new = kept.notice(keeper_messages.Hashed).generation
    assert old in {one.generation for one in trainer.held()}
    trainer.complete(new)
    assert {one.generation for one in trainer.held()} == {new}
    until(lambda: len(memfds(keeper.pid)) == 1, "the end of the old segment")
    assert trainer.skipped == 0


@pytest.mark.parametrize("reconnect_s", [keeper_client.RECONNECT_S, 0.05])
def test_memory_lost_with_its_keeper_is_prepared_in_a_new_one(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, reconnect_s: float
) -> None:
    """Also one that takes longer to start than a try waits, as on a loaded machine: a later try finds it."""
    monkeypatch.setattr(keeper_client, "RECONNECT_S", reconnect_s)
    trainer = kept.trainer(start_keeper=True, linger_s=0)
    trainer.prepare(1 << 20)
    until(lambda: trainer.ready, "the memory")
    pid = kept.keeper_pid()
    os.kill(pid, signal.SIGKILL)
    until(lambda: ended(pid), "the keeper's end")
    until(lambda: not trainer.ready, "the news")

    def prepared() -> bool:
        trainer.prepare(1 << 20)
        return trainer.ready

    until(prepared, "memory in a new keeper")
    kept.kill_at_end(kept.keeper_pid())
    assert trainer.save(1, state(1)) is not None
    kept.notice(keeper_messages.Hashed)


def test_closing_ends_what_is_under_way(kept: Kept) -> None:
    keeper = kept.keeper()
    trainer = kept.trainer()
    trainer.take_seat()
    os.kill(keeper.pid, signal.SIGSTOP)
    trainer.prepare(1 << 20)
    helper = trainer._segments._helper
    assert helper is not None
    os.kill(keeper.pid, signal.SIGCONT)
    trainer.close()
    until(lambda: not helper.alive, "the end of the thread")  # it may have been over, but for its last instruction
    assert not trainer.ready
