"""Which of several candidates may take a Lease, and when."""

from __future__ import annotations

from typing import Any

from hypothesis import given, strategies as st

from dlrover_hooks.master.journal.lease_leadership import LeaseElection

TTL_S = 10


class Server:
    """The Lease as the API server has it: a write of an older version is refused."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0

    def write(self, seen: dict[str, Any] | None, spec: dict[str, Any]) -> bool:
        if (seen and seen["metadata"]["resourceVersion"]) != (self.lease and self.lease["metadata"]["resourceVersion"]):
            return False
        self.version += 1
        self.lease = {"metadata": {"resourceVersion": str(self.version)}, "spec": spec}
        return True


def claims(server: Server, one: LeaseElection, now: float) -> bool:
    seen = server.lease
    spec = one.claim(seen, now, f"at {now}")
    return spec is not None and server.write(seen, spec)


def test_the_first_candidate_leads_and_goes_on_to() -> None:
    server, first, second = Server(), LeaseElection("a", TTL_S), LeaseElection("b", TTL_S)
    assert claims(server, first, 0.0)
    assert not claims(server, second, 1.0)
    for now in (5.0, 14.0, 23.0):
        assert claims(server, first, now)
        assert not claims(server, second, now + 8.0)
    assert server.lease is not None
    assert server.lease["spec"] == {
        "holderIdentity": "a", "leaseDurationSeconds": TTL_S, "acquireTime": "at 0.0", "renewTime": "at 23.0",
        "leaseTransitions": 1,
    }  # fmt: skip


def test_a_lease_that_is_not_renewed_is_taken_after_its_duration_by_the_clock_of_the_candidate() -> None:
    server, first, second = Server(), LeaseElection("a", TTL_S), LeaseElection("b", 3)
    assert claims(server, first, 0.0)
    assert not claims(server, second, 1000.0), "its clock may be another one"
    assert not claims(server, second, 1009.9)
    assert claims(server, second, 1010.0)
    assert not claims(server, first, 11.0)
    assert server.lease is not None
    assert server.lease["spec"]["leaseTransitions"] == 2


def test_of_two_candidates_at_a_time_one_is_refused() -> None:
    server = Server()
    for one in ("a", "b", "c"):
        assert claims(server, LeaseElection(one, TTL_S), 0.0) == (one == "a")
    seen = server.lease
    one, other = (LeaseElection(name, TTL_S) for name in ("b", "c"))
    for candidate in (one, other):
        assert candidate.claim(seen, 0.0, "") is None
    specs = [candidate.claim(seen, 10.0, "") for candidate in (one, other)]
    assert [spec is not None and server.write(seen, spec) for spec in specs] == [True, False]


def test_a_lease_that_was_given_up_is_free_at_once() -> None:
    server = Server()
    assert claims(server, LeaseElection("a", TTL_S), 0.0)
    assert server.lease is not None
    server.write(server.lease, server.lease["spec"] | {"holderIdentity": "", "leaseDurationSeconds": 1})
    assert claims(server, LeaseElection("b", TTL_S), 0.1)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.0, 12.0)), max_size=60))
def test_at_most_one_leads_at_a_time(turns: list[tuple[str, float]]) -> None:
    """A leader counts its time from before its read; it stops at 0.9 of the duration, as `LeaseLeadership` does."""
    server, now = Server(), 0.0
    candidates = {name: LeaseElection(name, TTL_S) for name in "abc"}
    until = dict.fromkeys("abc", 0.0)
    for name, pause in turns:
        now += pause
        if claims(server, candidates[name], now):
            until[name] = now + 0.9 * TTL_S
        assert sum(now < end for end in until.values()) <= 1
