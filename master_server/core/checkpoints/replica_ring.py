"""Whose images a node's keeper also holds: the ring of nodes, and who has an image when it is wanted.

Pure. Nothing here counts as a vote: a replica never makes a generation memory-complete.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import cycle

import msgspec

from dlrover_hooks.master.core.checkpoints.restore_sources import Offers
from dlrover_hooks.master.core.job import Job
from dlrover_hooks.master.core.rounds.rendezvous import Member
from dlrover_hooks.protocol import Generation, Located, Replication, Restore, Source


def ring(domains: dict[str, str]) -> dict[str, str]:
    """By node, the other one that keeps its replicas: in another failure domain wherever there is one.

    A node without a label is a domain of its own. Nodes lie in a circle, domain after domain, and each takes the one
    as far on as the largest domain has nodes: that is in another domain, and nobody is taken twice. Only where one
    domain has more than half of all nodes, its members share the others out evenly.
    """
    label = {node: domain or f"\n{node}" for node, domain in domains.items()}
    order = sorted(domains, key=lambda node: (label[node], node))
    sizes = Counter(label.values())
    shift = max(sizes.values(), default=0) if len(sizes) > 1 else 1
    found = {node: order[(index + shift) % len(order)] for index, node in enumerate(order)}
    for domain, size in sizes.items():
        if len(sizes) > 1 and 2 * size > len(order):
            others = cycle(node for node in order if label[node] != domain)
            found |= {node: next(others) for node in order if label[node] == domain}
    return found if len(order) > 1 else {}


def holders(offers: Offers, chosen: Restore | None) -> tuple[tuple[str, ...], ...]:
    """By saved rank, the nodes that hold its image of what is restored from memory, its own one first."""
    if chosen is None or chosen.source is Source.STORAGE:
        return ()
    rows = [(bool(one.home), node, one) for node, held in offers.held.items() for one in held]
    found: list[list[str]] = [[] for _ in range(chosen.world_size)]
    for _, node, one in sorted(rows, key=lambda row: row[:2]):
        this = (one.generation, one.world_size) == (chosen.generation, chosen.world_size)
        if this and 0 <= one.rank < chosen.world_size and node not in found[one.rank]:
            found[one.rank].append(node)
    return tuple(tuple(nodes) for nodes in found)


def answers(holders: tuple[tuple[str, ...], ...], members: Iterable[Member]) -> dict[str, tuple[int, ...]]:
    """By incarnation, the saved ranks it answers for: the lowest local rank for its node, each for other ranks.

    Empty if that is what local rank 0 does unasked: it is there on each node, and no image is held twice.
    """
    first: dict[str, Member] = {}
    for member in sorted(members, key=lambda one: one.local_rank):
        first.setdefault(member.node, member)
    if all(len(nodes) == 1 and first[nodes[0]].local_rank == 0 for nodes in holders):
        return {}
    found: dict[str, list[int]] = defaultdict(list)
    for rank, nodes in enumerate(holders):
        found[first[nodes[0]].incarnation].append(rank)
    return {name: tuple(ranks) for name, ranks in found.items()}


def restore_for(job: Job, member: Member) -> Restore | None:
    """The choice, as `member` is told it."""
    chosen, by_member = job.plan.restore, job.plan.answers
    if chosen is None or not by_member:
        return chosen
    return msgspec.structs.replace(chosen, answers=by_member.get(member.incarnation, ()))


def located(job: Job, generation: Generation, rank: int) -> Located:
    """Who holds that image, if it is of the generation that is being restored."""
    chosen, neighbours = job.plan.restore, job.offers.neighbours
    known = chosen is not None and chosen.generation == generation and 0 <= rank < len(job.plan.holders)
    names = job.plan.holders[rank] if known else ()
    at = tuple(neighbours[node].keeper for node in names if node in neighbours)
    return Located(secret=job.secret, at=at)


def replication_of(job: Job, member: Member) -> Replication | None:
    """What `member` tells its node's keeper; None where another member does, or nobody.

    That of local rank 0 may be gone: each that recovers tells it, if it has offered its keeper.
    """
    if (member.local_rank and not member.recovers) or member.node not in job.offers.neighbours:
        return None
    to = job.plan.replicas_to.get(member.node)
    return Replication(secret=job.secret, to=job.offers.neighbours[to].keeper if to is not None else None)
