"""What a trainer and its node's keeper say to each other: length-prefixed JSON on a unix socket, descriptors beside it.

A request carries `ref` > 0 and its reply the same one; `ref` 0 is a notice that nobody waits for. No torch.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

from dlrover_hooks.errors import KeeperAway
from dlrover_hooks.protocol import Generation, Held, KeeperAddress, Retention, Secret, ShardFile

MAX_BYTES = 64 << 20
_READ_BYTES = 1 << 18


Whereabouts = tuple[str, int, int]
"""Path, device and inode of a descriptor, for a receiver to whom the system does not let it pass."""


def whereabouts(fd: int) -> Whereabouts:
    """Of a descriptor of this process: one of the same user may open it while it is open here."""
    found = os.fstat(fd)
    return f"/proc/{os.getpid()}/fd/{fd}", found.st_dev, found.st_ino


class KeeperMessage(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    ref: int = 0


# ---- from the trainer


class Replicate(KeeperMessage, frozen=True):
    """Listen on `host`:`port` (0: any) for other nodes' keepers, as `node`, and send this node's images `to` that one.

    Without a secret nobody is admitted and nothing is sent yet. Answer: Replicating, or Refused.
    """

    node: str
    host: str
    port: int = 0
    secret: Secret = Secret()
    to: KeeperAddress | None = None
    mb_per_s: int = 0
    """At most so many millions of bytes per second; 0: no limit."""


class Fetch(KeeperMessage, frozen=True):
    """Have `rank`'s image of `generation` here, from the first of `at` that gives it. Answer: Done, or Refused."""

    node: str
    generation: Generation
    rank: int
    world_size: int
    at: tuple[KeeperAddress, ...]
    secret: Secret


class Hello(KeeperMessage, frozen=True):
    """From here on this process saves for `seat`, in attempt `attempt` of `run`. Answer: Welcome, or Refused.

    `master`: who let it in (a URL; empty: itself, see `Peer.master`). A living process's seat goes to nobody that
    another master let in, nor to an older attempt; its own master's successor gets it, and it is told `Replaced`.
    """

    seat: int
    job: str
    master: str = ""
    run: str = ""
    attempt: int = 0
    save_to: str | None = None
    storage_options: dict[str, Any] = {}
    keep: int | Retention = 2
    replicate: Replicate | None = None
    """What the keeper was told before; a new one has to hear it again."""


class Inventory(KeeperMessage, frozen=True):
    """Takes no seat. Answer: Welcome, or Refused.

    `master` as in `Hello`: what a living launch of another master holds is not shown. None: a mere question.
    `waits`: for the hashes of all that is published by now. Else the answer comes at once and says how much is left.
    """

    master: str | None = None
    waits: bool = True


class Allocate(KeeperMessage, frozen=True):
    """Slots of at least `slot_bytes` for this connection's seat, and notes of `note_bytes`. Answer: Allocated and a
    descriptor, or Refused.

    `gives`: this trainer writes none of the seat's segments any more. Where memory is short their slots may be freed.
    """

    slot_bytes: int
    note_bytes: int = 0
    gives: bool = False


class Published(KeeperMessage, frozen=True):
    """Slot `slot` of this seat's segment `segment` was published with sequence word `seq`: hash it. Later: Hashed.

    0 for either: the newest segment, the word that stands there now. `unchanged`: byte ranges [start, stop) of the
    image that were not copied, because the slot held them already. Chunks that lie wholly inside one
    are compared with their newest hash, if there is one yet; where one differs, the answer is `Damaged`.
    """

    slot: int
    segment: int = 0
    seq: int = 0
    unchanged: tuple[tuple[int, int], ...] = ()


class Complete(KeeperMessage, frozen=True):
    """`generation` is memory-complete: every rank of the job holds a hashed slot of it."""

    generation: Generation


class Persist(KeeperMessage, frozen=True):
    """Make this seat's slot of `generation` durable, once it is hashed. Later: Persisted or PersistFailed."""

    generation: Generation
    rank: int
    world_size: int
    url: str
    options: dict[str, Any] = {}


class OpenImage(KeeperMessage, frozen=True):
    """`rank`'s image of `generation`, verified now. Answer: Opened and a descriptor, or Refused."""

    generation: Generation
    rank: int
    world_size: int


class Recall(KeeperMessage, frozen=True):
    """What the trainers of this node, the dead among them, have noted for who goes on. Answer: Recalled."""


class Drop(KeeperMessage, frozen=True):
    """Forget other runs than `run` in this seat and in those that nobody has (`--fresh`). Answer: Done."""

    run: str = ""


class Goodbye(KeeperMessage, frozen=True):
    """This process leaves on purpose; `finished`: the job needs no successor. Answer: Done."""

    finished: bool = False


class Adopt(KeeperMessage, frozen=True):
    """A launcher's second keeper gives its life pipe to the first one. Comes with a descriptor. Answer: Done."""

    at: Whereabouts | None = None


