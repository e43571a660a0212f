"""What a killed trainer left in memory is made durable at once; nobody has to come for it, or to wait for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlrover_hooks.checkpoint.ipc import keeper_messages
from dlrover_hooks.checkpoint.storage import generations
from dlrover_hooks.errors import CheckpointError
from dlrover_hooks.protocol import Generation, Restore, Source
from tests.e2e.kept import RUN, Kept, segment, state
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("runtime")


def committed(url: Path) -> list[Generation]:
    return [manifest.generation for manifest in generations.scan(str(url), None, "job").manifests]


def test_a_killed_trainers_newest_generation_becomes_durable(kept: Kept, tmp_path: Path) -> None:
    """The keeper lives on, nothing is asked of it, and the file is the image bit by bit."""
    keeper = kept.keeper()
    kept.dead_trainer(7, save_to=str(tmp_path))
    until(lambda: committed(tmp_path), "a commit")
    assert committed(tmp_path) == [Generation(0, 7, RUN)]
    assert keeper.poll() is None
    tree = kept.trainer(save_to=str(tmp_path)).load(Restore(Generation(0, 7, RUN), 1, Source.STORAGE)).tree
    assert (tree["state"]["w"] == 7).all()
    keeper.terminate()
    assert keeper.wait(60) == 0
    assert committed(tmp_path) == [Generation(0, 7, RUN)]


def test_all_ranks_of_a_node_are_written_when_one_dies(kept: Kept, tmp_path: Path) -> None:
    """The survivor hears that its file is stored, and goes on saving."""
    kept.keeper()
    given: dict[str, Any] = {"master": "http://one", "save_to": str(tmp_path)}
    alive = kept.trainer(1, rank=1, world=2, **given)
    alive.save(3, state(3))
    kept.notice(keeper_messages.Hashed)
    kept.dead_trainer(3, 0, world=2, **given)
    assert kept.notice(keeper_messages.Persisted).file.rank == 1
    assert committed(tmp_path) == [Generation(0, 3, RUN)]
    assert alive.save(4, state(4)) is not None


def test_a_generation_spread_over_nodes_is_left_to_its_ranks(kept: Kept, tmp_path: Path) -> None:
    """Half of it would be a folder that nobody can vouch for."""
    kept.keeper()
    kept.dead_trainer(3, 0, world=2, save_to=str(tmp_path))
    assert [one.generation.step for one in kept.trainer().held()] == [3], "it was looked at, and stays in memory"
    assert list(tmp_path.glob("step-*")) == []


def test_a_trainer_that_leaves_unfinished_is_served_like_a_dead_one(kept: Kept, tmp_path: Path) -> None:
    """Ctrl-C and exceptions say goodbye first; the machine may be gone before anybody comes back."""
    keeper = kept.keeper()
    trainer = kept.trainer(save_to=str(tmp_path))
    trainer.save(1, state(1))
    trainer.close()
    until(lambda: committed(tmp_path), "a commit")
    assert keeper.poll() is None


def test_who_is_finished_or_saves_nowhere_leaves_no_files(kept: Kept, tmp_path: Path) -> None:
    keeper = kept.keeper()
    kept.dead_trainer(2)
    asking = kept.trainer()
    assert asking.held()
    asking.close()
    trainer = kept.trainer(save_to=str(tmp_path))
    trainer.save(3, state(3))
    trainer.close(finished=True)
    assert keeper.wait(60) == 0
    assert list(tmp_path.glob("step-*")) == []


def test_damage_is_found_when_the_next_life_opens_it(kept: Kept) -> None:
    """A bit flipped in a slot of the dead: it is not loaded, and what is whole is offered."""
    keeper = kept.keeper()
    first = kept.trainer()
    for step in (1, 2):
        first.save(step, state(step))
        kept.notice(keeper_messages.Hashed)
    shared = segment(keeper.pid)
    slot = next(slot for slot in shared.slots() if slot.generation == Generation(0, 2, RUN))
    shared.view(slot.index)[slot.image_bytes - 5] ^= 4
    shared.close()
    first._line.open()._socket.shutdown(2)  # as the kernel does it for a killed process
    life = kept.trainer()
    assert {one.generation.step for one in life.held()} == {1, 2}, "each image is hashed once only"
    with pytest.raises(CheckpointError, match="chunk 0"):
        life.load(Restore(Generation(0, 2, RUN), 1, Source.MEMORY))
    assert [one.generation.step for one in life.held()] == [1]
    assert [one.generation.step for one in kept.trainer().held()] == [1], "hashed once more, it would look good"
