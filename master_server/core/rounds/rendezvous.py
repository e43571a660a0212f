"""Membership of one job: the waiting agents, the members of the current round, and the changes of both.

A round forms when all live members of the round before have joined again, enough seats (requested ranks) wait, and the
job is full or no join arrived for `last_call_s`. Until then all joins wait. Each event costs O(1), one for a whole node
O(its workers); only the forming costs more. The counters and lists for this are recomputed when a snapshot is read.
"""

from __future__ import annotations

import msgspec

from dlrover_hooks.errors import BadRequest, Stale
from dlrover_hooks.master.core.rounds.members import DONE, EXITED, LOST, REPLACED, Census, Member, census_of
from dlrover_hooks.protocol import Join, Phase, Seat, Seated, Shares


class Waiting(msgspec.Struct):
    """A join that has no ranks yet. `at`: when it arrived."""

    join: Join
    at: float


def _rank(member: Member) -> int:
    return member.rank


class Round(msgspec.Struct):
    """The current (or last) membership. The counters keep each event O(1)."""

    number: int
    phase: Phase
    members: dict[str, Member]
    agents: dict[str, tuple[str, ...]]
    """Incarnations in the order of the joined seats, by agent; by launcher, the members that joined for themselves."""
    nodes: dict[str, int]
    """Node rank by node name."""
    master_addr: str
    master_port: int
    store_prefix: str
    missing: int
    """Live members that have not joined again."""
    shares: Shares | None = None
    """How its ranks share the micro-batches of a step; None: evenly."""
    next_shares: Shares | None = None
    """Once it is rebalanced: those of the next round, if all its ranks return."""
    rebalance: str = ""
    """Why it broke although no member was lost: it is rebalanced."""
    attempt: int = 0
    """The attempt that its members work on; 0 until all have attached."""
    attached: int = 0
    loaded: int = 0
    done: int = 0
    live: int = 0
    exited: int = 0
    """Number of members that left as EXITED. `live`: number of live members."""
    at: dict[str, list[str]] = {}
    """Incarnations of all members, by node."""
    census: Census = msgspec.field(default_factory=Census)

    def __post_init__(self) -> None:
        self.live = sum(member.live for member in self.members.values())
        self.exited = sum(member.gone == EXITED for member in self.members.values())
        self.at = {node: [] for node in self.nodes}
        for member in sorted(self.members.values(), key=_rank):
            self.at[member.node].append(member.incarnation)
        self.census = census_of(self.members.values())

    @property
    def world_size(self) -> int:
        """Number of members."""
        return len(self.members)

    def renumber(self, number: int, store_prefix: str) -> None:
        """Give the round a new number with the same members, none of which has loaded a checkpoint in it."""
        self.number, self.store_prefix, self.loaded = number, store_prefix, 0
        for member in self.members.values():
            member.loaded = False


class Rounds(msgspec.Struct):
    """All membership state of one job."""

    number: int = 0
    round: Round | None = None
    waiting: dict[str, Waiting] = {}
    seats: dict[str, str] = {}
    """Agent by the incarnation of a waiting seat."""
    fixed: dict[str, str] = {}
    """Agent by the fixed rank of a waiting seat."""
    min_workers: int = 1
    max_workers: int = 1
    last_call_s: float = 0.0
    last_join_at: float = 0.0
    places: dict[str, int] = {}
    """Age of a place: the order in which (node, local rank) first joined."""
    places_seen: int = 0
    parted: dict[str, int] = {}
    """Members that earlier rounds have lost, and newcomers that ended without a rank, with their order: messages of
    theirs or of their launchers may still arrive. O(workers): for the oldest no message is expected any more."""
    parted_seen: int = 0
    newcomers: int = 0
    """See `count_newcomers`: computed when the membership changes, not for each request."""
    waiting_at: dict[str, set[str]] = {}
    """Waiting agents, by node."""
    sizes: dict[str, int] = {}
    """By number of seats, how many of the waiting joins have it."""

    def __post_init__(self) -> None:
        self.waiting_at, self.sizes = {}, {}
        for waiting in self.waiting.values():
            _list(self, waiting.join)


