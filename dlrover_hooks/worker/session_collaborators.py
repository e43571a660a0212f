"""Builds a session's collaborators: master client, checkpoint engine, and the notes left by other processes.

With a `Membership`, client and engine survive the session.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from dlrover_hooks import protocol as p, rng
from dlrover_hooks.checkpoint.checkpointer import Checkpointer
from dlrover_hooks.checkpoint.ipc.keeper_messages import SaveNotice
from dlrover_hooks.checkpoint.storage.master_storage import CommittedStorage
from dlrover_hooks.client import MasterClient
from dlrover_hooks.config import Config, Place
from dlrover_hooks.rng import rank_journal
from dlrover_hooks.worker import startup
from dlrover_hooks.worker.surviving_process import Membership

if TYPE_CHECKING:
    from dlrover_hooks.client.in_process_master import InProcessMaster


class SessionCallbacks(Protocol):
    """The callbacks of the current session."""

    def locate(self, generation: p.Generation, rank: int) -> p.Located: ...
    def heard(self, notice: SaveNotice) -> None: ...


def caller(config: Config, incarnation: str, kept: Membership | None) -> MasterClient | InProcessMaster:
    """The session's connection to the master: a client, or the master's core in this process."""
    if kept is not None:
        return kept.client
    if config.master is not None:
        return MasterClient(config.master, config.token, incarnation=incarnation)
    from dlrover_hooks.client.in_process_master import InProcessMaster

    return InProcessMaster(storage=CommittedStorage())


def engine(config: Config, place: Place, ear: SessionCallbacks, kept: Membership | None) -> Checkpointer:
    """The session's engine: that of the last round, if this process took part in it."""
    if kept is not None and kept.engine is not None:
        return kept.engine

    def now() -> SessionCallbacks:
        return kept.session if kept is not None and kept.session is not None else ear

    made = startup.engine(
        config, place, locate=lambda *image: now().locate(*image), notify=lambda notice: now().heard(notice)
    )
    if kept is not None:
        kept.engine = made
    return made


class Noted(NamedTuple):
    """Notes on this node that no image contains: this rank's, rank 0's batch statistics, those of all ranks.

    `told`, `told_statistics`: received from other nodes; they count if those nodes' own notes are lost.
    `alike`: the images have no random state; this is the same on all ranks.
    """

    note: bytes | None = None
    statistics: rank_journal.Statistics = ()
    notes: Mapping[int, bytes] = MappingProxyType({})
    told: Mapping[int, bytes] = MappingProxyType({})
    told_statistics: rank_journal.Statistics = ()
    alike: bool = False


def noted(restored: startup.Restored, place: Place, engine: Checkpointer | None, kept: Membership | None) -> Noted:
    """The notes for an image without a random state. This process's own come first, in case the keeper lacks some."""
    if restored.rng is not None or restored.weights_only or engine is None:
        return Noted()
    own, told = (kept.draws.notes, kept.draws.told) if kept is not None else ([], [])
    sources = [*own, *engine.notes.recall()], told
    by_rank, by_told = (rank_journal.by_rank(notes, restored.generation, place.world_size) for notes in sources)
    statistics, told_statistics = (rank_journal.statistics(notes, restored.generation) for notes in sources)
    return Noted(by_rank.get(place.rank), statistics, by_rank, by_told, told_statistics, alike=True)


def drawing(restored: startup.Restored, found: bytes | None, place: Place, attempt: int) -> startup.Restored:
    """`restored` with its image's random state or that of the note `found`. Without both, reseeds the generators."""
    if restored.rng is not None or restored.weights_only:
        return restored
    if found is None:
        rng.reseed(restored.generation.step, attempt, place.rank)
        return restored
    return msgspec.structs.replace(restored, rng=rank_journal.state(found))


def notes(plan: p.Plan, place: Place, engine: Checkpointer | None, kept: Membership, found: bytes | None) -> None:
    """Start noting random states for the round of `plan`, and allocate the memory for the notes."""
    begun = plan.restore.generation if plan.restore is not None else None
    here = p.Generation(plan.attempt, begun.step if begun is not None else 0, plan.run)
    kept.draws.begin(here, place.rank, place.world_size, begun, found)
    if engine is not None:
        engine.prepare(0)
