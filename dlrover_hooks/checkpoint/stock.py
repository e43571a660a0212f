"""How a worker comes up: what storage offers it, whether it may write there, and when its seat is taken."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from dlrover_hooks.checkpoint import storage
from dlrover_hooks.checkpoint.checkpointer import Checkpointer
from dlrover_hooks.checkpoint.neighbours import host_towards
from dlrover_hooks.checkpoint.patience import Patience
from dlrover_hooks.checkpoint.restoring import Restored as Opened
from dlrover_hooks.config import Config, Place
from dlrover_hooks.errors import KeeperAway, NoCheckpoint
from dlrover_hooks.protocol import Attach, Generation, Manifest, Plan, Restore, Secret, Source

_T = TypeVar("_T")
_log = logging.getLogger("dlrover_hooks")


class Restored(msgspec.Struct, frozen=True):
    """What a restore brought: `state` as the adapter gave it to `cut`, and where it came from."""

    generation: Generation
    source: Source
    state: Any
    data: dict[str, dict[str, Any]]
    leases: dict[str, dict[str, Any]]
    """By leased dataset: the state of one of the saved ranks."""
    rng: dict[str, Any] | None
    """None at a new world size: the rank was reseeded instead."""
    weights_only: bool = False
    """Of `state` only the model's weights are to be taken: everything else begins anew."""


def restored(choice: Restore, found: Opened) -> Restored:
    """What `found`, once it is filled, brings of `choice`."""
    if choice.weights:
        return Restored(choice.generation, choice.source, found.tree["state"], {}, {}, None, weights_only=True)
    tree, leases = found.tree, {name: state for part in found.leases for name, state in part.items()}
    own_rng = tree["rank"]["rng"] if found.same_world else None
    return Restored(choice.generation, choice.source, tree["state"], tree["data"], leases, own_rng)


def elsewhere(config: Config) -> str | None:
    """The checkpoint tree that the user named to start from, whatever job it belongs to."""
    url = config.resume.removeprefix("weights:")
    return url if ("/" in url or url != config.resume) and not config.fresh else None


def anew(config: Config) -> bool:
    """Whatever there is to go on with is not wanted."""
    return config.fresh or config.resume == "never"


def stored(config: Config) -> tuple[Manifest, ...]:
    """Whole generations in storage, newest run only, without their file lists (the master needs only the names).

    Raises:
        StorageFailed: `save_to` cannot be written, or nothing can be read.
        SaveToBusy: `save_to` holds generations of another job.
    """
    url = elsewhere(config) or config.save_to
    if config.save_to is not None:
        _bounded(config.save_to, lambda save_to: _claimable(config, save_to))
    if anew(config) or url is None:
        return ()
    job = None if elsewhere(config) else config.job
    found = _bounded(url, lambda url: storage.scan(url, config.storage_options, job))
    for damage in found.damaged:
        _log.warning("job %s: %s", config.job, damage)
    if found.finished_step is not None and elsewhere(config) is None:
        _log.info("job %s already finished at step %d; --fresh starts anew", config.job, found.finished_step)
    return tuple(msgspec.structs.replace(one, files=()) for one in found.manifests)


def attach(config: Config, place: Place, incarnation: str, engine: Checkpointer | None) -> Attach:
    """What a worker says of itself and offers: its node's memory (local rank 0), what storage holds (rank 0).

    Raises: as `stored` and `Checkpointer.held`.
    """
    offer = Attach(
        job=config.job,
        incarnation=incarnation,
        node=place.node,
        pid=os.getpid(),
        save_to=config.save_to,
        storage_options=config.storage_options,
        keep=config.keep,
        save_every=config.save_every,
        persist_every=config.persist_every,
        resume="never" if config.fresh else config.resume,
        held=engine.held() if engine is not None and place.local_rank == 0 else (),
        stored=stored(config) if engine is not None and place.rank == 0 else (),
    )
    return _announced(offer, config, place, engine)


def _announced(offer: Attach, config: Config, place: Place, engine: Checkpointer | None) -> Attach:
    """`offer` with the way to this node's keeper, if it is to take part in replication and local rank 0 asks."""
    if not config.replicas or config.master is None or engine is None or place.local_rank != 0:
        return offer
    try:
        keeper = engine.neighbours.listen(host_towards(config.master), config.replica_mb_per_s)
    except KeeperAway as away:
        _log.warning("job %s: node %s is without replicas: %s", config.job, place.node, away)
        return offer
    secret = Secret(secrets.token_hex(32))
    return msgspec.structs.replace(offer, keeper=keeper, domain=place.domain, secret=secret)


def follow(plan: Plan, engine: Checkpointer | None) -> None:
    """Tell the keeper whom to admit and where to send; what fails is said again with the next seat that is taken."""
    if plan.replication is None or engine is None:
        return
    try:
        engine.neighbours.follow(plan.replication)
    except KeeperAway as away:
        _log.warning("job %s: no replicas for now: %s", engine.job, away)


def _claimable(config: Config, save_to: str) -> None:
    storage.probe(save_to, config.storage_options)
    storage.refuse_others(save_to, config.storage_options, config.job)


def _bounded(url: str, look: Callable[[str], _T]) -> _T:
    """A store that does not answer must not hold up the start for ever."""
    return Patience().run(lambda _: look(url), f"open {url}")


def refuse_nothing(config: Config) -> None:
    """Nothing could be restored. Raises NoCheckpoint if the user named a tree to start from."""
    if (url := elsewhere(config)) is not None:
        raise NoCheckpoint(
            f"job {config.job}: resume={url!r} holds no whole generation that can be read",
            hint='name a folder with a latest.json in it, or use resume="auto"',
        )


def take_seat(config: Config, engine: Checkpointer, plan: Plan, place: Place) -> None:
    """Begin to save for `place`. Only once the master let this life in: until then whoever had the seat keeps it.

    Raises:
        UsageError: a living process of another launch saves there.
    """
    engine.begin(plan.run, plan.attempt, place.rank, place.world_size)
    fresh = anew(config) and plan.restore is None
    try:
        engine.drop() if fresh else engine.take_seat()
    except KeeperAway as away:  # the saves look for it again
        _log.warning("job %s rank %d: %s", config.job, place.rank, away)
    if fresh and place.rank == 0 and config.save_to is not None:
        storage.start_anew(config.save_to, config.storage_options, config.job, plan.run)
