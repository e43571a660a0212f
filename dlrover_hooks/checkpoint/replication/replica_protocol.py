"""The messages between two nodes' keepers, and the decisions about them. Pure: no I/O, no torch.

    caller: Knock    keeper: Challenge    caller: AuthProof    keeper: AuthProof    now both are authenticated
    giver: Offer (the keeper's reply to Get, or sent by the caller without a request)
    taker: Want    giver: ChunkFollows and the chunk's bytes                        for each chunk that the taker lacks
    taker: TransferComplete, ChunkDamaged or Refuse

The taker requests one chunk at a time: no more is ever in flight, and chunks that it has already are never sent.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

import msgspec

from dlrover_hooks.protocol import Count, Generation, Rank, Secret, Size, World

PROTOCOL = 1
MAX_BYTES = 8 << 20
"""Limit of one message. An Offer of 1 TB needs 5 MB."""
STRANGER_BYTES = 1 << 10
"""Limit of one message before authentication."""


class Word(msgspec.Struct, frozen=True, tag=True):
    """A message from one keeper to another."""


class PeerHello(Word, frozen=True):
    """`nonce`: hex, fresh. `node`: the caller's node."""

    node: str
    nonce: str
    protocol: int = PROTOCOL


class Challenge(Word, frozen=True):
    node: str
    nonce: str


class AuthProof(Word, frozen=True):
    """HMAC-SHA256 of role, PeerHello and Challenge under the run's secret, hex."""

    mac: str


class Get(Word, frozen=True):
    """Request an Offer of `rank`'s image of `generation`."""

    generation: Generation
    rank: Rank
    world_size: World


class Offer(Word, frozen=True):
    """The image of `rank`, saved on node `home` by local rank `seat`. `chunks`: xxh3-64 digests of its 4 MiB chunks."""

    home: str
    seat: Rank
    generation: Generation
    rank: Rank
    world_size: World
    image_bytes: Size
    chunks: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.generation}, rank {self.rank}, of node {self.home}"


class Want(Word, frozen=True):
    chunk: Count


class ChunkFollows(Word, frozen=True):
    """The bytes of the requested chunk follow."""


class TransferComplete(Word, frozen=True):
    """All chunks have arrived, and the image was hashed again."""


class ChunkDamaged(Word, frozen=True):
    """This chunk did not match its digest on arrival."""

    chunk: Count


class Refuse(Word, frozen=True):
    reason: str


Said = PeerHello | Challenge | AuthProof | Get | Offer | Want | ChunkFollows | TransferComplete | ChunkDamaged | Refuse


def mac(secret: Secret, role: str, knock: PeerHello, challenge: Challenge) -> str:
    """Proof that the side in `role` has `secret`. Both nonces are included, so it is valid for one connection only."""
    said = msgspec.json.encode((role, knock, challenge))
    return hmac.new(secret.key.encode(), said, hashlib.sha256).hexdigest()


def proves(secret: Secret, role: str, knock: PeerHello, challenge: Challenge, proof: AuthProof) -> bool:
    """Compares in constant time. Always False without a secret."""
    return bool(secret.key) and hmac.compare_digest(mac(secret, role, knock, challenge), proof.mac)


def sources(wanted: Sequence[str], inside: Sequence[str], beside: Sequence[str]) -> list[str]:
    """Source of each chunk: `inside` (in the slot already), `beside` (in the other slot), or `sent`."""

    def at(have: Sequence[str], index: int) -> bool:
        return index < len(have) and have[index] == wanted[index]

    return [
        "inside" if at(inside, index) else "beside" if at(beside, index) else "sent" for index in range(len(wanted))
    ]


class TokenBucket:
    """A token bucket of `rate` bytes per second (0: no limit) that holds one chunk. `now`: monotonic seconds."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._paid_until = 0.0

    def wait_s(self, nbytes: int, now: float) -> float:
        """Seconds to wait before sending these `nbytes`, which count as sent."""
        if not self.rate:
            return 0.0
        start = max(self._paid_until, now)
        self._paid_until = start + nbytes / self.rate
        return start - now
