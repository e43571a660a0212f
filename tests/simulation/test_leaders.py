"""Several masters on a journal in etcd, in virtual time: leaders and etcd fail, nothing is lost or done twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from dlrover_hooks.errors import JournalFailed
from dlrover_hooks.master.core import dispatch
from dlrover_hooks.master.journal import etcd_gateway
from dlrover_hooks.master.journal.etcd_gateway import EtcdAway, EtcdRefused
from dlrover_hooks.master.journal.etcd_journal import EtcdJournal
from dlrover_hooks.master.journal.etcd_leadership import EtcdLeadership
from dlrover_hooks.master.journal.journal_protocol import LeadershipLost
from tests.deep import deep
from tests.simulation.leaders import simulate_masters

Patch = pytest.MonkeyPatch
FAULTS = {
    "cut", "full", "kill leader", "kill master", "late write", "lossy", "member", "slow", "stop leader"
}  # fmt: skip
SEEDS, AT_ONCE, SOON = 100, 10, 1


@pytest.mark.parametrize("first", [*range(1, SEEDS, AT_ONCE)[:SOON], *map(deep, range(1, SEEDS, AT_ONCE)[SOON:])])
def test_takeovers_lose_nothing_and_repeat_nothing(first: int) -> None:
    """Twenty seeds have about a hundred takeovers."""
    happened: Counter[str] = Counter()
    for seed in range(first, first + AT_ONCE):
        result = simulate_masters(seed)
        assert result.broken is None, result.report
        happened.update(result.faults)
    assert happened["takeover"] > 3 * AT_ONCE
    assert {f"masters: {kind}" for kind in FAULTS} <= happened.keys()


def test_a_seed_replays() -> None:
    assert [simulate_masters(seed) for seed in (3, 4)] == [simulate_masters(seed) for seed in (3, 4)]


# ---- broken on purpose


def lead_too_long(patch: Patch) -> None:
    """A leader believes in its lease longer than etcd does."""
    patch.setattr(EtcdLeadership, "_margin", lambda self: 3.0 * self._ttl_s)


def write_without_the_epoch(patch: Patch) -> None:
    patch.setattr(
        EtcdJournal,
        "_fenced",
        lambda self, operations: self._insist(lambda: self._etcd.transaction([], operations)),
    )


def take_silence_for_a_refusal(patch: Patch) -> None:
    """A refusal that follows an attempt without an answer is passed on as "nothing was changed"."""

    def insist(self: Any, work: Callable[[], None]) -> None:
        while self._leadership.holds():
            try:
                return work()
            except EtcdAway:
                self._leadership.pause(0.05)
            except EtcdRefused as error:
                raise JournalFailed("refused") from error
        raise self._lost("no answer")

    patch.setattr(EtcdJournal, "_insist", insist)


def forget_the_member_before(patch: Patch) -> None:
    """The same among the members of etcd."""
    patch.setattr(etcd_gateway, "_unsent", lambda error: True)


def end_without_leadership(patch: Patch) -> None:
    """A leader that learns from the journal that it leads no longer ends its process."""
    patch.setattr(EtcdJournal, "_lost", lambda self, why: LeadershipLost(why))


def forget_requests(patch: Patch) -> None:
    patch.setattr(dispatch, "repeated", lambda *args: None)


BROKEN: dict[Callable[[Patch], None], int] = {
    lead_too_long: 1,
    write_without_the_epoch: 1,
    take_silence_for_a_refusal: 17,
    forget_the_member_before: 17,
    end_without_leadership: 1,
    forget_requests: 1,
}
"""With the seed to look at first."""


@pytest.mark.parametrize("mutant", BROKEN, ids=lambda mutant: mutant.__name__)
def test_a_broken_leader_is_noticed(mutant: Callable[[Patch], None]) -> None:
    for seed in (BROKEN[mutant], *range(1, SEEDS)):
        with pytest.MonkeyPatch.context() as patch:
            mutant(patch)
            result = simulate_masters(seed)
        if result.broken is not None:
            assert result.report.endswith(f"make simulate-masters SEEDS={seed}:{seed}")
            return
    raise AssertionError(f"{mutant.__name__}: not noticed")
