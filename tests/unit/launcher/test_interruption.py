"""What the launcher makes of a notice whose time is shorter than the grace."""

from __future__ import annotations

import contextlib
import signal
import time
import types
from typing import Any

from dlrover_hooks import protocol as p
from dlrover_hooks.launcher import node_supervisor as launch
from dlrover_hooks.launcher.interruption import Eviction
from dlrover_hooks.launcher.interruption_notices import InterruptionNotice
from dlrover_hooks.launcher.options import LaunchOptions


class Client:
    incarnation = "launcher"

    def __init__(self) -> None:
        self.told: list[p.Preempt] = []

    def call(self, request: p.Preempt, **_: Any) -> p.Parting:
        self.told.append(request)
        return p.Parting(round=1)


def test_workers_are_told_how_little_time_is_left() -> None:
    """SIGTERM says --grace, and the node goes before that is over: the workers would still be saving."""
    client: Any = Client()
    eviction = Eviction("job", "node", preemption="none", grace_s=25.0, slurm=None)
    eviction.hear(InterruptionNotice("spot", time.time() + 6.0))
    assert eviction.due(client)
    (told,) = client.told
    assert 0.0 < told.within_s <= 5.0
    assert 0.0 < eviction.left_s <= 5.0


def test_without_a_time_the_grace_is_all_that_is_known() -> None:
    client: Any = Client()
    eviction = Eviction("job", "node", preemption="none", grace_s=25.0, slurm=None)
    eviction.hear(InterruptionNotice("file: go"))
    assert eviction.due(client)
    assert (client.told, eviction.left_s) == ([], float("inf"))


def test_a_signal_that_does_not_end_the_run_wakes_the_launcher_once() -> None:
    """SLURM's SIGUSR1, where its end is known: a byte that is left in the pipe would keep the selector awake."""
    launcher: Any = launch.Launcher(LaunchOptions(command=("true",), job="job"))
    heard: list[int] = []
    launcher._eviction = types.SimpleNamespace(signalled=heard.append, due=lambda _: False)
    launcher._services = types.SimpleNamespace(revive=lambda: None)
    launcher._workers = types.SimpleNamespace(refill=lambda: None)
    launcher._client = None
    with contextlib.ExitStack() as owned:
        launcher._take_signals(owned)
        signal.raise_signal(signal.SIGUSR1)
        assert launcher._selector.select(60.0)
        launcher._look()
        assert not launcher._selector.select(0.0)
    assert heard == [signal.SIGUSR1]
