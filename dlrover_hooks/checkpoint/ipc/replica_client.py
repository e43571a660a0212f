"""A trainer's requests to its keeper about replicas: take part, fetch an image. Training thread; no torch."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec

from dlrover_hooks.checkpoint.ipc import keeper_messages
from dlrover_hooks.checkpoint.ipc.keeper_client import KeeperClient
from dlrover_hooks.errors import Corrupt, KeeperAway
from dlrover_hooks.host.own_address import towards
from dlrover_hooks.protocol import Generation, KeeperAddress, Located, Replication

FETCH_S = 600.0
"""Timeout of an image from another node."""
Locate = Callable[[Generation, int], Located]


def host_towards(master: str) -> str:
    """This machine's address as the first master at that URL sees it, if there is no proxy between. No packet is sent.

    Raises:
        KeeperAway: there is no route to the master.
    """
    url = urlsplit(master.partition(",")[0])
    try:
        return towards(url.hostname, url.port or 80)
    except OSError as error:
        raise KeeperAway(
            f"no address of this node towards {master} is known: {error.strerror or error}",
            hint="DLROVER_HOOKS_REPLICAS=0 does without replication",
        ) from error


class Neighbours:
    """`locate` asks the master which nodes hold an image. `order`: the latest request, for a restarted keeper."""

    def __init__(self, line: KeeperClient, node: str, locate: Locate) -> None:
        self.order: keeper_messages.Replicate | None = None
        self._line, self._node, self._locate = line, node, locate

    def listen(self, host: str, mb_per_s: int = 0) -> KeeperAddress:
        """Have the keeper listen on `host`; returns its address for other nodes. No peer is admitted before `follow`.

        Raises:
            KeeperAway: it cannot, or there is no keeper.
        """
        order = keeper_messages.Replicate(node=self._node, host=host, mb_per_s=mb_per_s)
        self.order = msgspec.structs.replace(order, port=self._tell(order).port)
        return KeeperAddress(self._node, host, self.order.port)

    def follow(self, replication: Replication) -> None:
        """Admit peers that have the secret, and send this node's images where the master directs. After `listen`.

        Raises:
            KeeperAway: there is no keeper, or a new one that cannot listen where the old one did.
        """
        assert self.order is not None
        before = self.order
        self.order = msgspec.structs.replace(before, secret=replication.secret, to=replication.to)
        if self.order != before:
            self._tell(self.order)

    def fetch(self, generation: Generation, rank: int, world_size: int) -> None:
        """Copy `rank`'s image of `generation` into this node's memory; afterwards the keeper opens it like its own.

        Raises:
            Corrupt: no keeper of the round provided a complete copy; gives the reason of each.
            KeeperAway: this node's keeper is gone.
            HooksError: the master did not return the holders.
        """
        found = self._locate(generation, rank)
        which = {"generation": generation, "rank": rank, "world_size": world_size}
        order = keeper_messages.Fetch(node=self._node, **which, at=found.at, secret=found.secret)
        reply, _ = self._line.ask(lambda ref: msgspec.structs.replace(order, ref=ref), timeout_s=FETCH_S)
        if isinstance(reply, keeper_messages.Refused):
            raise Corrupt(reply.reason, hint=reply.hint)

    def _tell(self, order: keeper_messages.Replicate) -> keeper_messages.Replicating:
        reply, _ = self._line.ask(lambda ref: msgspec.structs.replace(order, ref=ref))
        if isinstance(reply, keeper_messages.Refused):
            raise KeeperAway(reply.reason, hint=reply.hint)
        return reply
