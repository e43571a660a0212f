"""When a round forms and which ranks its members get.

Joins are taken as a whole: first those with members of the round before, then by the age of their places. A place is a
(node, local rank). The surviving member with the lowest rank gets rank 0; the others keep their ranks where the world
size allows it. A newcomer takes the rank that its place had in the round before, if it is free, so that a replaced
worker finds its image.
"""

from __future__ import annotations

from dlrover_hooks.master.core.rounds.members import Member
from dlrover_hooks.master.core.rounds.rendezvous import Round, Rounds, place_name, remember, unlist
from dlrover_hooks.protocol import Join, Phase, Seat


def due(rounds: Rounds) -> float | None:
    """When the last call ends, if a new round waits for nothing else."""
    return _last_call(rounds) if _enough(rounds) else None


def _last_call(rounds: Rounds) -> float:
    return rounds.last_join_at + rounds.last_call_s


def _survived(rounds: Rounds) -> bool:
    """True if members of the round before live. All have joined again (see `_enough`), so there is no last call."""
    return rounds.round is not None and rounds.round.live > 0


def _enough(rounds: Rounds) -> bool:
    missing = rounds.round.missing if rounds.round else 0
    return missing == 0 and len(rounds.seats) >= rounds.min_workers


def form(rounds: Rounds, prefix: str, now: float) -> bool:
    """Form a new round if it is due. Returns True if one was formed."""
    if not _enough(rounds):
        return False
    if len(rounds.seats) < rounds.max_workers and not _survived(rounds) and now < _last_call(rounds):
        return False
    chosen = _choose(rounds)
    order = _order(rounds, chosen)
    if len(order) < rounds.min_workers:
        return False
    rounds.number += 1
    last, before = rounds.round, rounds.round.members.values() if rounds.round else ()
    rounds.round = _seat(rounds.number, f"{prefix}/{rounds.number}", order)
    if last is not None and last.next_shares is not None and _same_ranks(last, rounds.round):
        rounds.round.shares = last.next_shares
    remember(rounds, *sorted(member.incarnation for member in before if not member.live))
    for join in chosen:
        del rounds.waiting[join.incarnation]
        unlist(rounds, join)
    _forget_places(rounds)
    return True


def _old_rank(rounds: Rounds, seat: Seat) -> int | None:
    member = rounds.round.members.get(seat.incarnation) if rounds.round else None
    return None if member is None else member.rank


def _standing(rounds: Rounds, node: str, seat: Seat) -> tuple[int, int]:
    """Sort key: members of the round before by their rank, then newcomers by the age of their place."""
    old = _old_rank(rounds, seat)
    return (1, rounds.places[place_name(node, seat)]) if old is None else (0, old)


def _choose(rounds: Rounds) -> list[Join]:
    """The joins of the new round, complete ones only: in the order of `_standing`, as many as fit into max_workers."""
    joins = [waiting.join for waiting in rounds.waiting.values()]
    joins.sort(key=lambda join: (min(_standing(rounds, join.node, seat) for seat in join.seats), join.incarnation))
    chosen: list[Join] = []
    room = rounds.max_workers
    for join in joins:
        if len(join.seats) <= room:
            chosen.append(join)
            room -= len(join.seats)
    return chosen


def _order(rounds: Rounds, joins: list[Join]) -> list[tuple[Join, Seat]]:
    """The joins' seats in the order of their new ranks; empty if fixed ranks have a hole."""
    pairs = [(join, seat) for join in joins for seat in join.seats]
    if all(seat.rank is not None for _, seat in pairs):
        pairs.sort(key=lambda pair: pair[1].rank or 0)
        return pairs if [seat.rank for _, seat in pairs] == list(range(len(pairs))) else []
    pairs.sort(key=lambda pair: (_standing(rounds, pair[0].node, pair[1]), pair[1].incarnation))
    ranks: dict[int, tuple[Join, Seat]] = {}
    others: list[tuple[Join, Seat]] = []
    heirs = _heirs(rounds)
    for join, seat in pairs:
        old = _old_rank(rounds, seat)
        rank = heirs.get(place_name(join.node, seat)) if old is None else old if ranks else 0
        if rank is not None and rank < len(pairs) and rank not in ranks:
            ranks[rank] = join, seat
        else:
            others.append((join, seat))
    holes = (rank for rank in range(len(pairs)) if rank not in ranks)
    ranks |= dict(zip(holes, others, strict=False))
    return [ranks[rank] for rank in range(len(pairs))]


def _heirs(rounds: Rounds) -> dict[str, int]:
    """By place, its rank in the round before."""
    members = rounds.round.members.values() if rounds.round else ()
    return {f"{member.node}/{member.local_rank}": member.rank for member in members}


def _seat(number: int, prefix: str, order: list[tuple[Join, Seat]]) -> Round:
    members: dict[str, Member] = {}
    nodes: dict[str, int] = {}
    joins: dict[str, Join] = {}
    for rank, (join, seat) in enumerate(order):
        nodes.setdefault(join.node, len(nodes))
        joins[join.incarnation] = join
        members[seat.incarnation] = Member(
            incarnation=seat.incarnation,
            agent=join.incarnation,
            node=join.node,
            local_rank=seat.local_rank,
            rank=rank,
            launcher=join.launcher or join.incarnation,
            recovers=join.agents,
        )
    return Round(
        number=number,
        phase=Phase.TRAINING if all(join.agents for join in joins.values()) else Phase.ATTACHING,
        members=members,
        agents=_agents(joins),
        nodes=nodes,
        master_addr=order[0][0].host,
        master_port=order[0][0].port,
        store_prefix=prefix,
        missing=len(members),
    )


def _same_ranks(before: Round, after: Round) -> bool:
    """True if each rank has the place that it had, and either all or none kept their processes."""
    if 0 < before.live < before.world_size:  # one was lost meanwhile, and its successor may be as fast as the others
        return False
    one, other = ({(m.rank, m.node, m.local_rank) for m in round_.members.values()} for round_ in (before, after))
    return one == other


def _agents(joins: dict[str, Join]) -> dict[str, tuple[str, ...]]:
    agents = {name: tuple(seat.incarnation for seat in join.seats) for name, join in joins.items()}
    for join in joins.values():
        if join.launcher not in ("", join.incarnation):
            agents[join.launcher] = (*agents.get(join.launcher, ()), *(seat.incarnation for seat in join.seats))
    return agents


def _forget_places(rounds: Rounds) -> None:
    """Keep memory O(workers): drop the older half of the unused places when there are too many."""
    assert rounds.round is not None
    bound = 4 * (len(rounds.round.members) + len(rounds.seats)) + 64
    if len(rounds.places) <= bound:
        return
    used = {f"{member.node}/{member.local_rank}" for member in rounds.round.members.values()}
    used |= {place_name(waiting.join.node, seat) for waiting in rounds.waiting.values() for seat in waiting.join.seats}
    idle = sorted((age, place) for place, age in rounds.places.items() if place not in used)
    for _, place in idle[: len(idle) // 2]:
        del rounds.places[place]
