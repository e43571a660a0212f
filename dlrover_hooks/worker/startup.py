"""A worker's startup: scan the storage, check that it is writable, attach, and take over the rank at the keeper."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from dlrover_hooks import rng
from dlrover_hooks.checkpoint.checkpointer import Checkpointer
from dlrover_hooks.checkpoint.ipc.keeper_messages import SaveNotice
from dlrover_hooks.checkpoint.ipc.replica_client import Locate, host_towards
from dlrover_hooks.checkpoint.restore.generation_loader import LoadedTree as Opened
from dlrover_hooks.checkpoint.storage import catalog, generations
from dlrover_hooks.checkpoint.storage.filesystem import StorageFolder as Tree, absolute
from dlrover_hooks.checkpoint.storage.stall_guard import StallGuard
from dlrover_hooks.config import Config, Place
from dlrover_hooks.errors import KeeperAway, MasterAway, NoCheckpoint, UsageError
from dlrover_hooks.protocol import (
    Attach,
    Attached,
    AwaitPlan,
    AwaitRound,
    Generation,
    Held,
    Join,
    Plan,
    Restore,
    Seat,
    Seated,
    Secret,
    Source,
)
from dlrover_hooks.protocol.restored_value_check import require

_T = TypeVar("_T")
_log = logging.getLogger("dlrover_hooks")


class Restored(msgspec.Struct, frozen=True):
    """The result of a restore: `state` as the adapter gave it to `cut`, and its source."""

    generation: Generation
    source: Source
    state: Any
    data: dict[str, dict[str, Any]]
    leases: dict[str, dict[str, Any]]
    """By leased dataset: the state of one of the saved ranks."""
    rng: dict[str, Any] | None
    """None at a new world size, or if it was lost with a node: the rank was reseeded instead."""
    weights_only: bool = False
    """Only the model's weights of `state` are used: everything else starts fresh."""

    def __repr__(self) -> str:
        """Where the run goes on, without the tensors of its state."""
        at, weights = self.generation, ", weights_only=True" * self.weights_only
        return f"Restored(step={at.step}, attempt={at.attempt}, run={at.run!r}, source={self.source.value!r}{weights})"


class _RankForm(msgspec.Struct):
    """The `rank` part of a tree from `Session.cut`."""

    rng: dict[str, Any]


class _TreeForm(msgspec.Struct):
    """The parts of such a tree that every rank has."""

    data: dict[str, dict[str, Any]]


def restored(choice: Restore, found: Opened) -> Restored:
    """`found`, already filled, as the `Restored` of `choice`.

    Raises:
        Corrupt: it is not a session's tree.
    """
    if choice.weights:
        return Restored(choice.generation, choice.source, found.tree["state"], {}, {}, None, weights_only=True)
    tree, leases = found.tree, {name: state for part in found.leases for name, state in part.items()}
    require(tree, _TreeForm, f"{choice.generation}")
    own_rng = None
    if found.same_world:
        require(tree.get("rank"), _RankForm, f"{choice.generation}, the part of this rank")
        own_rng = tree["rank"]["rng"]
        rng.check(own_rng)
    return Restored(choice.generation, choice.source, tree["state"], tree["data"], leases, own_rng)


def elsewhere(config: Config) -> str | None:
    """The checkpoint tree that the user named to start from, which may belong to any job."""
    url = config.resume.removeprefix("weights:")
    return url if ("/" in url or url != config.resume) and not config.fresh else None


def starts_over(config: Config) -> bool:
    """Existing checkpoints are to be ignored."""
    return config.fresh or config.resume == "never"


def stored(config: Config) -> generations.Scan:
    """Scan the storage: complete generations of the newest run only, without file lists (the master needs names).

    Raises:
        SaveToBusy: `save_to` holds generations of another job.
        StorageFailed: `save_to` is not writable, or nothing is readable.
    """
    url = elsewhere(config) or config.save_to
    if config.save_to is not None:
        _bounded(config.save_to, lambda save_to: _claimable(config, save_to))
    if starts_over(config) or url is None:
        return generations.Scan()
    job = None if elsewhere(config) else config.job
    found = _bounded(url, lambda url: generations.scan(url, config.storage_options, job))
    for damage in found.damaged:
        _log.warning("job %s: %s", config.job, damage)
    if found.finished_step is not None and elsewhere(config) is None:
        _log.info("job %s already finished at step %d; --fresh starts over", config.job, found.finished_step)
    names = tuple(msgspec.structs.replace(one, files=()) for one in found.manifests)
    return msgspec.structs.replace(found, manifests=names, heard=0 if elsewhere(config) else found.heard)