def member_of(rounds: Rounds, job: str, incarnation: str) -> Member:
    """The live member `incarnation`. Raises Stale if there is no such member."""
    current = rounds.round
    member = current.members.get(incarnation) if current else None
    if member is not None and member.live:
        return member
    where = f"round {current.number}" if current else "any round"
    why = f"it left ({member.gone})" if member is not None else "it has no rank"
    raise Stale(f"Incarnation {incarnation!r} is not in {where} of job {job!r}: {why}.", hint=REJOIN)


REJOIN = "This process is outdated: stop it; a new process with a new incarnation must join."


def check(rounds: Rounds, join: Join) -> None:
    """Raises BadRequest if the join breaks a rule. Changes nothing."""
    count = len(join.seats)
    if not 1 <= join.min_workers <= join.max_workers:
        raise BadRequest(
            f"Job {join.job!r}: expected 1 <= min_workers <= max_workers, received {join.min_workers} and "
            f"{join.max_workers}.",
            hint="Give --nproc-per-node or --nnodes as MIN:MAX with MIN <= MAX.",
        )
    if not 1 <= count <= join.max_workers:
        raise BadRequest(
            f"Job {join.job!r}: expected 1 to {join.max_workers} workers in one join, received {count}.",
            hint="Raise max_workers or start fewer workers on this node.",
        )
    if not join.incarnation or not 0 <= join.port < 65536 or not join.last_call_s >= 0:
        raise BadRequest(
            f"Job {join.job!r}: incarnation must not be empty, port must be 0..65535 and last_call_s >= 0, received "
            f"{join.incarnation!r}, {join.port}, {join.last_call_s}."
        )
    _check_incarnations(rounds, join)
    _check_fixed_ranks(rounds, join)


def _check_incarnations(rounds: Rounds, join: Join) -> None:
    names = {seat.incarnation for seat in join.seats}
    if len(names) != len(join.seats) or "" in names:
        raise BadRequest(
            f"Job {join.job!r}: two workers of node {join.node!r} carry one incarnation, or an empty one.",
            hint="Make a new uuid for each worker process.",
        )
    members = rounds.round.members if rounds.round else {}
    for name in sorted(names):
        holder = rounds.seats.get(name, join.incarnation)
        member = members.get(name)
        if is_over(rounds, name):
            how = f" ({member.gone})" if member is not None else ""
            raise Stale(f"Incarnation {name!r} has already left job {join.job!r}{how}.", hint=REJOIN)
        if holder != join.incarnation or (member is not None and join.incarnation not in (member.agent, name)):
            raise BadRequest(
                f"Job {join.job!r}: incarnation {name!r} belongs to another agent.",
                hint="Make a new uuid for each worker process.",
            )


def _check_fixed_ranks(rounds: Rounds, join: Join) -> None:
    ranks = [seat.rank for seat in join.seats if seat.rank is not None]
    own = rounds.waiting.get(join.incarnation)
    others = len(rounds.waiting) - (own is not None)
    fixed_elsewhere = len(rounds.fixed) > (sum(seat.rank is not None for seat in own.join.seats) if own else 0)
    if 0 < len(ranks) < len(join.seats) or (others and fixed_elsewhere != bool(ranks)):
        raise BadRequest(
            f"Job {join.job!r}: some workers fix their rank and some do not.",
            hint="Start all workers with torchrun, or all with `dlrover-hooks run`, not both.",
        )
    if ranks and (len(set(ranks)) != len(ranks) or min(ranks) < 0 or max(ranks) >= join.max_workers):
        raise BadRequest(
            f"Job {join.job!r}: fixed ranks must be different and within 0..{join.max_workers - 1}, received {ranks}.",
            hint="RANK and WORLD_SIZE of the launcher do not agree.",
        )
    _displaced(rounds, join)


def predecessors(rounds: Rounds, join: Join) -> list[str]:
    """Waiting agents and live members that `join` replaces, because its agent is the only live one of its node."""
    if not join.sole:
        return []
    mine, node = join.incarnation, join.node
    before = [name for name in sorted(rounds.waiting_at.get(node, ())) if name != mine]
    if rounds.round is not None:
        members = [rounds.round.members[name] for name in rounds.round.at.get(node, ())]
        before += [member.incarnation for member in members if member.live and member.agent != mine]
    return before


