"""However plans, failures and late starts follow each other: in the end the nodes are those that are desired."""

from __future__ import annotations

from typing import Any

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dlrover_hooks.protocol import Node, NodeExit, NodeGroupResource, NodeResource, NodeType, ScalePlan
from dlrover_hooks.scalers.node_reconciler import ActionKind, NodeAction, NodeReconciler, StartRetries
from dlrover_hooks.scalers.scaler import NodeState, ScaledNode

IDS = st.integers(0, 4)
TYPES = st.sampled_from([NodeType.WORKER, NodeType.PS])
RESOURCES = st.builds(NodeResource, cpu=st.sampled_from([0.0, 1.0, 2.0]))
NODES = st.lists(st.builds(Node, TYPES, IDS, RESOURCES), max_size=4)
SIZES = st.builds(NodeGroupResource, st.integers(0, 5), RESOURCES)
GROUPS = st.dictionaries(TYPES.map(lambda kind: kind.value), SIZES, max_size=2)
ENDS = st.sampled_from([NodeExit.SUCCEEDED, NodeExit.ERROR, NodeExit.KILLED])
RETRIES = StartRetries(attempts=3, first_s=1.0, longest_s=2.0)


class PlansAndFailures(RuleBasedStateMachine):
    """A platform on which starts take their time, fail, and nodes end; and a model of the desired set."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.core = 0.0, NodeReconciler(RETRIES)
        self.desired: dict[str, Node] = {}
        self.over: dict[str, NodeExit] = {}
        """Desired nodes that have ended."""
        self.starting: dict[int, Node] = {}
        self.exist: dict[int, Node] = {}
        """Nodes that really are there, from the moment at which their start is handed out."""
        self.pending = set[int]()
        """Nodes that were created, and of which it is not known yet that they run."""
        self.removing = set[int]()
        self.seen: dict[str, ScaledNode] = {}
        self.after = 0

    @rule(launch=NODES, remove=NODES, groups=GROUPS)
    def plan(self, launch: list[Node], remove: list[Node], groups: dict[str, NodeGroupResource]) -> None:
        names = {node.name for node in launch}
        plan = ScalePlan(groups, launch, [node for node in remove if node.name not in names])
        self.core.merge(plan, self.now)
        for node in plan.remove_nodes:
            self.desired.pop(node.name, None)
            self.over.pop(node.name, None)
        for node in launch:
            self.desired.setdefault(node.name, node)
        for name, group in groups.items():
            self.size(NodeType(name), group.count, {node.name for node in plan.remove_nodes})
        before = (self.core.number, self.core.nodes())
        self.core.merge(plan, self.now)
        assert (self.core.number, self.core.nodes()) == before

    def size(self, kind: NodeType, count: int, removed: set[str]) -> None:
        of_kind = {name: node for name, node in self.desired.items() if node.type is kind}
        failed = {name for name, cause in self.over.items() if cause is not NodeExit.SUCCEEDED}
        present = [node for name, node in of_kind.items() if name not in failed]
        free = [Node(kind, number) for number in range(20) if number not in {node.id for node in of_kind.values()}]
        free = [node for node in free if node.name not in removed]
        for node in free[: max(0, count - len(present))]:
            self.desired[node.name] = node
        alive = sorted((node for node in present if node.name not in self.over), key=lambda node: -node.id)
        for node in alive[: max(0, len(present) - count)]:
            del self.desired[node.name]

    @rule()
    def hand_out(self) -> None:
        """Take every action that is due."""
        while (action := self.core.next_start(self.now)) is not None:
            assert action.node.name not in {node.name for node in self.exist.values()}, "two nodes of one name"
            self.starting[action.launch] = self.exist[action.launch] = action.node
        while (action := self.core.next_change(self.now)) is not None:
            self.change(action)

    def change(self, action: NodeAction) -> None:
        assert action.launch not in self.starting
        if action.kind is ActionKind.REMOVE:
            self.removing.add(action.launch)
        else:
            assert action.launch in self.exist
            self.exist[action.launch] = action.node

    @precondition(lambda self: self.starting)
    @rule(data=st.data())
    def start_ends(self, data: Any) -> None:
        launch = data.draw(st.sampled_from(sorted(self.starting)))
        node, good = self.starting.pop(launch), data.draw(st.booleans())
        if launch not in self.exist or good:  # it has ended before its start was known to be over
            if data.draw(st.booleans()):
                self.core.started(launch, self.now)
            else:
                self.core.created(launch, self.now)
                self.pending.add(launch)
        else:
            del self.exist[launch]
            self.core.start_failed(launch, "no place", self.now)
            shown = self.shown(node.name)
            if shown is not None and shown.launch == launch and shown.exit is NodeExit.NEVER_STARTED:
                self.over[node.name] = NodeExit.NEVER_STARTED

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def runs(self, data: Any) -> None:
        launch = data.draw(st.sampled_from(sorted(self.pending)))
        self.pending.discard(launch)
        self.core.started(launch, self.now)

    @rule(kind=TYPES, number=IDS)
    def is_found(self, kind: NodeType, number: int) -> None:
        """A node that exists already, of a scaler before this one. One of a name that is known here is not started."""
        node = Node(kind, number)
        shown = self.shown(node.name)
        if shown is not None and shown.state is not NodeState.WAITING:
            assert self.core.adopt(node, self.now) == shown.launch
            return
        launch = self.core.adopt(node, self.now)
        self.desired.setdefault(node.name, node)
        self.exist[launch] = node
        self.pending.add(launch)

    @precondition(lambda self: self.exist)
    @rule(data=st.data(), cause=ENDS)
    def ends(self, data: Any, cause: NodeExit) -> None:
        """By itself, or because it was asked to; also while its start is under way."""
        launch = data.draw(st.sampled_from(sorted(self.exist)))
        node = self.exist.pop(launch)
        self.removing.discard(launch)
        shown = self.shown(node.name)
        assert shown is not None
        self.core.ended(launch, cause, 0, "", self.now)
        if shown.state is not NodeState.REMOVING:
            self.over[node.name] = cause

    @precondition(lambda self: self.removing)
    @rule(data=st.data())
    def removal_fails(self, data: Any) -> None:
        launch = data.draw(st.sampled_from(sorted(self.removing)))
        self.removing.discard(launch)
        self.core.removal_failed(launch, "no answer", self.now)

    @rule(seconds=st.sampled_from([0.5, 1.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def watch(self) -> None:
        changes = self.core.changes(self.after)
        self.after = changes.number
        for one in changes.nodes:
            if one.state is NodeState.GONE:
                self.seen.pop(one.node.name, None)
            else:
                self.seen[one.node.name] = one

    @invariant()
    def what_is_listed_is_desired_or_being_removed(self) -> None:
        listed = {one.node.name: one for one in self.core.nodes()}
        assert set(self.desired) <= set(listed)
        for name in set(listed) - set(self.desired):
            assert listed[name].state is NodeState.REMOVING

    def shown(self, name: str) -> ScaledNode | None:
        return next((one for one in self.core.nodes() if one.node.name == name), None)

    def teardown(self) -> None:
        """From now on all goes well: then the nodes are those that are desired and have not ended."""
        for _ in range(50):
            self.now += RETRIES.longest_s
            self.hand_out()
            for launch in [*self.starting, *self.pending]:
                self.core.started(launch, self.now)
            self.starting.clear()
            self.pending.clear()
            for launch in list(self.removing):
                self.removing.discard(launch)
                if self.exist.pop(launch, None) is not None:
                    self.core.ended(launch, NodeExit.ERROR, 0, "", self.now)
        self.watch()
        assert {node.name for node in self.exist.values()} == set(self.desired) - set(self.over)
        listed = {one.node.name: one for one in self.core.nodes()}
        assert set(listed) == set(self.desired)
        assert {name for name, one in listed.items() if one.state is NodeState.RUNNING} == set(listed) - set(self.over)
        assert self.seen == listed
        for node in self.exist.values():
            assert node.config_resource == listed[node.name].node.config_resource
        self.core.remove_all(self.now)
        self.hand_out()
        for launch in list(self.removing):
            self.core.ended(launch, NodeExit.KILLED, -9, "", self.now)
        assert self.core.idle


TestNodes = PlansAndFailures.TestCase
TestNodes.settings = settings(max_examples=100, stateful_step_count=30)


def test_what_a_late_watcher_cannot_be_told_any_more_is_said() -> None:
    core = NodeReconciler(RETRIES)
    stays = Node(NodeType.PS, 0)
    core.merge(ScalePlan(launch_nodes=[stays]), 0.0)
    first = core.number
    for number in range(5000):
        node = Node(NodeType.WORKER, number)
        core.merge(ScalePlan(launch_nodes=[node]), 0.0)
        core.merge(ScalePlan(remove_nodes=[node]), 0.0)
    late, early = core.changes(first), core.changes(core.number - 1)
    assert (late.whole, early.whole) == (True, False)
    assert late.nodes[0].node == stays
    assert len(early.nodes) == 1