def join(config: Config, place: Place, incarnation: str) -> Join:
    """The join request of a worker that no dlrover-hooks launcher has started."""
    return Join(
        job=config.job,
        incarnation=incarnation,
        node=place.node,
        seats=(Seat(incarnation, place.local_rank, place.rank),),
        host=socket.gethostname(),
        port=0,
        min_workers=place.world_size,
        max_workers=place.world_size,
        proposed_run=uuid.uuid4().hex,
        fresh=config.fresh,
        again=True,
    )


def take_fixed_seat(
    call: Callable[..., Any], config: Config, place: Place, incarnation: str, patience_s: float
) -> None:
    """Join with the rank from another launcher, and wait for the round.

    Raises:
        UsageError: the job was finished, and none of its checkpoints is left.
        MasterAway: the other workers did not join.
    """
    joined = call(join(config, place, incarnation), timeout_s=60.0)
    if joined.finished:
        raise UsageError(
            f"job {config.job} was finished at step {joined.finished_step or 0}; no checkpoint outlived it",
            hint="start over with DLROVER_HOOKS_FRESH=1 or another job name; with save_to= it could be trained on",
        )
    seated, deadline = Seated(), time.monotonic() + patience_s
    while seated.round is None:
        _in_time(deadline, config.job, f"{place.world_size} workers to join")
        seated = call(AwaitRound(config.job, incarnation, timeout_s=20.0), timeout_s=60.0)


def next_plan(call: Callable[..., Any], job: str, incarnation: str, plan: Plan, deadline: float) -> Plan:
    """The next plan after `plan`. Raises MasterAway after `deadline` (monotonic)."""
    while True:
        _in_time(deadline, job, "all workers to come up and load")
        request = AwaitPlan(job, incarnation, after=plan.number or 0, timeout_s=20.0)
        answer = call(request, timeout_s=60.0)
        if answer.number is not None:
            return answer


def _in_time(deadline: float, job: str, what: str) -> None:
    if time.monotonic() > deadline:
        raise MasterAway(
            f"job {job}: waited too long for {what}",
            hint="look at the other workers' logs: one of them did not come up",
        )


def engine(config: Config, place: Place, *, locate: Locate, notify: Callable[[SaveNotice], None]) -> Checkpointer:
    """A worker's checkpoint engine. It starts a keeper unless a launcher started this process."""
    return Checkpointer(
        config.job,
        place.node,
        place.local_rank,
        master=config.master or "",
        save_to=config.save_to,
        storage_options=config.storage_options,
        keep=config.keep,
        linger_s=config.linger_s if place.keeper_linger_s is None else place.keeper_linger_s,
        locate=locate,
        notify=notify,
        start_keeper=not place.incarnation or place.keeper_linger_s is not None,
        mode=config.snapshot,
    )


def attach(
    config: Config, place: Place, incarnation: str, engine: Checkpointer | None, *, speaks: bool = False,
    recovers: bool = False,
) -> Attach:  # fmt: skip
    """The attach request: offers the node's memory (local rank 0) and the contents of storage (rank 0).

    `speaks`: offer the node's memory at any local rank, since local rank 0 may have died. `recovers`: see `Attach`.

    Raises: as `stored` and `Checkpointer.held`.
    """
    found = stored(config) if engine is not None and place.rank == 0 else generations.Scan()
    speaks = speaks or place.local_rank == 0
    offer = Attach(
        job=config.job,
        incarnation=incarnation,
        node=place.node,
        pid=os.getpid(),
        save_to=absolute(config.save_to) if config.save_to is not None else None,
        storage_options=config.storage_options,
        keep=config.keep,
        save_every=config.save_every,
        persist_every=config.persist_every,
        resume="never" if config.fresh else config.resume,
        held=_held(config, place, engine) if engine is not None and speaks else (),
        stored=found.manifests,
        damaged=found.lost,
        heard=found.heard,
        recovers=recovers,
    )
    return _announced(offer, config, place, engine if speaks else None)


def seated_alike(attached: Attached, job: str, place: Place) -> Attached:
    """`attached`, if its rank is that of the process group. Else raises UsageError: none of its votes would count."""
    here, seat = (place.rank, place.world_size), (attached.rank, attached.world_size)
    if here != seat:
        raise UsageError(
            f"job {job}: rank {here[0]} of {here[1]} in its process group has the place of rank {seat[0]} of {seat[1]}",
            hint="the framework numbers its processes itself: let it take RANK and WORLD_SIZE from the environment "
            "(Lightning, Fabric: TorchElasticEnvironment), with as many devices and nodes as were launched",
        )
    return attached


def _held(config: Config, place: Place, engine: Checkpointer) -> tuple[Held, ...]:
    """The contents of this node's memory; empty if a launcher manages the keeper and the keeper is away."""
    try:
        return engine.held()
    except KeeperAway as away:
        if not place.incarnation:
            raise
        _log.warning("job %s: nothing is restored from the memory of node %s: %s", config.job, place.node, away)
        return ()