def add(rounds: Rounds, join: Join, now: float) -> bool:
    """Add the checked join to `waiting`. Returns True if this broke the current round."""
    for agent in (join.incarnation, *_displaced(rounds, join)):
        drop(rounds, agent)
    rounds.waiting[join.incarnation] = Waiting(join=join, at=now)
    _list(rounds, join)
    rounds.min_workers, rounds.max_workers = join.min_workers, join.max_workers
    rounds.last_call_s, rounds.last_join_at = join.last_call_s, now
    for seat in join.seats:
        rounds.seats[seat.incarnation] = join.incarnation
        if seat.rank is not None:
            rounds.fixed[str(seat.rank)] = join.incarnation
        if (place := place_name(join.node, seat)) not in rounds.places:
            rounds.places[place] = rounds.places_seen
            rounds.places_seen += 1
    return _leave_for(rounds, join)


def place_name(node: str, seat: Seat) -> str:
    """The place of a worker, which stays the same over restarts: its node and its local rank."""
    return f"{node}/{seat.local_rank}"


def drop(rounds: Rounds, agent: str) -> bool:
    """Remove the waiting join of `agent`. Its members that had joined again are missing again."""
    waiting = rounds.waiting.pop(agent, None)
    if waiting is None:
        return False
    unlist(rounds, waiting.join)
    for seat in waiting.join.seats:
        member = rounds.round.members.get(seat.incarnation) if rounds.round else None
        if rounds.round and member is not None and member.rejoined:
            member.rejoined = False
            rounds.round.missing += member.live
    return True


def _list(rounds: Rounds, join: Join) -> None:
    size = str(len(join.seats))
    rounds.waiting_at.setdefault(join.node, set()).add(join.incarnation)
    rounds.sizes[size] = rounds.sizes.get(size, 0) + 1


def unlist(rounds: Rounds, join: Join) -> None:
    """Remove the seats of a join that no longer waits."""
    size, here = str(len(join.seats)), rounds.waiting_at[join.node]
    here.discard(join.incarnation)
    if not here:
        del rounds.waiting_at[join.node]
    rounds.sizes[size] -= 1
    if not rounds.sizes[size]:
        del rounds.sizes[size]
    for seat in join.seats:
        del rounds.seats[seat.incarnation]
        if seat.rank is not None:
            del rounds.fixed[str(seat.rank)]


def _displaced(rounds: Rounds, join: Join) -> list[str]:
    """Agents that wait for the same fixed ranks on the same node: dead, since torchrun has restarted their workers.

    Raises BadRequest if another node claims one of the ranks.
    """
    agents = {rounds.fixed[str(seat.rank)] for seat in join.seats if str(seat.rank) in rounds.fixed}
    agents.discard(join.incarnation)
    for agent in agents:
        if (node := rounds.waiting[agent].join.node) != join.node:
            raise BadRequest(
                f"Job {join.job!r}: nodes {node!r} and {join.node!r} claim the same fixed rank.",
                hint="Two launchers run with one NODE_RANK.",
            )
    return sorted(agents)


def _leave_for(rounds: Rounds, join: Join) -> bool:
    """Mark the sender's members as rejoined if `join` has them, else end them. Returns True if the round broke.

    The sender is an agent or a member that joins for itself from now on.
    """
    current = rounds.round
    mine = _spoken_for(current, join.incarnation) if current else ()
    again = {seat.incarnation for seat in join.seats}
    for name in mine:
        assert current is not None
        member = current.members[name]
        if not member.live:
            continue
        if name in again:
            member.rejoined, current.missing = True, current.missing - 1
        else:
            drop(rounds, name)  # it may have joined for itself
            _end(current, member, REPLACED)
    if not mine or current is None or current.phase is Phase.BROKEN:
        return False
    current.phase = Phase.BROKEN
    return True


def _spoken_for(current: Round, incarnation: str) -> tuple[str, ...]:
    return (incarnation,) if incarnation in current.members else current.agents.get(incarnation, ())


def _end(current: Round, member: Member, how: str) -> None:
    current.census.take_out(member)
    member.gone = how
    current.census.add(member)
    current.live -= 1
    current.done += how == DONE
    current.exited += how == EXITED
    current.missing -= not member.rejoined


