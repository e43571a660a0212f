"""Which node keeps whose replicas, and what a round restores out of them."""

from __future__ import annotations

from collections import Counter

import msgspec
from hypothesis import given, strategies as st

from dlrover_hooks import protocol as p
from dlrover_hooks.master.core import job_registry, views
from dlrover_hooks.master.core.checkpoints.replica_ring import ring
from dlrover_hooks.master.core.heartbeats import Nodes
from tests.e2e.job_script import RUN, attach, held, join, stored

SECRET = p.Secret("0123")


@given(st.dictionaries(st.text("abcdefgh", min_size=1, max_size=3), st.sampled_from(["", "x", "y", "z"]), max_size=12))
def test_a_ring_over_failure_domains(domains: dict[str, str]) -> None:
    """Another domain wherever there is one, never itself, and nobody has more guests than must be."""
    found = ring(domains)
    label = {node: domain or f"only {node}" for node, domain in domains.items()}
    assert found.keys() == (domains.keys() if len(domains) > 1 else set())
    largest = max(Counter(label.values()).values(), default=0)
    for node, keeper in found.items():
        assert keeper != node
        assert label[keeper] != label[node] or len(set(label.values())) == 1
    if 2 * largest <= len(domains) or len(set(label.values())) == 1:
        assert sorted(found.values()) == sorted(found)
    elif found:
        rest = len(domains) - largest
        assert max(Counter(found.values()).values()) <= -(-largest // rest) + 1


def keeper(node: str) -> p.KeeperAddress:
    return p.KeeperAddress(node, f"host-{node}", 7000)


class Two:
    """One worker on each of `nodes`; what they say when they attach is given."""

    def __init__(self, *nodes: str, held_by: dict[str, tuple[p.Held, ...]] | None = None, apart: str = "") -> None:
        self.state = job_registry.Master()
        for node in nodes:
            self.send(join(node, 1, lives=node, low=len(nodes), high=len(nodes), node=node))
        for node in nodes:
            more = {} if node == apart else {"keeper": keeper(node), "secret": SECRET}
            self.send(attach(f"{node}0", stored=(stored(1),), held=(held_by or {}).get(node, ()), node=node, **more))

    def send(self, event: p.Message) -> p.Message:
        return job_registry.apply(self.state, event, 1.0).reply

    def ask(self, request: p.Message) -> p.Message | None:
        return views.query(self.state, Nodes(), request)

    def plan(self, node: str) -> p.Plan:
        plan = self.ask(p.AwaitPlan("job", f"{node}0"))
        assert isinstance(plan, p.Plan)
        return plan

    def fail(self, node: str) -> None:
        self.send(p.Loaded("job", f"{node}0", self.plan(node).round, ok=False, reason="flipped"))


def replica(step: int, rank: int, home: str) -> p.Held:
    return msgspec.structs.replace(held(step, rank), home=home)


def test_a_replaced_node_restores_from_its_peer() -> None:
    """Node c took b's place: a holds its own image and b's replica, so nothing comes from storage."""
    world = Two("a", "c", held_by={"a": (held(5, 0), replica(5, 1, "b"))})
    for node in "ac":
        plan = world.plan(node)
        assert plan.restore is not None
        assert (plan.restore.generation.step, plan.restore.source) == (5, p.Source.PEER)
        assert plan.replication == p.Replication(SECRET, keeper("c" if node == "a" else "a"))
    found = world.ask(p.Locate("job", "c0", p.Generation(1, 5, RUN), 1))
    assert found == p.Located(SECRET, (keeper("a"),))
    assert world.ask(p.Locate("job", "c0", p.Generation(1, 4, RUN), 1)) == p.Located(SECRET)


def test_own_memory_before_a_peers_before_older_storage() -> None:
    """And what one source could not give is asked of the next."""
    rows = {"a": (held(5, 0), replica(5, 1, "b")), "b": (held(5, 1), replica(5, 0, "a"))}
    world = Two("a", "b", held_by=rows)
    sources: list[tuple[int, p.Source]] = []
    for _ in range(3):
        restore = world.plan("a").restore
        assert restore is not None
        sources.append((restore.generation.step, restore.source))
        world.fail("a")
    assert sources == [(5, p.Source.MEMORY), (5, p.Source.PEER), (1, p.Source.STORAGE)]
    assert world.plan("a").restore is None
    assert world.ask(p.Locate("job", "a0", p.Generation(1, 5, RUN), 0)) == p.Located(SECRET)


def test_the_ranks_own_node_is_asked_first() -> None:
    rows = {"b": (held(5, 1), replica(5, 0, "z")), "a": (held(5, 0), replica(5, 1, "b"))}
    world = Two("a", "b", "c", held_by=rows)
    assert world.ask(p.Locate("job", "c0", p.Generation(1, 5, RUN), 1)) == p.Located(SECRET, (keeper("b"), keeper("a")))


def test_each_image_is_answered_for_once_in_another_world() -> None:
    """Its leases would be counted twice otherwise."""
    rows = {"a": (held(5, 0), replica(5, 1, "b")), "b": (held(5, 1), replica(5, 0, "a"))}
    world = Two("a", "b", "c", held_by=rows)
    answered = [world.plan(node).restore for node in "abc"]
    assert [one.answers if one else None for one in answered] == [(0,), (1,), ()]


def test_without_replication_memory_must_be_near() -> None:
    """A node that does not take part can neither fetch nor give."""
    plan = Two("a", "c", apart="c", held_by={"a": (held(5, 0), replica(5, 1, "b"))}).plan("c")
    assert plan.restore is not None
    assert plan.restore.source is p.Source.STORAGE
    assert plan.replication is None


def test_one_node_has_no_peer_and_another_nodes_replicas_are_not_whole() -> None:
    """A replica stands for one rank's image, not for a vote of its own node."""
    world = Two("a", held_by={"a": (replica(5, 1, "b"), msgspec.structs.replace(replica(5, 1, "c"), slot=1))})
    plan = world.plan("a")
    assert plan.replication == p.Replication(SECRET)
    assert plan.restore is not None
    assert plan.restore.source is p.Source.STORAGE


def test_the_secret_is_the_first_one_proposed_and_shows_nowhere() -> None:
    """Not in what is logged, nor in what may be asked without a seat."""
    world = Two("a", "b")
    assert world.state.jobs["job"].secret == SECRET
    assert SECRET.key not in repr(world.plan("a")) + repr(world.state) + repr(attach("x", secret=SECRET))
    assert SECRET.key.encode() not in msgspec.json.encode(world.ask(p.ShowJob("job")))
