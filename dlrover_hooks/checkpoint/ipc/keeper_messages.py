"""Messages between a trainer and its node's keeper: length-prefixed JSON on a unix socket, with file descriptors.

A request carries `ref` > 0 and its reply the same value. `ref` 0 is a notice without a reply. No torch.
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
"""Path, device and inode of an open file, for receivers on systems that do not pass descriptors."""


def whereabouts(fd: int) -> Whereabouts:
    """Of a descriptor of this process. Processes of the same user can open the file while it is open here."""
    found = os.fstat(fd)
    return f"/proc/{os.getpid()}/fd/{fd}", found.st_dev, found.st_ino


class KeeperMessage(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    ref: int = 0


# ---- from the trainer


class Replicate(KeeperMessage, frozen=True):
    """Listen on `host`:`port` (0: any) for other keepers, as `node`, and send this node's images to the keeper `to`.

    Without a secret no peer is admitted and nothing is sent yet. Reply: Replicating, or Refused.
    """

    node: str
    host: str
    port: int = 0
    secret: Secret = Secret()
    to: KeeperAddress | None = None
    mb_per_s: int = 0
    """Rate limit in millions of bytes per second; 0: no limit."""


class Fetch(KeeperMessage, frozen=True):
    """Fetch `rank`'s image of `generation` from the first of `at` that provides it. Reply: Acknowledged, or Refused."""

    node: str
    generation: Generation
    rank: int
    world_size: int
    at: tuple[KeeperAddress, ...]
    secret: Secret


class Hello(KeeperMessage, frozen=True):
    """Register: this process saves for local rank `seat`, in attempt `attempt` of `run`. Reply: Welcome, or Refused.

    `master`: URL of the master that admitted this process; empty: none did (see `Peer.master`). Refused while a process
    admitted by another master saves on this node, or one of a newer attempt for `seat`. Otherwise this process replaces
    the one registered for `seat`, which receives `Replaced`.
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
    """The latest such request of this worker: a restarted keeper needs it again."""


class Inventory(KeeperMessage, frozen=True):
    """Request the inventory without registering. Reply: Welcome, or Refused.

    `master` as in `Hello`: refused while a process admitted by another master saves here. None: no such check. `waits`:
    reply once everything published so far is hashed. Otherwise the reply comes at once, with the bytes left.
    """

    master: str | None = None
    waits: bool = True


class Allocate(KeeperMessage, frozen=True):
    """Request slots of at least `slot_bytes` for this worker, and notes of `note_bytes`. Reply: Allocated with a
    descriptor, or Refused.

    `gives`: this trainer no longer writes any of the worker's segments. Their slots may be freed if memory is short.
    """

    slot_bytes: int
    note_bytes: int = 0
    gives: bool = False


class Published(KeeperMessage, frozen=True):
    """Slot `slot` of this worker's segment `segment` was published with sequence number `seq`: hash it. Later: Hashed.

    0 for either: the newest segment, the current sequence number. `unchanged`: byte ranges [start, stop) of the image
    that were not copied, because the slot held them already. Chunks that lie entirely inside one are compared with
    their newest hash, if there is one. If one differs, the keeper sends `Damaged`.
    """

    slot: int
    segment: int = 0
    seq: int = 0
    unchanged: tuple[tuple[int, int], ...] = ()


class Complete(KeeperMessage, frozen=True):
    """`generation` is memory-complete: every rank of the job holds a hashed slot of it."""

    generation: Generation


class Persist(KeeperMessage, frozen=True):
    """Make this worker's slot of `generation` durable, once it is hashed. Later: Persisted or PersistFailed."""

    generation: Generation
    rank: int
    world_size: int
    url: str
    options: dict[str, Any] = {}


class OpenImage(KeeperMessage, frozen=True):
    """Verify `rank`'s image of `generation` and open it. Reply: Opened with a descriptor, or Refused."""

    generation: Generation
    rank: int
    world_size: int


class Recall(KeeperMessage, frozen=True):
    """Request the notes that trainers of this node, dead ones included, left for their successors. Reply: Recalled."""


