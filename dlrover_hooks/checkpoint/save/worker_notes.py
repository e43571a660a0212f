"""What a trainer leaves to who goes on for it, beside its images: it outlives the process. No torch."""

from __future__ import annotations

from dlrover_hooks.checkpoint.ipc import keeper_messages
from dlrover_hooks.checkpoint.ipc.keeper_client import KeeperClient
from dlrover_hooks.checkpoint.memory.segment import NOTE_BYTES
from dlrover_hooks.checkpoint.save.segment_client import Room
from dlrover_hooks.errors import KeeperAway


class Notes:
    """One trainer's way to leave them, and to read those of its node."""

    def __init__(self, line: KeeperClient, room: Room) -> None:
        self._line, self._room = line, room

    def leave(self, place: int, data: bytes, body: bytes = b"") -> None:
        """Put the note `data + body` at `place`. Nothing while there is no memory yet. As `Room.note`.

        A body that is the same object as the one before it there costs nothing.
        """
        self._room.note(place, data, body)

    def expect(self, nbytes: int) -> None:
        """So much of a note is beside random states: have memory for that. As `Room.prepare`."""
        self._room.expect(NOTE_BYTES + nbytes)

    def recall(self) -> tuple[bytes, ...]:
        """All that lie in this node's memory, of all seats; none where there is no keeper. Any thread."""
        try:
            return self._line.ask(lambda ref: keeper_messages.Recall(ref=ref))[0].notes
        except KeeperAway:
            return ()
