"""Places in the library where a process may be caught: it says where it is, and goes on when the test lets it.

A trap is real code with one call put in; nothing is replaced. All wait only if `Board.armed` names them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any

from tests.chaos.board import Board
from tests.waiting import until

PATIENCE_S = 20.0
SLOW_S = 0.3
"""For each piece, of 4 MiB: longer than many saves take."""


class Phase(IntEnum):
    """Life of a generation, in order."""

    NONE = 0
    COPYING = 1
    COPIED = 2
    PUBLISHED = 3
    HASHING = 4
    HASHED = 5
    PERSISTING = 6
    PERSISTED = 7
    BEFORE_MANIFEST = 8
    BEFORE_LATEST = 9
    IN_RETENTION = 10
    BEFORE_LOAD = 11
    OPENING = 12
    LOADED = 13
    TAKING_SEAT = 14


RESTORING = frozenset({Phase.BEFORE_LOAD, Phase.OPENING, Phase.LOADED, Phase.TAKING_SEAT})
STORING = frozenset({Phase.PERSISTING, Phase.PERSISTED, Phase.BEFORE_MANIFEST, Phase.BEFORE_LATEST, Phase.IN_RETENTION})


class Store(IntEnum):
    """How storage behaves."""

    WELL = 0
    FAILS = 1
    FULL = 2
    SLOW = 3
    HANGS = 4


class Traps:
    """Of one process. `folder` holds the board and the test's socket."""

    def __init__(self, folder: str, who: str) -> None:
        self.board, self._path, self._who = Board(Path(folder) / "board"), f"{folder}/ear", who

    def say(self, **facts: Any) -> None:
        """Tell the test, and wait until it has heard."""
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(PATIENCE_S)
            line.connect(self._path)
            line.sendall(json.dumps(facts | {"who": self._who, "pid": os.getpid()}).encode() + b"\n")
            line.recv(1)

    def at(self, phase: Phase) -> None:
        """This process is in that phase now."""
        if self.board.armed == phase:
            self.say(phase=int(phase))

    def store(self) -> None:
        """Something is written to storage."""
        mode = self.board.stored
        if mode in (Store.FAILS, Store.FULL):
            raise OSError(errno.EIO if mode == Store.FAILS else errno.ENOSPC, "so it is today")
        with contextlib.suppress(AssertionError):  # a hang ends by itself, too, so that the process can
            until(lambda: self.board.stored != Store.HANGS, "the end of the hang", PATIENCE_S)
        if mode == Store.SLOW:
            select.select([], [], [], SLOW_S)

    def before(self, owner: Any, name: str, phase: Phase, only: Callable[..., bool] = lambda *_: True) -> None:
        """A trap ahead of each call of `owner.name`."""
        real = getattr(owner, name)

        def trapped(*args: Any, **more: Any) -> Any:
            if only(*args):
                self.at(phase)
            return real(*args, **more)

        setattr(owner, name, trapped)

    def behind(self, owner: Any, name: str, phase: Phase) -> None:
        """A trap behind each call of `owner.name`."""
        real = getattr(owner, name)

        def trapped(*args: Any, **more: Any) -> Any:
            found = real(*args, **more)
            self.at(phase)
            return found

        setattr(owner, name, trapped)


def in_trainer(traps: Traps) -> None:
    from dlrover_hooks.checkpoint.ipc import keeper_messages
    from dlrover_hooks.checkpoint.ipc.keeper_client import KeeperClient
    from dlrover_hooks.checkpoint.memory.segment import SharedSegment
    from dlrover_hooks.checkpoint.restore.generation_loader import Restorer
    from dlrover_hooks.checkpoint.save.slot_writer import Writer
    from dlrover_hooks.worker import startup

    real = Writer.fill

    def fill(self: Any, shot: Any, target: Any, places: Any, **more: Any) -> None:
        half = len(places) // 2
        real(self, shot, target, places[:half], **more)
        traps.at(Phase.COPYING)
        real(self, shot, target, places[half:], **more)

    Writer.fill = fill
    traps.before(SharedSegment, "publish", Phase.COPIED)
    traps.before(
        KeeperClient, "tell", Phase.PUBLISHED, lambda _, message: isinstance(message, keeper_messages.Published)
    )
    traps.before(Restorer, "load", Phase.BEFORE_LOAD)
    traps.behind(Restorer, "load", Phase.LOADED)
    traps.before(startup, "take_seat", Phase.TAKING_SEAT)


def in_keeper(traps: Traps) -> None:
    from dlrover_hooks.checkpoint.keeper import hasher
    from dlrover_hooks.checkpoint.storage import direct_io, shard_writer

    real = direct_io.write

    def write(part: str, pieces: Iterable[memoryview]) -> None:
        real(part, _trapped(pieces))

    def _trapped(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        for piece in pieces:
            yield piece
            traps.store()
            traps.at(Phase.PERSISTING)

    direct_io.write = write
    traps.before(hasher, "prove", Phase.HASHING)
    traps.behind(hasher, "prove", Phase.HASHED)
    traps.behind(shard_writer.generations, "write_shard", Phase.PERSISTED)
    traps.before(shard_writer, "verify", Phase.OPENING)
    in_master(traps)  # the last will commits, too


def in_master(traps: Traps) -> None:
    from dlrover_hooks.checkpoint.storage import filesystem as place, generations, retention

    def write_small(path: str, data: bytes) -> None:
        traps.store()
        really(path, data)

    really = place._write_small
    place._write_small = write_small

    def remove(place: Any, home: str) -> None:
        place.remove(f"{home}/{retention.MANIFEST}")
        traps.at(Phase.IN_RETENTION)
        real(place, home)

    real = retention.remove
    retention.remove = remove
    traps.before(generations, "_make_exist", Phase.BEFORE_MANIFEST)
    traps.before(generations, "_point_latest", Phase.BEFORE_LATEST)