class Drop(KeeperMessage, frozen=True):
    """Free all runs but `run`, for this worker and for those without a process (`--fresh`). Reply: Acknowledged."""

    run: str = ""


class Goodbye(KeeperMessage, frozen=True):
    """This process leaves on purpose; `finished`: it needs no successor. Reply: Acknowledged."""

    finished: bool = False


class Adopt(KeeperMessage, frozen=True):
    """A launcher's second keeper hands its life pipe to the first one, as a descriptor. Reply: Acknowledged."""

    at: Whereabouts | None = None


# ---- from the keeper


class Welcome(KeeperMessage, frozen=True):
    """The hashed slots of this node. `damage`: messages about lost data, cleared once a registered worker got them.

    `unhashed_bytes`: published, but not hashed yet.
    """

    held: tuple[Held, ...] = ()
    damage: tuple[str, ...] = ()
    pid: int = 0
    unhashed_bytes: int = 0


class Allocated(KeeperMessage, frozen=True):
    """`persisting`: this worker's generations that are being made durable now, started for an earlier process."""

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
    """This worker's slot of `generation` is complete and hashed: the rank may vote for it."""

    generation: Generation
    rank: int
    world_size: int


class Damaged(KeeperMessage, frozen=True):
    """This worker's slot of `generation` changed where it was not copied again: everything must be copied."""

    generation: Generation
    reason: str


class Storing(KeeperMessage, frozen=True):
    """Progress of a long write."""

    generation: Generation
    done_bytes: int
    nbytes: int
    seconds: float


class Persisted(KeeperMessage, frozen=True):
    """`seconds`: duration, with queue and all attempts; 0 if it was written before."""

    generation: Generation
    file: ShardFile
    seconds: float = 0.0


class PersistFailed(KeeperMessage, frozen=True):
    """`gone`: the slot was used again or its keeper died; the storage did not fail."""

    generation: Generation
    reason: str
    hint: str = ""
    gone: bool = False


class Unreplicated(KeeperMessage, frozen=True):
    """Why an image of this worker has no replica. Sent once for each kind of reason."""

    reason: str


class Space(KeeperMessage, frozen=True):
    """Whether there is enough space, as a line for the log. `tight`: log it as a warning, with `hint` as the remedy."""

    line: str
    tight: bool
    hint: str = ""


class Replaced(KeeperMessage, frozen=True):
    """Process `pid` now saves for this worker: nothing saved on this connection counts any more."""

    pid: int = 0


SaveNotice = Hashed | Persisted | PersistFailed
Notice = SaveNotice | Damaged | Space | Storing | Replaced | Unreplicated
Reply = Welcome | Allocated | Opened | Recalled | Replicating | Refused | Acknowledged
Request = Hello | Inventory | Allocate | Published | Complete | Persist | OpenImage | Drop | Goodbye | Adopt
Request |= Replicate | Fetch | Recall
CARRY_FD = (Allocated, Opened, Adopt)
_any = msgspec.json.Decoder(Request | Reply | Notice)


def frame(message: KeeperMessage) -> bytes:
    """`message` as bytes on the socket."""
    body = msgspec.json.encode(message)
    return struct.pack("<I", len(body)) + body


class Frames:
    """Decodes messages from a stream, each with its descriptor if it carries one. One thread."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._fds: deque[int] = deque()

    def receive(self, connection: socket.socket) -> bool:
        """One read; False at the end of the stream. Raises BlockingIOError if there is no data yet."""
        size = array.array("i").itemsize
        data, extra, _, _ = connection.recvmsg(_READ_BYTES, socket.CMSG_SPACE(4 * size), socket.MSG_CMSG_CLOEXEC)
        for level, kind, body in extra:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._fds.extend(array.array("i", body[: len(body) // size * size]))
        self._data += data
        return bool(data)

    def messages(self) -> Iterator[tuple[Any, int]]:
        """The complete messages so far, and the descriptor of each (-1: none).

        Raises:
            KeeperAway: the bytes are not of this protocol.
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