def _announced(offer: Attach, config: Config, place: Place, engine: Checkpointer | None) -> Attach:
    """`offer` with the address of this node's keeper, if it takes part in replication and `engine` is given.

    Where workers recover in process, a new worker on another node fetches the survivors' images from that keeper.
    """
    serves = offer.recovers and place.max_workers > place.local_world_size
    if not (config.replicas or serves) or config.master is None or engine is None:
        return offer
    try:
        keeper = engine.neighbours.listen(host_towards(config.master), config.replica_mb_per_s)
    except KeeperAway as away:
        _log.warning("job %s: node %s is without replicas: %s", config.job, place.node, away)
        return offer
    secret = Secret(secrets.token_hex(32))
    sends = bool(config.replicas)
    return msgspec.structs.replace(offer, keeper=keeper, sends=sends, domain=place.domain, secret=secret)


def follow(plan: Plan, engine: Checkpointer | None) -> None:
    """Send the keeper its replication order: peers to admit and the target. The next `take_seat` repeats it."""
    if plan.replication is None or engine is None or engine.neighbours.order is None:
        return
    try:
        engine.neighbours.follow(plan.replication)
    except KeeperAway as away:
        _log.warning("job %s: no replicas for now: %s", engine.job, away)


def _claimable(config: Config, save_to: str) -> None:
    generations.probe(save_to, config.storage_options)
    generations.refuse_others(save_to, config.storage_options, config.job)


def _bounded(url: str, look: Callable[[str], _T]) -> _T:
    """Runs `look` with a timeout, so that a store that does not answer cannot block the start for ever."""
    return StallGuard().run(lambda _: look(url), f"open {url}")


def instead(plan: Plan) -> str:
    """A hint for `resume="require"` without a checkpoint to load."""
    damage = "`dlrover-hooks ckpt verify` says what is damaged; " if plan.lost else ""
    return damage + 'use resume="auto" to start over' + (": what is there stays" if plan.lost else "")


def refuse_nothing(config: Config) -> None:
    """Nothing was restored. Raises NoCheckpoint, with what is there, if the user named a tree to start from."""
    if (url := elsewhere(config)) is not None:
        what, hint = _bounded(url, lambda url: _instead(url, config.storage_options))
        raise NoCheckpoint(f"job {config.job}: resume={config.resume!r}: {absolute(url)} {what}", hint=hint)


def _instead(url: str, options: dict[str, Any]) -> tuple[str, str]:
    place = Tree(url, options)
    if catalog.listing(place):
        return "holds no whole generation that can be read", f"`dlrover-hooks ckpt verify {place.url}` says why"
    what, hint = catalog.instead(place)
    return what, hint or 'name what `save_to` was, a folder with a latest.json in it, or use resume="auto"'


def say_fallbacks(plan: Plan, config: Config, place: Place, said: set[str]) -> None:
    """Log each failed restore once; the reason only if another rank reported it, whose log may be elsewhere."""
    for lost in plan.fallbacks:
        if lost not in said:
            said.add(lost)
            known = lost.partition(f": rank {place.rank}: ")[0]
            _log.warning("job %s rank %d: fell back: %s", config.job, place.rank, known)


def say(found: Restored, config: Config, place: Place) -> None:
    """Log the source of the restored state; as a warning on rank 0, so that it is visible once."""
    level = logging.WARNING if place.rank == 0 else logging.INFO
    what = "starts with the weights of" if found.weights_only else "resumes"
    _log.log(level, "job %s %s %s from %s", config.job, what, found.generation, found.source.value)


def take_seat(config: Config, engine: Checkpointer, plan: Plan, place: Place) -> None:
    """Start saving as `place`. Only after the master admitted this process: until then the previous one keeps the rank.

    Raises:
        UsageError: a living process of another launch saves with this rank.
    """
    engine.begin(plan.run, plan.attempt, place.rank, place.world_size)
    fresh = starts_over(config) and plan.restore is None
    try:
        engine.drop() if fresh or plan.lost else engine.take_seat()
    except KeeperAway as away:  # the next save tries again
        _log.warning("job %s rank %d: %s", config.job, place.rank, away)
    if plan.lost and place.rank == 0:
        _log.warning(
            "job %s: starting over at step 0: none of %d checkpoints could be loaded; they stay where they are "
            "(`dlrover-hooks ckpt verify` names the damage), and this is a run of its own", config.job, plan.lost,
        )  # fmt: skip
    if fresh and place.rank == 0 and config.save_to is not None:
        generations.start_anew(config.save_to, config.storage_options, config.job, plan.run)
