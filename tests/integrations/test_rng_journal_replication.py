"""Which rank tells which what was noted within a step. What comes of it is in `tests/elastic/test_replaced.py`."""

from __future__ import annotations

from hypothesis import given, strategies as st

from dlrover_hooks.elastic.rng_journal_replication import Peers, paired

node_of_each = st.lists(st.integers(1, 4), min_size=1, max_size=12)


@given(node_of_each)
def test_each_rank_tells_one_of_another_node(nodes: list[int]) -> None:
    """And what is sent is what is awaited: nobody waits in vain."""
    peers = [paired(nodes, rank) for rank in range(len(nodes))]
    if len(set(nodes)) == 1:
        assert peers == [None] * len(nodes)
        return
    sent, awaited = set[tuple[int, int]](), set[tuple[int, int]]()
    for rank, one in enumerate(peers):
        assert one is not None
        assert nodes[one.hears] != nodes[rank]
        sent.add((rank, one.hears))
        awaited |= {(other, rank) for other in one.tell}
    assert sent == awaited


def test_the_next_node_shares_it_out() -> None:
    """Three ranks tell two, which tell the first ones of the three."""
    assert [paired([7, 7, 7, 9, 9], rank) for rank in range(5)] == [
        Peers(3, (3,)),
        Peers(4, (4,)),
        Peers(3, ()),
        Peers(0, (0, 2)),
        Peers(1, (1,)),
    ]
