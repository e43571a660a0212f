"""Small notes that a trainer leaves for its successor, besides its images. They outlive the process. No torch."""

from __future__ import annotations

from dlrover_hooks.checkpoint.ipc import keeper_messages
from dlrover_hooks.checkpoint.ipc.keeper_client import KeeperClient
from dlrover_hooks.checkpoint.memory.segment import NOTE_BYTES
from dlrover_hooks.checkpoint.save.segment_client import SegmentClient
from dlrover_hooks.errors import KeeperAway


class SuccessorNotes:
    """Writes one trainer's notes, and reads all notes of its node."""

    def __init__(self, line: KeeperClient, segments: SegmentClient) -> None:
        self._line, self._segments = line, segments

    def leave(self, place: int, data: bytes, body: bytes = b"") -> None:
        """Put the note `data + body` at `place`. As `SegmentClient.note`: it is written once there is memory.

        A body that is the same object as the previous one at that place is not written again.
        """
        self._segments.note(place, data, body)

    def expect(self, nbytes: int) -> None:
        """Prepare memory for notes with `nbytes` besides the random states. As `SegmentClient.prepare`."""
        self._segments.expect(NOTE_BYTES + nbytes)

    def recall(self) -> tuple[bytes, ...]:
        """All notes in this node's memory, of all workers; none if there is no keeper. Any thread."""
        try:
            return self._line.ask(lambda ref: keeper_messages.Recall(ref=ref))[0].notes
        except KeeperAway:
            return ()
