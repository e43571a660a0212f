"""Saves at the pace of real life, where steps take longer than hashing and votes do."""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary

from dlrover_hooks.checkpoint.checkpointer import Checkpointer, Saved
from dlrover_hooks.checkpoint.save import segment_client
from dlrover_hooks.protocol import Generation
from dlrover_hooks.worker import reporter

WAIT_S = 20.0
save = Checkpointer.save
_last = WeakKeyDictionary[Checkpointer, Generation]()
_pause = threading.Event()


def paced_save(self: Checkpointer, *args: Any, **options: Any) -> Saved | None:
    """Each save of this process waits until the one before is memory-complete, or never will be.

    Steps of a millisecond outrun the votes, and saves that find no slot are left out: where a run resumes would be
    chance.
    """
    before, tries = _last.get(self), 0
    while before is not None and not _settled(self, before) and tries < WAIT_S / 0.005:
        _pause.wait(0.005)  # what the keeper and the votes do has no event here
        tries += 1
    saved = save(self, *args, **options)
    if saved is not None:
        _last[self] = saved.generation
    return saved


def _settled(engine: Checkpointer, before: Generation) -> bool:
    """It is complete, or never will be: it was dropped here, or another rank has left it out."""
    hopeless = engine.generations.heard(alone=False).hopeless or ()
    return engine.generations.complete_here == before or engine.error is not None or before in hopeless


def pace() -> None:
    """From here on, in this process. What is complete is asked for often: in real life a second is no long time; and
    memory is there before the first save, however slow the machine.
    """
    Checkpointer.save = paced_save
    segment_client.PREPARE_WAIT_S = WAIT_S
    reporter.BEAT_S = 0.02
