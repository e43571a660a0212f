"""Where the master is, and which node serves it."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from dlrover_hooks.errors import UsageError
from dlrover_hooks.launcher.master_endpoint import Endpoint, endpoint, etcd_journal, own_host, serve, url_of


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("node-a", Endpoint("node-a", 8780)),
        ("10.0.0.1:29500", Endpoint("10.0.0.1", 29500)),
        ("[fe80::1]:80", Endpoint("fe80::1", 80)),
        ("http://node-a", Endpoint("node-a", 8780, external=True)),
        ("https://node-a:443/", Endpoint("node-a", 443, "https", external=True)),
    ],
)
def test_hosts_and_urls(text: str, found: Endpoint) -> None:
    assert endpoint(text) == found


def test_a_url_is_what_a_client_uses() -> None:
    assert endpoint("node-a:1").url == "http://node-a:1"
    assert endpoint("[::1]:1").url == "http://[::1]:1"


@pytest.mark.parametrize("text", ["", "ftp://a", "a:b", "http://a/path", ":80"])
def test_others_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no address of a master"):
        endpoint(text)


@pytest.mark.parametrize(
    ("text", "url", "member"),
    [
        ("etcd-a", "etcd://etcd-a/mine", Endpoint("etcd-a", 2379)),
        ("10.0.0.1:1, 10.0.0.2:2", "etcd://10.0.0.1:1,10.0.0.2:2/mine", Endpoint("10.0.0.1", 1)),
        ("etcds://etcd-a,etcd-b", "etcds://etcd-a,etcd-b/mine", Endpoint("etcd-a", 2379)),
    ],
)
def test_the_journal_of_a_job_in_etcd(text: str, url: str, member: Endpoint) -> None:
    assert etcd_journal(text, "mine") == (url, member)


def test_the_journal_of_a_job_with_an_odd_name() -> None:
    assert etcd_journal("a", "team/x?y")[0] == "etcd://a/team%2Fx%3Fy"


@pytest.mark.parametrize("text", ["", "http://a:2379", "a:b", "etcd://a/name", "etcd://user@a", ":80"])
def test_others_are_no_etcd(text: str) -> None:
    with pytest.raises(UsageError, match="no address of etcd"):
        etcd_journal(text, "mine")


def test_only_loopback_is_local() -> None:
    assert [endpoint(text).local for text in ("localhost", "127.0.0.2", "[::1]:1", "10.0.0.1", "node-a")] == [
        True, True, True, False, False,
    ]  # fmt: skip


def test_the_machine_of_the_address_serves_and_of_two_launchers_the_first() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = endpoint(f"127.0.0.1:{port}")
    first = serve(where, None)
    assert first is not None
    with first:
        assert url_of(first) == where.url
        assert serve(where, None) is None
        assert serve(where, 0) is None
    assert serve(where, 1) is None
    assert serve(endpoint(f"http://127.0.0.1:{port}"), 0) is None
    assert serve(endpoint(f"192.0.2.1:{port}"), None) is None, "another machine's"


def test_rank_0_serves_under_a_name_that_is_not_its_own() -> None:
    """A service of Kubernetes, an address behind NAT: it listens on all of its own addresses."""
    listener = serve(Endpoint("192.0.2.1", 0), 0)
    assert listener is not None
    with listener:
        assert listener.getsockname()[0] == "0.0.0.0"
        assert url_of(listener).startswith("http://127.0.0.1:")


def test_this_host_is_the_address_on_the_way_to_the_master() -> None:
    assert own_host(endpoint("127.0.0.1:80")) == "127.0.0.1"
    with pytest.raises(UsageError, match="cannot be reached"):
        own_host(endpoint("no-such-host.invalid"))


def test_a_name_that_is_127_0_1_1_on_its_own_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's /etc/hosts: that machine serves the master all the same, and where the other nodes look for it."""
    lookup, asked = socket.getaddrinfo, list[str]()

    def debian(host: str, *rest: Any, **more: Any) -> Any:
        asked.append(host)
        known = {"node-a": "127.0.1.1", "192.0.2.1": "127.0.0.1"}  # no other way is there in a sandbox
        return lookup(known.get(host, host), *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", debian)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = endpoint(f"node-a:{probe.getsockname()[1]}")
    listener = serve(where, None)
    assert listener is not None
    with listener:
        assert listener.getsockname()[0] == "0.0.0.0"
    own_host(where)
    assert asked[-1] == "192.0.2.1", "another node could not reach 127.0.0.1"
