from __future__ import annotations

import math

from hypothesis import given, strategies as st

from dlrover_hooks.scalers.core_assignment import CoreAssignment


def test_whole_cores_are_not_shared_while_there_are_enough() -> None:
    cores = CoreAssignment(range(4))
    one, two, half = cores.assign("a", 1.0), cores.assign("b", 2.0), cores.assign("c", 0.5)
    assert (len(one), len(two), len(half), len(one | two | half)) == (1, 2, 1, 4)
    assert max(cores.load().values()) == 1.0


def test_fractions_share_a_core_only_when_all_are_used_and_the_least_used_first() -> None:
    cores = CoreAssignment([3, 5])
    assert cores.assign("a", 0.75) | cores.assign("b", 0.25) == {3, 5}
    assert cores.assign("c", 0.5) == {5}
    cores.free("a")
    assert cores.assign("d", 0.5) == {3}


def test_no_limit_and_more_than_there_are_is_every_core() -> None:
    cores = CoreAssignment(range(2))
    assert cores.assign("a", 0.0) == cores.assign("b", 64.0) == {0, 1}
    assert cores.load() == {0: 32.0, 1: 32.0}


def test_a_node_that_changes_leaves_what_it_had() -> None:
    cores = CoreAssignment(range(3))
    cores.assign("a", 2.0)
    assert len(cores.assign("a", 1.0)) == 1
    assert sorted(cores.load().values()) == [0.0, 0.0, 1.0]


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 10)), max_size=30), st.integers(1, 6))
def test_what_is_promised_is_what_the_nodes_have(changes: list[tuple[int, float]], count: int) -> None:
    cores, asked = CoreAssignment(range(count)), dict[str, float]()
    for number, cpu in changes:
        chosen = cores.assign(str(number), cpu)
        asked[str(number)] = cpu
        assert len(chosen) == (min(math.ceil(cpu), count) or count)
        assert math.isclose(sum(cores.load().values()), sum(asked.values()), abs_tol=1e-9)
    for name in asked:
        cores.free(name)
    assert set(cores.load().values()) == {0.0}
