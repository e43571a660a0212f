"""The messages of a small job, so that tests read as stories. `caller_of(incarnation)` gives the caller."""

from __future__ import annotations

from dlrover_hooks import protocol as p

RUN = "run0"


def join(
    agent: str = "agent", count: int = 2, *, lives: str = "w", low: int = 2, high: int = 2, **more: object
) -> p.Join:
    """A join of one node with `count` workers called `w0, w1, ...`."""
    fields: dict[str, object] = {
        "job": "job",
        "incarnation": agent,
        "node": f"node-{agent}",
        "seats": tuple(p.Seat(incarnation=f"{lives}{index}", local_rank=index) for index in range(count)),
        "host": "127.0.0.1",
        "port": 29500,
        "min_workers": low,
        "max_workers": high,
        "proposed_run": RUN,
        "last_call_s": 0.0,
    }
    return p.Join(**(fields | more))  # type: ignore[arg-type]


def attach(worker: str, agent: str = "agent", **more: object) -> p.Attach:
    """A worker's attach."""
    fields: dict[str, object] = {"job": "job", "incarnation": worker, "node": f"node-{agent}", "pid": 1}
    return p.Attach(**(fields | more))  # type: ignore[arg-type]


def shard(rank: int) -> p.ShardFile:
    """A rank's file."""
    return p.ShardFile(name=f"shard-{rank}", rank=rank, nbytes=1, chunk_bytes=1, chunks=("00",))


def vote(
    rank: int, step: int, kind: p.VoteKind = p.VoteKind.MEMORY, *, world: int = 2, attempt: int = 1, **more: object
) -> p.Vote:
    """The vote of `w{rank}`."""
    fields: dict[str, object] = {
        "job": "job",
        "incarnation": f"w{rank}",
        "generation": p.Generation(attempt=attempt, step=step, run=RUN),
        "rank": rank,
        "world_size": world,
        "kind": kind,
        "file": shard(rank) if kind is p.VoteKind.STORED else None,
    }
    return p.Vote(**(fields | more))  # type: ignore[arg-type]


def held(step: int, rank: int, world: int = 2, attempt: int = 1) -> p.Held:
    """A slot of a node's keeper."""
    generation = p.Generation(attempt=attempt, step=step, run=RUN)
    return p.Held(generation=generation, rank=rank, world_size=world, seat=rank, slot=0)


def stored(step: int, world: int = 2, attempt: int = 1) -> p.Manifest:
    """A whole generation in storage."""
    generation = p.Generation(attempt=attempt, step=step, run=RUN)
    return p.Manifest(job="job", generation=generation, world_size=world, files=(), created_at=float(step))
