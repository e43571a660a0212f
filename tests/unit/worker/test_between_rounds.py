"""What a process that outlives its round keeps for itself until the next one."""

from __future__ import annotations

import contextlib
import signal
from types import SimpleNamespace
from typing import Any

from dlrover_hooks import config
from dlrover_hooks.worker.preemption import Signals
from dlrover_hooks.worker.surviving_process import Membership


def test_a_signal_between_two_rounds_is_heard_whatever_a_framework_has_put_back() -> None:
    """Lightning gives SIGTERM back to what it found, as it leaves a fit: a preempted process would die of it."""
    heard: list[str] = []
    signals = Signals(["SIGTERM"], heard.append)
    parted: list[str] = []
    place = config.Place(rank=0, world_size=2, local_rank=0, node="node", round=1, incarnation="own")
    before = signal.getsignal(signal.SIGTERM)
    with contextlib.closing(
        Membership(config.Config(job="job", master="http://127.0.0.1:9"), place, lambda: None)
    ) as membership:
        session: Any = SimpleNamespace(parting=SimpleNamespace(signals=signals), part=lambda: parted.append("parted"))
        membership.session = session
        signals.take()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        membership.end_life()
        signal.raise_signal(signal.SIGTERM)
        assert (heard, parted) == (["SIGTERM"], ["parted"])
    signal.signal(signal.SIGTERM, before)