def part(rounds: Rounds, incarnation: str, how: str) -> bool:
    """`incarnation`, an agent or a worker, is gone. Returns True if this broke the current round.

    A worker that left DONE or EXITED does not break it. With an agent end its waiting join and its members, if it was
    lost only those that never attached.
    """
    drop(rounds, rounds.seats.get(incarnation, incarnation))
    current = rounds.round
    if current is None:
        return False
    gone = [current.members[incarnation]] if incarnation in current.members else []
    gone += [current.members[name] for name in current.agents.get(incarnation, ()) if name != incarnation]
    ended = False
    for member in gone:
        if member.live and (member.incarnation == incarnation or how != LOST or not member.attached):
            _end(current, member, how)
            ended = True
    if not ended or how in (DONE, EXITED) or current.phase is Phase.BROKEN:
        return False
    current.phase = Phase.BROKEN
    return True


def reapers(rounds: Rounds, worker: str) -> set[str]:
    """The incarnations that may report the end of `worker`: the one that joined for it and its launcher; or none."""
    member = rounds.round.members.get(worker) if rounds.round else None
    found = {member.agent, member.launcher} if member is not None else set[str]()
    waiting = rounds.waiting.get(rounds.seats.get(worker, ""))
    return found | ({waiting.join.incarnation, waiting.join.launcher} if waiting is not None else set())


def is_over(rounds: Rounds, worker: str) -> bool:
    """True if `worker` was a member or a newcomer and has ended, in the current round or not long before."""
    member = rounds.round.members.get(worker) if rounds.round else None
    return worker in rounds.parted or (member is not None and not member.live)


def remember(rounds: Rounds, *parted: str) -> None:
    """Record that these incarnations have ended, because no current round shows it."""
    for name in parted:
        rounds.parted[name] = rounds.parted_seen
        rounds.parted_seen += 1
    most = 4 * (rounds.round.world_size if rounds.round else 0) + 64
    if len(rounds.parted) > 2 * most:
        oldest = rounds.parted_seen - most
        rounds.parted = {name: seen for name, seen in rounds.parted.items() if seen >= oldest}


def knows(rounds: Rounds, incarnation: str) -> bool:
    """True for a waiting agent or seat, and for an agent or live member of the current round."""
    if incarnation in rounds.waiting or incarnation in rounds.seats:
        return True
    current = rounds.round
    if current is None:
        return False
    member = current.members.get(incarnation)
    return incarnation in current.agents if member is None else member.live


def lives(rounds: Rounds, node: str) -> bool:
    """True if `node` has a live member in the current round. O(members of the node)."""
    current = rounds.round
    return current is not None and any(current.members[name].live for name in current.at.get(node, ()))


def node_of(rounds: Rounds, incarnation: str) -> str | None:
    """The node of a member or an agent of the current round, also of one that has left it."""
    current = rounds.round
    mine = _spoken_for(current, incarnation) if current is not None else ()
    return current.members[mine[0]].node if current is not None and mine else None


def count_newcomers(rounds: Rounds) -> int:
    """Number of seats that could be added to the training round: those of complete joins, up to max_workers."""
    current = rounds.round
    if not rounds.waiting or current is None or current.phase is not Phase.TRAINING:
        return 0
    if current.done:  # the round is ending
        return 0
    left = room = rounds.max_workers - current.live
    for size, count in sorted((int(seats), joins) for seats, joins in rounds.sizes.items()):
        left -= size * min(count, max(0, left) // size)
    return room - left


def regroups(current: Round, incarnation: str) -> bool:
    """True if `incarnation` admits newcomers: a member that recovers, or an agent none of whose members recovers."""
    member = current.members.get(incarnation)
    if member is not None:
        return member.recovers
    return not any(current.members[name].recovers for name in current.agents.get(incarnation, ()))


def seated(rounds: Rounds, job: str, agent: str, after: int) -> Seated | None:
    """The answer to `AwaitRound`: None while no round is newer than `after`. Raises Stale if `agent` is unknown."""
    if agent in rounds.waiting:
        return None
    current = rounds.round
    names = _spoken_for(current, agent) if current is not None else ()
    if current is None or not names:
        raise Stale(
            f"Agent {agent!r} waits for no round of job {job!r}: it was lost or never joined.", hint="Join again."
        )
    if current.number <= after:
        return None
    mine = [current.members[name] for name in names]
    return Seated(
        round=current.number,
        ranks=tuple(member.rank for member in mine),
        world_size=current.world_size,
        node_rank=current.nodes[mine[0].node],
        node_count=len(current.nodes),
        master_addr=current.master_addr,
        master_port=current.master_port,
        store_prefix=current.store_prefix,
        shares=current.shares,
    )
