"""Addresses of master and node: which node serves the master, its address, and how other nodes reach this one."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from urllib.parse import quote, urlsplit

import msgspec
import psutil

from dlrover_hooks.errors import LaunchError, UsageError
from dlrover_hooks.host.own_address import towards

PORT = 8780
"""The master's own default."""
ETCD_PORT = 2379
"""etcd's own default."""


_ELSEWHERE = "192.0.2.1"
"""An address that no machine has (RFC 5737): the route to it starts at this machine's external address."""


class Endpoint(msgspec.Struct, frozen=True):
    """`external`: a master runs there already (it was given as a URL)."""

    host: str
    port: int
    scheme: str = "http"
    external: bool = False
    others: tuple[str, ...] = ()
    """URLs of the other masters, if there are several."""

    @property
    def url(self) -> str:
        """The master's address for a client; of several masters all addresses."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return ",".join((f"{self.scheme}://{host}:{self.port}", *self.others))

    @property
    def local(self) -> bool:
        """No other machine can reach it."""
        if self.host == "localhost":
            return True
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return False


def endpoint(text: str) -> Endpoint:
    """Parses `HOST`, `HOST:PORT`, `[V6]:PORT`, a URL, or several URLs separated by commas. Raises UsageError."""
    if "," in text:
        every = [endpoint(one.strip()) for one in text.split(",")]
        if not all(one.external for one in every):
            raise UsageError(
                f"{text!r} names several masters, not all by URL",
                hint="give each as http://HOST:PORT: no launcher serves one of several masters",
            )
        return msgspec.structs.replace(every[0], others=tuple(one.url for one in every[1:]))
    external = "://" in text
    with contextlib.suppress(ValueError):
        parts = urlsplit(text if external else f"http://{text}")
        if parts.hostname and parts.scheme in ("http", "https") and not parts.path.strip("/"):
            return Endpoint(parts.hostname, PORT if parts.port is None else parts.port, parts.scheme, external)
    raise UsageError(
        f"{text!r} is no address of a master",
        hint=f"such as --rdzv-endpoint node-a:{PORT} (the first node serves it), or http://HOST:{PORT} for one "
        "that runs already",
    )


def etcd_journal(text: str, job: str) -> tuple[str, Endpoint]:
    """The URL of the job's journal in the etcd at `text`, and the first of its members.

    `text` is `HOST[:PORT]` of each member, separated by commas, with `etcds://` before them for TLS.

    Raises UsageError.
    """
    scheme, _, hosts = text.rpartition("://")
    with contextlib.suppress(ValueError):
        first = urlsplit(f"//{hosts.split(',')[0].strip()}")
        if first.hostname and scheme in ("", "etcd", "etcds") and not set("/@?") & set(hosts):
            url = f"{scheme or 'etcd'}://{hosts.replace(' ', '')}/{quote(job, safe='')}"
            return url, Endpoint(first.hostname, ETCD_PORT if first.port is None else first.port)
    raise UsageError(
        f"{text!r} is no address of etcd",
        hint=f"such as --rdzv-endpoint etcd-a:{ETCD_PORT},etcd-b:{ETCD_PORT}; the journal has the name of the job, and "
        "an etcd with users needs masters that are started by themselves",
    )


def serve(where: Endpoint, node_rank: int | None) -> socket.socket | None:
    """The listening socket, if this node serves the master; None if another process does.

    Node rank 0 serves it; without a rank, the machine that has the address. Of several launchers on that machine, the
    first one serves it.

    Raises:
        LaunchError: it should be served here and cannot be.
    """
    if where.external or (node_rank is not None and node_rank != 0):
        return None
    address = _here(where.host)
    if address is None and node_rank is None:
        return None
    if address is not None and not where.local and ipaddress.ip_address(address).is_loopback:
        address = None  # Debian maps a machine's own name to 127.0.1.1 locally, and to its external address elsewhere
    listener = socket.socket(socket.AF_INET6 if address and ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address or "0.0.0.0", where.port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise LaunchError(
            f"the master cannot be served at {where.host}:{where.port}: {error.strerror}",
            hint="give --rdzv-endpoint another port",
        ) from error
    return listener


def _here(host: str) -> str | None:
    """The address of this machine that `host` names; None if it belongs to another machine."""
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    with contextlib.suppress(OSError):
        for *_, found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            text = str(found[0])
            if text in own or ipaddress.ip_address(text.partition("%")[0]).is_loopback:
                return text
    return None


def url_of(listener: socket.socket) -> str:
    """The URL at which processes of this machine reach the master that listens on `listener`."""
    host, port = listener.getsockname()[:2]
    return Endpoint("127.0.0.1" if host == "0.0.0.0" else host, port).url


def own_host(master: Endpoint) -> str:
    """This machine's address on the route to the master, at which other nodes reach it.

    Raises:
        UsageError: there is no route.
    """
    try:
        own = towards(master.host, master.port)
        if not master.local and ipaddress.ip_address(own).is_loopback:  # a machine's own name may be 127.0.1.1 there
            with contextlib.suppress(OSError):
                return towards(_ELSEWHERE, master.port)
        return own
    except OSError as error:
        raise UsageError(
            f"the master's host {master.host!r} cannot be reached from here: {error.strerror or error}",
            hint="check --rdzv-endpoint; --local-addr says how other nodes reach this one",
        ) from error
