"""What two nodes' keepers say to each other, and the decisions in it. Pure: no I/O, no torch (DL-91).

    caller: Knock    keeper: Challenge    caller: Proof    keeper: Proof      now each knows the other
    one of them: Offer (an answer to the caller's Get, or at its own will)
    the other, the taker: Want    giver: Here and the chunk's bytes           once for each chunk that the taker lacks
    taker: Whole, Damaged or Refuse

The taker asks for one chunk at a time: no more is ever in flight, and chunks that it has already are never sent.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

import msgspec

from dlrover_hooks.protocol import Generation, Secret

PROTOCOL = 1
MAX_BYTES = 8 << 20
"""Of one message; an Offer of 1 TB needs 5 MB."""
STRANGER_BYTES = 1 << 10
"""Of one message of somebody who has proved nothing yet."""


class Word(msgspec.Struct, frozen=True, tag=True):
    """Anything that one keeper says to another."""


class Knock(Word, frozen=True):
    """`nonce`: hex, fresh. The caller speaks for `node`."""

    node: str
    nonce: str
    protocol: int = PROTOCOL


class Challenge(Word, frozen=True):
    node: str
    nonce: str


class AuthProof(Word, frozen=True):
    """HMAC-SHA256 of role, Knock and Challenge under the run's secret, hex."""

    mac: str


class Get(Word, frozen=True):
    """Offer me `rank`'s image of `generation`."""

    generation: Generation
    rank: int
    world_size: int


class Offer(Word, frozen=True):
    """The image of `rank`, saved on node `home` in `seat`; `chunks` are the xxh3-64 digests of its 4 MiB pieces."""

    home: str
    seat: int
    generation: Generation
    rank: int
    world_size: int
    image_bytes: int
    chunks: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.generation}, rank {self.rank}, of node {self.home}"


class Want(Word, frozen=True):
    chunk: int


class ChunkFollows(Word, frozen=True):
    """The bytes of the wanted chunk follow."""


class TransferComplete(Word, frozen=True):
    """All chunks are there, and the whole was hashed again."""


class ChunkDamaged(Word, frozen=True):
    """This chunk did not match its digest when it arrived."""

    chunk: int


class Refuse(Word, frozen=True):
    reason: str


Said = Knock | Challenge | AuthProof | Get | Offer | Want | ChunkFollows | TransferComplete | ChunkDamaged | Refuse


def mac(secret: Secret, role: str, knock: Knock, challenge: Challenge) -> str:
    """What proves that the one in `role` knows `secret`. Both nonces are in it: it is good for one connection."""
    said = msgspec.json.encode((role, knock, challenge))
    return hmac.new(secret.key.encode(), said, hashlib.sha256).hexdigest()


def proves(secret: Secret, role: str, knock: Knock, challenge: Challenge, proof: AuthProof) -> bool:
    """In constant time. Nobody proves anything where there is no secret."""
    return bool(secret.key) and hmac.compare_digest(mac(secret, role, knock, challenge), proof.mac)


def sources(wanted: Sequence[str], inside: Sequence[str], beside: Sequence[str]) -> list[str]:
    """Where each chunk comes from: it lies `inside` the slot already, `beside` it in the other one, or is `sent`."""

    def at(have: Sequence[str], index: int) -> bool:
        return index < len(have) and have[index] == wanted[index]

    return [
        "inside" if at(inside, index) else "beside" if at(beside, index) else "sent" for index in range(len(wanted))
    ]


class TokenBucket:
    """A token bucket of `rate` bytes per second (0: no limit) that holds one chunk. `now`: seconds of one clock."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._paid_until = 0.0

    def wait_s(self, nbytes: int, now: float) -> float:
        """How long to wait before these `nbytes` go out; they count as sent."""
        if not self.rate:
            return 0.0
        start = max(self._paid_until, now)
        self._paid_until = start + nbytes / self.rate
        return start - now
