"""The simulated etcd answers as the real one does: one suite for both, through the gateway of the product."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from dlrover_hooks.master.journal.etcd_gateway import EtcdGateway, EtcdRefused, created_at, delete, put
from tests.e2e.etcd_process import EtcdProcess
from tests.simulation.etcd import EtcdStore
from tests.waiting import until


class Simulated(EtcdGateway):
    """A gateway without a network."""

    def __init__(self) -> None:
        super().__init__(["simulated"])
        self._store = EtcdStore(time.monotonic)

    def _post(self, member: str, path: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        return self._store.answer(path, body)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    etcd = EtcdProcess(tmp_path_factory.mktemp("etcd"))
    yield etcd
    etcd.close()


@pytest.fixture(params=["real", "simulated"])
def etcd(request: pytest.FixtureRequest) -> EtcdGateway:
    if request.param == "simulated":
        return Simulated()
    return EtcdGateway([request.getfixturevalue("process").members])


@pytest.fixture
def at() -> bytes:
    """A prefix of this test's own."""
    return uuid.uuid4().hex.encode() + b"/"


def test_a_range_is_in_order_and_ends_before_its_end(etcd: EtcdGateway, at: bytes) -> None:
    assert etcd.transaction([], [put(at + b"%03d" % number, b"%d" % number) for number in (2, 1, 3)])
    found = etcd.range(at + b"001", at + b"003")
    assert [(one.key, one.value) for one in found] == [(at + b"001", b"1"), (at + b"002", b"2")]
    assert [one.value for one in etcd.range(at, at + b"9", keys_only=True)] == [b"", b"", b""]
    assert [one.key for one in etcd.range(at, at + b"9", limit=2)] == [at + b"001", at + b"002"]


def test_a_range_of_several_pages_is_whole(etcd: EtcdGateway, at: bytes) -> None:
    for first in range(0, 150, 50):
        etcd.transaction([], [put(at + b"%03d" % number, b"") for number in range(first, first + 50)])
    assert len(etcd.range(at, at + b"9")) == 150


def test_a_key_keeps_its_creation_until_it_is_deleted(etcd: EtcdGateway, at: bytes) -> None:
    assert etcd.get(at) is None
    assert etcd.transaction([created_at(at, 0)], [put(at, b"first")])
    first = etcd.get(at)
    assert first is not None
    assert not etcd.transaction([created_at(at, 0)], [put(at, b"not stored")])
    assert etcd.transaction([created_at(at, first.created)], [put(at, b"second")])
    second = etcd.get(at)
    assert second is not None
    assert (second.value, second.created) == (b"second", first.created)
    assert etcd.transaction([], [delete(at, at + b"\0")])
    assert not etcd.transaction([created_at(at, first.created)], [put(at, b"not stored")])
    assert etcd.transaction([created_at(at, 0)], [put(at, b"third")])
    third = etcd.get(at)
    assert third is not None
    assert third.created > first.created


def test_a_lease_ends_with_its_keys(etcd: EtcdGateway, at: bytes) -> None:
    lease = etcd.grant(60)
    etcd.transaction([], [put(at, b"held", lease)])
    assert etcd.keep_alive(lease) == 60
    etcd.revoke(lease)
    assert etcd.get(at) is None
    assert etcd.keep_alive(lease) == 0
    with pytest.raises(EtcdRefused):
        etcd.revoke(lease)
    with pytest.raises(EtcdRefused):
        etcd.transaction([], [put(at, b"held", lease)])


def test_a_lease_that_is_not_extended_expires(etcd: EtcdGateway, at: bytes) -> None:
    etcd.transaction([], [put(at, b"held", etcd.grant(2))])
    assert etcd.get(at) is not None
    until(lambda: etcd.get(at) is None, "the end of the lease")
