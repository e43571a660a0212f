"""A TCP connection between two keepers: bounded messages, timeouts everywhere, mutual authentication. No torch.

Nothing is encrypted: the secret is never sent, but the state can be read on the network (see "Security" in the manual).
"""

from __future__ import annotations

import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from dlrover_hooks.checkpoint.replication import replica_protocol as r
from dlrover_hooks.errors import KeeperAway
from dlrover_hooks.protocol import KeeperAddress, Secret

MESSAGE_S = 20.0
"""Timeout of one message. If the other side has to hash an image first: see `VERIFY_S`."""
CHUNK_S = 30.0
"""Timeout of one 4 MiB chunk, rate limit included."""
VERIFY_S = 300.0
"""Timeout of a message that is sent after hashing a complete image, or after allocating memory for it."""
GREET_S = 5.0
"""Timeout of the authentication."""
AGAIN_S = 0.1
_decoder = msgspec.json.Decoder(r.Said)
_Word = TypeVar("_Word", bound=r.Word)


class NotAdmitted(KeeperAway):
    """The secrets of the two sides differ; they may agree a moment later."""


class Declined(KeeperAway):
    """The other side works, but refuses the request with a reason."""


class Channel:
    """One thread at a time. Every failure is a KeeperAway that names the other side, `who`."""

    def __init__(self, connection: socket.socket, who: str) -> None:
        self.who = who
        self.limit = r.STRANGER_BYTES
        self._socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, word: r.Word, within_s: float = MESSAGE_S) -> None:
        body = msgspec.json.encode(word)
        self.send_bytes(memoryview(struct.pack("<I", len(body)) + body), within_s)

    def send_bytes(self, view: memoryview, within_s: float = CHUNK_S) -> None:
        until = time.monotonic() + within_s
        try:
            while len(view):
                self._socket.settimeout(max(until - time.monotonic(), 0.001))
                view = view[self._socket.send(view) :]
        except OSError as error:
            raise self._away(error) from error

    def receive(self, *kinds: type[_Word], within_s: float = MESSAGE_S) -> _Word:
        """The next message, which must be one of `kinds`.

        Raises:
            KeeperAway: it is another one, a refusal, or it does not come in time.
        """
        until = time.monotonic() + within_s
        head = bytearray(4)
        self._fill(memoryview(head), until)
        (length,) = struct.unpack("<I", head)
        if length > self.limit:
            raise KeeperAway(f"{self.who} sends a message of {length} bytes; {self.limit} are allowed")
        body = bytearray(length)
        self._fill(memoryview(body), until)
        try:
            word = _decoder.decode(body)
        except msgspec.DecodeError as error:
            raise KeeperAway(f"{self.who} sends what cannot be read: {error}") from error
        if isinstance(word, kinds):
            return word
        if isinstance(word, r.Refuse):
            raise Declined(f"{self.who} refuses: {word.reason}")
        raise KeeperAway(f"{self.who} sends an unexpected {type(word).__name__}")

    def fill(self, view: memoryview, within_s: float = CHUNK_S) -> None:
        """Receive raw bytes that follow a message announcing them."""
        self._fill(view, time.monotonic() + within_s)

    def _fill(self, view: memoryview, until: float) -> None:
        try:
            while len(view):
                self._socket.settimeout(max(until - time.monotonic(), 0.001))
                count = self._socket.recv_into(view)
                if not count:
                    raise KeeperAway(f"{self.who} has closed the connection")
                view = view[count:]
        except OSError as error:
            raise self._away(error) from error

    def _away(self, error: OSError) -> KeeperAway:
        if isinstance(error, TimeoutError):
            return KeeperAway(f"{self.who} hangs: nothing passed within its deadline")
        return KeeperAway(f"the connection to {self.who} broke: {error.strerror or error}")

    def close(self) -> None:
        self._socket.close()


def call(to: KeeperAddress, secret: Secret, node: str, *, within_s: float) -> Channel:
    """An authenticated connection to the keeper at `to`. Retries for `within_s` while it is down or does not admit us.

    Raises:
        KeeperAway: there is no listener, or the secrets differ (NotAdmitted).
    """
    until = time.monotonic() + within_s
    while True:
        try:
            return _call(to, secret, node)
        except KeeperAway:
            if time.monotonic() >= until:
                raise
            time.sleep(AGAIN_S)


def _call(to: KeeperAddress, secret: Secret, node: str) -> Channel:
    who = f"the keeper of node {to.node} at {to.host}:{to.port}"
    try:
        channel = Channel(socket.create_connection((to.host, to.port), timeout=GREET_S), who)
    except (OSError, OverflowError, UnicodeError) as error:  # the latter two: invalid port, invalid host name
        raise KeeperAway(f"{who} cannot be reached: {getattr(error, 'strerror', None) or error}") from error
    try:
        knock = r.PeerHello(node, secrets.token_hex(16))
        channel.send(knock, GREET_S)
        challenge = channel.receive(r.Challenge, within_s=GREET_S)
        channel.send(r.AuthProof(r.mac(secret, "caller", knock, challenge)), GREET_S)
        proof = channel.receive(r.AuthProof, within_s=GREET_S)
    except KeeperAway as error:
        channel.close()
        raise NotAdmitted(error.message, hint="its node may not have begun this round yet") from error
    if challenge.node != to.node or not r.proves(secret, "keeper", knock, challenge, proof):
        channel.close()
        raise NotAdmitted(f"{who} does not know the secret of this run")
    channel.limit = r.MAX_BYTES
    return channel


def admit(
    connection: socket.socket, address: str, secret: Secret, node: str, proven: Callable[[], None]
) -> tuple[Channel, str]:
    """Authenticate a caller, and ourselves to it; returns the connection and the caller's node.

    `proven` is called once the caller has proven that it has the secret, and before it receives the answer.

    Raises:
        NotAdmitted: it does not have the secret. It received nothing but the node's name and a nonce.
    """
    channel, until = Channel(connection, f"a caller from {address}"), time.monotonic() + GREET_S
    knock = channel.receive(r.PeerHello, within_s=GREET_S)
    if not secret.key or knock.protocol != r.PROTOCOL:
        why = f"its protocol is {knock.protocol}" if secret.key else "this node has not begun its round"
        channel.send(r.Refuse(why), GREET_S)
        raise NotAdmitted(f"{channel.who} was not admitted: {why}")
    challenge = r.Challenge(node, secrets.token_hex(16))
    channel.send(challenge, GREET_S)
    proof = channel.receive(r.AuthProof, within_s=max(until - time.monotonic(), 0.1))
    if not r.proves(secret, "caller", knock, challenge, proof):
        channel.send(r.Refuse("that is not the secret of this run"), GREET_S)
        raise NotAdmitted(f"{channel.who} does not know the secret of this run")
    proven()
    channel.send(r.AuthProof(r.mac(secret, "keeper", knock, challenge)), GREET_S)
    channel.who, channel.limit = f"the keeper of node {knock.node} at {address}", r.MAX_BYTES
    return channel, knock.node
