"""Which of several masters is asked next."""

from __future__ import annotations

from dlrover_hooks.client.master_addresses import MasterAddresses

A, B, C = "http://a:1", "http://b:1", "http://c:1"


def test_the_leader_that_a_standby_names_is_asked_next() -> None:
    """Also one that refused a connection before: it may have started since."""
    masters = MasterAddresses(f"{A},{B}")
    assert masters.failed(A)
    assert masters.current == B
    assert masters.failed(B, A)
    assert masters.current == A


def test_a_leader_that_was_silent_is_not_asked_again_soon() -> None:
    """A stopped process answers nobody, and its standby learns of it only when its lease ends."""
    masters = MasterAddresses(f"{A},{B}")
    assert masters.failed(A, silent=True)
    assert not masters.failed(B, A)
    assert masters.current == B


def test_a_leader_outside_the_list_is_learned() -> None:
    masters = MasterAddresses(f"{A},{B}")
    assert masters.failed(A, C)
    assert masters.current == C
    assert masters.failed(C)
    assert masters.current == A


def test_what_another_thread_has_learned_is_kept() -> None:
    masters = MasterAddresses(f"{A},{B}")
    masters.failed(A)
    assert not masters.failed(A)
    assert masters.current == B
