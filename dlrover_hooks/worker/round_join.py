"""A worker process joins for itself: it requests a rank, waits for the round, and updates its environment.

A new worker does so before its script runs (`launcher.warm.worker_bootstrap`), a survivor when its round broke. The
launcher, which joins for all its workers at the first start, gives them the same environment.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from dlrover_hooks import protocol as p
from dlrover_hooks.client import MasterClient
from dlrover_hooks.config import Config, Place
from dlrover_hooks.errors import JobFinished, MasterAway
from dlrover_hooks.host.ports import held_port

log = logging.getLogger("dlrover_hooks")

FORM_S = 900.0
"""torchrun's own rendezvous timeout: a new worker may wait for a step boundary, others for their import of torch."""
AWAY_S = 120.0
"""A master that has not answered for this long is lost with its node and will not be restarted."""
POLL_S = 5.0
"""Timeout of one long-poll."""


def join_request(config: Config, place: Place, incarnation: str) -> p.Join:
    """The join request of a `dlrover-hooks run` worker for its own rank, within the bounds from its launcher."""
    return p.Join(
        job=config.job,
        incarnation=incarnation,
        node=place.node,
        seats=(p.Seat(incarnation, place.local_rank),),
        host=place.host or "127.0.0.1",
        port=held_port(),
        min_workers=place.min_workers or place.world_size,
        max_workers=place.max_workers or place.world_size,
        proposed_run=uuid.uuid4().hex,
        launcher=place.launcher,
    )


def take_seat(
    client: MasterClient,
    join: p.Join,
    *,
    after: int = 0,
    patience_s: float = FORM_S,
    away_s: float = AWAY_S,
    channel: str = "main",
    look: Callable[[], object] = lambda: None,
    poll_s: float = POLL_S,
) -> p.Seated:
    """Join and wait for a round newer than `after`. Blocks its thread; a signal handler that raises ends the wait.

    Args:
        client: a client with the incarnation `join.incarnation`.
        join: its `seats` has one entry, for this process.
        after: the round that a survivor was in.
        patience_s: timeout of the whole call.
        away_s: fail earlier if the master has not answered for this long.
        channel: of the client; use a separate one if another client with the same incarnation follows later.
        look: called each `poll_s`; what it raises ends the wait.

    Raises:
        JobFinished: the job was trained to its end meanwhile.
        MasterAway: no round formed in time, or the master has gone.
        MasterError: the master refuses the join, or has declared this incarnation dead (Stale).
    """
    deadline = time.monotonic() + patience_s

    def ask(request: p.Message) -> Any:
        left_s = max(1.0, deadline - time.monotonic())
        try:
            return client.call(request, channel=channel, timeout_s=min(away_s, left_s))
        except MasterAway as away:
            raise (away if left_s < away_s else deserted(client.url, join.job, away_s)) from None

    joined = ask(join)
    if joined.finished:
        raise JobFinished(f"job {join.job} was finished at step {joined.finished_step or 0}: nothing is left to train")
    log.debug("job %s: %s waits for a round after %d", join.job, join.incarnation, after)
    while (left := deadline - time.monotonic()) > 0:
        look()
        seated = ask(p.AwaitRound(join.job, join.incarnation, after=after, timeout_s=min(poll_s, left)))
        if seated.round is not None:
            return seated
    raise MasterAway(
        f"job {join.job}: no round formed within {patience_s:g} s (node {join.node}, local rank "
        f"{join.seats[0].local_rank}, {join.min_workers} to {join.max_workers} workers, after round {after})",
        hint="look at the other workers' logs: one of them neither reached its next step boundary nor died",
    )


def deserted(url: str, job: str, waited_s: float) -> MasterAway:
    """The error for a join that the master does not answer."""
    return MasterAway(
        f"job {job}: the master at {url} has not answered for {waited_s:g} s (--master-away)",
        hint="It goes with the node that serves it: launch the job again on all nodes. A master that runs by itself "
        "(python -m dlrover_hooks.master, --rdzv-endpoint http://HOST:PORT) survives the loss of any node",
    )


def seat_environment(
    seated: p.Seated, *, incarnation: str, local_rank: int, local_world_size: int, index: int = 0
) -> dict[str, str]:
    """The variables that torchrun would set for this worker in this round, and those of dlrover-hooks.

    Variables that are the same in all rounds are set by the launcher.

    Args:
        seated: the reply with this rank assignment.
        incarnation: of the worker.
        local_rank: of the worker on its node; constant over all rounds, because its device depends on it.
        local_world_size: workers on its node.
        index: position of this worker in the `seats` of its join.
    """
    rank, world_size = str(seated.ranks[index]), str(seated.world_size)
    return {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "GROUP_RANK": str(seated.node_rank),
        "GROUP_WORLD_SIZE": str(seated.node_count),
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": seated.master_addr,
        "MASTER_PORT": str(seated.master_port),
        "DLROVER_HOOKS_INCARNATION": incarnation,
        "DLROVER_HOOKS_ROUND": str(seated.round or 0),
        "DLROVER_HOOKS_SHARES": msgspec.json.encode(seated.shares).decode() if seated.shares is not None else "",
    }
