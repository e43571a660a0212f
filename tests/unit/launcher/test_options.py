"""How many nodes and workers, and what becomes of them."""

from __future__ import annotations

import sys

import pytest

from dlrover_hooks.errors import UsageError
from dlrover_hooks.launcher.options import Bounds, LaunchOptions, Level, bounds, check

COMMAND = ("true",)


@pytest.mark.parametrize(("text", "found"), [("4", Bounds(4, 4)), ("2:4", Bounds(2, 4)), (" 1 : 1 ", Bounds(1, 1))])
def test_a_number_or_a_range(text: str, found: Bounds) -> None:
    assert bounds(text, "--nnodes") == found


@pytest.mark.parametrize("text", ["0", "3:2", "", "a", "1:", ":2", "1:2:3", "-1"])
def test_others_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError) as refusal:
        bounds(text, "--nnodes")
    assert "--nnodes 2:4" in refusal.value.hint


@pytest.mark.requirement("ED-14")
def test_the_level_is_torchruns_way_unless_asked_for() -> None:
    assert LaunchOptions(command=COMMAND, workers=Bounds(2, 2)).fault_level is Level.HOT
    assert LaunchOptions(command=COMMAND, workers=Bounds(1, 2)).fault_level is Level.ELASTIC
    assert LaunchOptions(command=COMMAND, nodes=Bounds(1, 2), level=Level.SHRINK).fault_level is Level.SHRINK


def test_the_bounds_of_the_job_are_those_of_nodes_times_workers() -> None:
    options = LaunchOptions(command=COMMAND, nodes=Bounds(2, 4), workers=Bounds(7, 8))
    assert (options.min_workers, options.max_workers) == (14, 32)


@pytest.mark.parametrize(
    "options",
    [
        LaunchOptions(command=COMMAND, workers=Bounds(1, 2), level=Level.HOT),
        LaunchOptions(command=COMMAND, level=Level.SHRINK),
        LaunchOptions(command=COMMAND, workers=Bounds(2, 2), level=Level.ELASTIC),
        LaunchOptions(command=COMMAND, nodes=Bounds(2, 2)),
        LaunchOptions(command=COMMAND, standby=1),
        LaunchOptions(command=COMMAND, hang_timeout_s=1.0),
        LaunchOptions(command=COMMAND, etcd=True),
        LaunchOptions(command=COMMAND, etcd=True, endpoint="etcd-a", journal="master.db"),
    ],
)
def test_what_does_not_go_together_is_refused_with_a_way_out(options: LaunchOptions) -> None:
    with pytest.raises(UsageError) as refusal:
        check(options)
    assert refusal.value.hint


def test_each_worker_has_a_standby_unless_the_user_has_chosen() -> None:
    script = (sys.executable, "-u", "train.py")
    assert LaunchOptions(command=script, workers=Bounds(1, 8)).standbys == 8
    assert LaunchOptions(command=script, workers=Bounds(8, 8), standby=1).standbys == 1
    assert LaunchOptions(command=script, workers=Bounds(8, 8), standby=0).standbys == 0
    assert LaunchOptions(command=COMMAND, workers=Bounds(8, 8)).standbys == 0, "there is nothing to import ahead"
