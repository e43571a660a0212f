"""Clusters of TensorFlow that TF_CONFIG describes: a process per task, started by hand, with a master beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlrover_hooks import protocol as p
from tests.integrations.ps_job import SHARDS, WAIT_S, by_hand, trained_once
from tests.waiting import until

pytestmark = [pytest.mark.deep, pytest.mark.slow, pytest.mark.timeout(280)]


def test_tf_config_makes_each_process_a_task(tmp_path: Path) -> None:
    """Started by hand, with a master beside them: one script, three processes; a second chief is refused."""
    with by_hand(tmp_path, {"samples": 2 * SHARDS, "size": 2, "holds": [100]}) as job:
        job.row("holds", 100)
        second = job.begin("chief")
        assert "which is alive" in second.communicate(timeout=120)[1]
        assert second.returncode == 1
        job.release(100)
        trained_once(job)
        for name in ("chief", "ps", "worker"):
            assert job.processes[name].wait(60) == 0, name


def test_an_address_that_the_chief_cannot_reach_ends_it_with_the_reason(tmp_path: Path) -> None:
    """Without this check TensorFlow waits, prints nothing, and holds the GIL."""
    with by_hand(tmp_path, {}, ps_host="no-such-host.invalid") as job:
        said = job.processes["chief"].communicate(timeout=WAIT_S)[1]
        assert job.processes["chief"].returncode == 1
        assert "failed to connect to ps:0 at no-such-host.invalid:" in said.splitlines()[-1], said


def test_a_new_parameter_server_at_an_unknown_address_is_rolled_back(tmp_path: Path) -> None:
    """The job goes on with the old set, and the new server's process ends."""
    with by_hand(tmp_path, {"samples": 2 * SHARDS, "size": 2, "holds": [100]}) as job:
        job.row("holds", 100)
        client = job.master.client("scale")
        client.call(p.ScaleTasks("by-hand", "scale", ps=2))
        wrong = job.begin("ps", 1, "no-such-host.invalid:2222")
        until(lambda: client.call(p.ShowTasks("by-hand")).version > 1, "the version with the new server", WAIT_S)
        job.release(100)
        trained_once(job)
        shown = client.call(p.ShowTasks("by-hand"))
        assert "was rolled back: failed to connect to ps:1 at no-such-host.invalid:2222" in shown.problem
        assert shown.ps == 1
        assert job.processes["chief"].wait(60) == 0
        assert wrong.wait(60) == 0