# ---- from the keeper


class Welcome(KeeperMessage, frozen=True):
    """What this node holds, hashed, and who holds it. `damage`: lines about what is lost, until a seat was taken.

    `unhashed_bytes`: what is published, but not hashed yet.
    """

    held: tuple[Held, ...] = ()
    damage: tuple[str, ...] = ()
    pid: int = 0
    unhashed_bytes: int = 0


class Allocated(KeeperMessage, frozen=True):
    """`persisting`: this seat's generations being made durable right now, begun by an earlier life."""

    complete: Generation | None = None
    persisting: tuple[Generation, ...] = ()
    at: Whereabouts | None = None


class Opened(KeeperMessage, frozen=True):
    slot: int
    seq: int
    image_bytes: int
    seat: int
    at: Whereabouts | None = None


class Recalled(KeeperMessage, frozen=True):
    notes: tuple[bytes, ...] = ()


class Replicating(KeeperMessage, frozen=True):
    """Other keepers reach this one at `port`."""

    port: int


class Refused(KeeperMessage, frozen=True):
    reason: str
    hint: str = ""


class Acknowledged(KeeperMessage, frozen=True):
    pass


class Hashed(KeeperMessage, frozen=True):
    """This seat's slot of `generation` is whole and hashed: it may be voted for."""

    generation: Generation
    rank: int
    world_size: int


class Damaged(KeeperMessage, frozen=True):
    """This seat's slot of `generation` does not hold what it held before where it was not copied again: copy it all."""

    generation: Generation
    reason: str


class Storing(KeeperMessage, frozen=True):
    """A long write so far."""

    generation: Generation
    done_bytes: int
    nbytes: int
    seconds: float


class Persisted(KeeperMessage, frozen=True):
    """`seconds`: how long it took, queue and all attempts included; 0 where it was written before."""

    generation: Generation
    file: ShardFile
    seconds: float = 0.0


class PersistFailed(KeeperMessage, frozen=True):
    """`gone`: the slot was used again or its keeper died; nothing is wrong with the storage."""

    generation: Generation
    reason: str
    hint: str = ""
    gone: bool = False


class Unreplicated(KeeperMessage, frozen=True):
    """Why an image of this seat is in this node's memory alone. Said once for each kind of reason."""

    reason: str


class Space(KeeperMessage, frozen=True):
    """Whether there is room, in a line for a person; `tight`: it is worth a warning, and `hint` says what to do."""

    line: str
    tight: bool
    hint: str = ""


class Replaced(KeeperMessage, frozen=True):
    """Process `pid` has this connection's seat now: nothing that is saved here counts any more."""

    pid: int = 0


SaveNotice = Hashed | Persisted | PersistFailed
Notice = SaveNotice | Damaged | Space | Storing | Replaced | Unreplicated
Reply = Welcome | Allocated | Opened | Recalled | Replicating | Refused | Acknowledged
Request = Hello | Inventory | Allocate | Published | Complete | Persist | OpenImage | Drop | Goodbye | Adopt
Request |= Replicate | Fetch | Recall
CARRY_FD = (Allocated, Opened, Adopt)
_any = msgspec.json.Decoder(Request | Reply | Notice)


def frame(message: KeeperMessage) -> bytes:
    """`message` as it travels."""
    body = msgspec.json.encode(message)
    return struct.pack("<I", len(body)) + body


class Frames:
    """Messages out of a stream, each with its descriptor if it carries one. One thread."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._fds: deque[int] = deque()

    def receive(self, connection: socket.socket) -> bool:
        """One read; False at the end of the stream. Raises BlockingIOError where there is nothing yet."""
        size = array.array("i").itemsize
        data, extra, _, _ = connection.recvmsg(_READ_BYTES, socket.CMSG_SPACE(4 * size), socket.MSG_CMSG_CLOEXEC)
        for level, kind, body in extra:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._fds.extend(array.array("i", body[: len(body) // size * size]))
        self._data += data
        return bool(data)

    def messages(self) -> Iterator[tuple[Any, int]]:
        """Whole messages so far, and the descriptor of each (-1: none).

        Raises:
            KeeperAway: the other side does not speak this protocol.
        """
        while len(self._data) >= 4:
            (length,) = struct.unpack_from("<I", self._data)
            if length > MAX_BYTES:
                raise KeeperAway(f"a message of {length} bytes on the keeper's socket")
            if len(self._data) < 4 + length:
                return
            body = bytes(self._data[4 : 4 + length])
            del self._data[: 4 + length]
            try:
                message = _any.decode(body)
            except msgspec.DecodeError as error:
                raise KeeperAway(f"a message that cannot be read on the keeper's socket: {error}") from error
            yield message, self._fds.popleft() if isinstance(message, CARRY_FD) and self._fds else -1

    def close(self) -> None:
        """Close descriptors that came without a message."""
        while self._fds:
            os.close(self._fds.popleft())
