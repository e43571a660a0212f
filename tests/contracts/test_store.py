"""The master's store does what torch's own stores do: one suite for `HashStore`, `TCPStore` and ours."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from dlrover_hooks import protocol as p
from dlrover_hooks.torchrun.round_store import MasterStore
from tests.e2e.master_process import LiveMaster
from tests.unit.master.test_kv import agent

SHORT = timedelta(seconds=0.3)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveMaster]:
    master = LiveMaster(tmp_path_factory.mktemp("master"))
    yield master
    master.close()


def ours(process: LiveMaster, job: str) -> Callable[[str], MasterStore]:
    """Agents a and b of that job sit in round 1; gives the store of one of them."""
    for name in ("a", "b"):
        process.client(f"{job}-{name}").call(agent(f"{job}-{name}", job=job))
    return lambda name: MasterStore(process.client(f"{job}-{name}"), job, 1)


@pytest.fixture(params=["hash", "tcp", "master", "master with a prefix"])
def store(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "hash":
        yield dist.HashStore()
    elif request.param == "tcp":
        yield dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    else:
        made = ours(request.getfixturevalue("process"), request.node.name)("a")
        yield dist.PrefixStore("prefix", made) if "prefix" in request.param else made


def test_one_key(store: Any) -> None:
    store.set("k", "v")
    assert store.get("k") == b"v"
    store.set("k", b"w")
    assert (store.get("k"), store.check(["k"]), store.check(["k", "other"])) == (b"w", True, False)
    assert (store.delete_key("k"), store.delete_key("k"), store.check(["k"])) == (True, False, False)


def test_numbers(store: Any) -> None:
    assert [store.add("n", amount) for amount in (2, 3, -7)] == [2, 5, -2]
    assert store.get("n") == b"-2"
    store.set("m", "41")
    assert store.add("m", 1) == 42


def test_compare_set(store: Any) -> None:
    assert store.compare_set("k", "expected", "new") == b"expected"
    assert not store.check(["k"])
    assert store.compare_set("k", "", "first") == b"first"
    assert store.compare_set("k", "other", "new") == b"first"
    assert store.compare_set("k", "first", "new") == b"new"
    assert store.get("k") == b"new"


def test_several_keys(store: Any) -> None:
    store.multi_set(["a", "b"], ["1", "2"])
    store.append("b", "3")
    store.append("c", "4")
    assert store.has_extended_api()
    assert store.multi_get(["b", "a", "c"]) == [b"23", b"1", b"4"]
    store.wait(["a", "b"])


def test_every_wait_ends(store: Any) -> None:
    with pytest.raises(dist.DistStoreError):
        store.wait(["never"], SHORT)
    store.set_timeout(SHORT)
    assert store.timeout == SHORT
    store.set("there", "")
    for ask in (lambda: store.get("never"), lambda: store.wait(["never"]), lambda: store.multi_get(["there", "never"])):
        with pytest.raises(dist.DistStoreError):
            ask()


def test_torchs_own_barrier(store: Any) -> None:
    """torchrun waits with it for the other agents at the end."""
    from torch.distributed.elastic.utils.store import barrier

    barrier(store, 1, "done", barrier_timeout=5)
    with pytest.raises(dist.DistStoreError):
        barrier(store, 2, "more", barrier_timeout=0.2)


# ---- ours -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(process: LiveMaster, request: pytest.FixtureRequest) -> tuple[MasterStore, MasterStore]:
    make = ours(process, request.node.name)
    return make("a"), make("b")


def test_keys_are_counted(pair: tuple[MasterStore, MasterStore]) -> None:
    one, other = pair
    one.set("k", "v")
    other.add("n", 1)
    assert (one.num_keys(), sorted(other.list_keys())) == (2, ["k", "n"])
    assert one.clone().get("n") == b"1"
    prefixed = dist.PrefixStore("p", one)
    prefixed.set("k", "w")
    assert (prefixed.num_keys(), prefixed.delete_key("k")) == (3, True)


def test_a_waiter_is_woken_by_the_last_key(pair: tuple[MasterStore, MasterStore]) -> None:
    one, other = pair
    found: list[list[bytes]] = []
    thread = threading.Thread(target=lambda: found.append(one.multi_get(["y", "x"])))
    thread.start()
    for key in ("x", "y"):
        other.set(key, key)
    thread.join(10)
    assert found == [[b"y", b"x"]]


def test_a_wait_in_a_round_that_lost_a_member_ends_at_once(pair: tuple[MasterStore, MasterStore]) -> None:
    """Nobody waits five minutes at the end of a job for a node that is gone."""
    one, other = pair
    found: list[str] = []

    def wait() -> None:
        try:
            one.wait(["never"], timedelta(seconds=50))
        except dist.DistStoreError as error:
            found.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    other._client.call(p.Leave(other._job, other._client.incarnation, p.Departure.FAILED))
    thread.join(10)
    assert len(found) == 1
    assert "lost a member" in found[0]


def test_keys_outlive_the_master(process: LiveMaster, pair: tuple[MasterStore, MasterStore]) -> None:
    """kill -9 and a new life: what was set is there, what is waited for comes, nothing is added twice."""
    one, other = pair
    one.add("n", 1)
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(one.get("late")))
    thread.start()
    process.kill()
    process.restart()
    assert other.add("n", 1) == 2
    other.set("late", "came")
    thread.join(10)
    assert found == [b"came"]


def test_a_process_group_is_built_through_it(pair: tuple[MasterStore, MasterStore]) -> None:
    """C++ reaches every verb it needs: two ranks of gloo in one process."""
    import torch

    found: list[float] = []

    def rank(number: int) -> None:
        group = dist.ProcessGroupGloo(dist.PrefixStore("pg", pair[number]), number, 2, timedelta(seconds=20))
        tensor = torch.ones(1)
        group.allreduce([tensor]).wait()  # pyright: ignore[reportAttributeAccessIssue]
        found.append(tensor.item())

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [2.0, 2.0]
