"""What a skipped save is worth saying."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dlrover_hooks import config
from dlrover_hooks.checkpoint.memory.slot_policy import NoSlot
from dlrover_hooks.errors import KeeperAway
from dlrover_hooks.worker.deferred_errors import WITHOUT_S, DeferredErrors


@pytest.mark.parametrize(
    ("error", "skipping_s", "said"),
    [
        (NoSlot("no slot is free"), WITHOUT_S / 2, False),
        (NoSlot("no slot is free"), WITHOUT_S * 2, True),
        (KeeperAway("there is no keeper"), 0.0, True),
    ],
)
def test_a_save_without_a_slot_is_told_of_only_if_none_is_made_for_long(
    error: Exception, skipping_s: float, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Fast steps outrun the hashing: some of their saves are left out, and that is as it should be."""
    engine: Any = SimpleNamespace(stale=None, error=error, skipping_s=skipping_s)
    reporter: Any = SimpleNamespace(error=None)
    surface = DeferredErrors(config.load({}), cast(Any, SimpleNamespace(rank=0)), engine, reporter)
    with caplog.at_level(logging.WARNING, "dlrover_hooks"):
        for _ in range(2):
            surface.raise_if_met()
    assert len(caplog.records) == said
