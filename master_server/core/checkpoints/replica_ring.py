"""Placement of replicas: which node keeps the images of which other node, and which nodes hold a requested image.

Pure. Replicas do not count as votes: a replica never makes a generation memory-complete.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import cycle

import msgspec

from dlrover_hooks.master.core.checkpoints.restore_sources import Offers
from dlrover_hooks.master.core.job import Job
from dlrover_hooks.master.core.rounds.members import Member
from dlrover_hooks.protocol import Generation, Located, Replication, Restore, Source


def ring(domains: dict[str, str]) -> dict[str, str]:
    """By node, the other node that keeps its replicas: in another failure domain if there is one.

    A node without a label is a domain of its own. Nodes form a ring, domain after domain. Each node replicates to the
    node k places ahead; k is the size of the largest domain. That node is in another domain, and is the target of one
    node only. If one domain has more than half of all nodes, its nodes are spread evenly over the other nodes instead.
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
    """By saved rank, the nodes that hold its image of the generation restored from memory, its own node first."""
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
    """By incarnation, the saved ranks it answers for (see `Restore`): each rank is assigned to one node, and there to
    the member with the lowest local rank.

    Empty if the default gives the same: each image is on one node only, and each of these nodes has its local rank 0.
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
    """The restore choice that is sent to `member`."""
    chosen, by_member = job.plan.restore, job.plan.answers
    if chosen is None or not by_member:
        return chosen
    return msgspec.structs.replace(chosen, answers=by_member.get(member.incarnation, ()))


def located(job: Job, generation: Generation, rank: int) -> Located:
    """The keepers that hold that image, if it is of the generation that is being restored."""
    chosen, neighbours = job.plan.restore, job.offers.neighbours
    known = chosen is not None and chosen.generation == generation and 0 <= rank < len(job.plan.holders)
    names = job.plan.holders[rank] if known else ()
    at = tuple(neighbours[node].keeper for node in names if node in neighbours)
    return Located(secret=job.secret, at=at)


def replication_of(job: Job, member: Member) -> Replication | None:
    """What `member` sends to its node's keeper. None if that is the task of another member, or the node has no keeper.

    It is the task of local rank 0. That member may be gone after a recovery, so members that recover send it, too.
    """
    if (member.local_rank and not member.recovers) or member.node not in job.offers.neighbours:
        return None
    to = job.plan.replicas_to.get(member.node)
    return Replication(secret=job.secret, to=job.offers.neighbours[to].keeper if to is not None else None)
