"""The parts of a cut: what is watched, what is leased, and how ranks' parts unite."""

from __future__ import annotations

from typing import Any

import pytest

from dlrover_hooks.data.session_datasets import SessionDatasets, united
from dlrover_hooks.errors import Corrupt
from dlrover_hooks.protocol.ranges import Ranges


def encoded(*pairs: tuple[int, int]) -> dict[str, str]:
    return {"": Ranges.of(pairs).encode()}


class Place:
    def __init__(self, **state: Any) -> None:
        self.state, self.told = state, list[str]()

    def mark(self) -> None:
        self.told.append("mark")

    def commit(self) -> None:
        self.told.append("commit")

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_all_datasets_mark_and_commit_together() -> None:
    cut, cursor, lease = SessionDatasets(), Place(cursor=4), Place(own=encoded((0, 4)))
    assert cut.parts() == {"data": {}}
    cut.watch("train", cursor)
    cut.lease("web", lease)
    cut.mark()
    cut.commit()
    assert cursor.told == lease.told == ["mark", "commit"]
    assert cut.parts() == {"data": {"train": {"cursor": 4}}, "leases": {"web": {"own": encoded((0, 4))}}}


def test_parts_of_all_ranks_unite() -> None:
    ranks = [{"web": {"own": encoded((8, 12)), "base": encoded((0, 8))}}, {"web": {"own": encoded((12, 16), (20, 24))}}]
    assert united(ranks) == {"web": encoded((0, 16), (20, 24))}
    assert united([]) == {}


def test_what_was_trained_twice_is_no_checkpoint() -> None:
    ranks = [{"web": {"own": encoded((0, 8))}}, {"web": {"own": encoded((7, 12))}}]
    with pytest.raises(Corrupt, match=r"'web'.*\[7, 12\) were trained twice"):
        united(ranks)


def test_damaged_ranges_name_the_dataset() -> None:
    with pytest.raises(Corrupt, match="'web'"):
        united([{"web": {"own": {"": "no ranges"}}}])
