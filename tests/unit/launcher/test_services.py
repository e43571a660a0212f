"""A service that is killed again and again right after its start is started again, but not without a pause."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlrover_hooks.errors import LaunchError
from dlrover_hooks.host.child_process import Child
from dlrover_hooks.launcher.processes import services
from dlrover_hooks.launcher.processes.services import Services


@contextlib.contextmanager
def keeper(monkeypatch: pytest.MonkeyPatch, script: str) -> Iterator[tuple[Services, Any]]:
    """Services whose keeper runs `script`; and the clock that they see, with how often it was started."""
    clock = types.SimpleNamespace(now=0.0, starts=0)

    def start(self: Services) -> Child:
        clock.starts += 1
        child = self._watched(Child("keeper", [sys.executable, "-c", script], env=dict(os.environ)))
        child.started_at = clock.now
        return child

    monkeypatch.setattr(Services, "_start_keeper", start)
    monkeypatch.setattr(services, "time", types.SimpleNamespace(monotonic=lambda: clock.now))
    with selectors.DefaultSelector() as selector:
        made = Services("job", "node", None, None, (), selector)
        try:
            yield made, clock
        finally:
            for child in made._children.values():  # the script does not end with its launcher, as a keeper does
                child.signal(signal.SIGKILL)
            made.end()


def death(made: Services) -> None:
    """The keeper of now is killed, and seen to."""
    child = made._children["keeper"]
    child.signal(signal.SIGKILL)
    assert child.wait(60.0) == -signal.SIGKILL
    made.revive()


def test_one_that_is_killed_at_its_start_is_started_at_longer_and_longer_intervals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with keeper(monkeypatch, "import signal; signal.pause()") as (made, clock):
        for _ in range(2):
            death(made)
        assert clock.starts == 3
        for pause_s in (1.0, 2.0, 4.0):
            starts = clock.starts
            death(made)
            clock.now += pause_s - 0.1
            made.revive()
            assert clock.starts == starts
            clock.now += 0.1
            made.revive()
            assert clock.starts == starts + 1
        clock.now += 60.0
        death(made)
        assert clock.starts == starts + 2, "it had lived: it is needed at once"


def test_one_that_fails_at_its_start_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with keeper(monkeypatch, "raise SystemExit(3)") as (made, _):
        for _ in range(2):
            made._children["keeper"].wait(60.0)
            made.revive()
        made._children["keeper"].wait(60.0)
        with pytest.raises(LaunchError, match="exit code 3"):
            made.revive()


def test_nothing_is_left_of_a_temporary_journal() -> None:
    """Not what SQLite makes beside it either, of a master that was killed in the middle of a write."""
    with services.temporary_journal() as path:
        for suffix in ("-journal", "-wal", "-shm", ".lock"):
            Path(path + suffix).touch()
    folder, name = os.path.split(path)
    assert [one for one in os.listdir(folder) if one.startswith(name)] == []
