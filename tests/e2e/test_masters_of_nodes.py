"""`run --rdzv-backend etcd`: each node's launcher serves a master, and one of them leads. Its node is lost."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.etcd_process import EtcdProcess
from tests.e2e.launched import Launched, all_gone
from tests.e2e.test_lost_node import EPOCHS, LOST_AT, SCRIPT, STEPS, ends

LEADS = "this master leads (epoch "


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    process = EtcdProcess(tmp_path)
    yield process
    process.close()


@pytest.mark.requirement("ED-41", "ED-42", "ED-57")
@pytest.mark.deep
def test_the_node_of_the_leading_master_is_lost(
    launch: Callable[..., Launched], etcd: EtcdProcess, tmp_path: Path
) -> None:
    """Another master leads, another node comes, and the run ends as the undisturbed one. No step is lost.

    The master is stopped first, so that it cannot give its lease up as it ends.
    """
    calm = launch(SCRIPT, "-n", "2", "--standby", "0")
    code, said = calm.end(timeout_s=120)
    assert code == 0, said
    (undisturbed,) = ends(calm)
    calm.lives.write_text("")
    job = f"masters-{uuid.uuid4().hex[:8]}"

    def node(name: str) -> Launched:
        flags = ("--rdzv_backend=etcd", f"--rdzv_endpoint={etcd.members}", "--nnodes", "2", "--standby", "0")
        return launch(SCRIPT, *flags, job=job, DLROVER_HOOKS_NODE=name, DLROVER_HOOKS_TOKEN="secret")

    b = node("b")
    b.says(LEADS)
    a = node("a")
    at = {"node": "b", "step": LOST_AT}
    lives = a.wait_for(lambda lives: any(life.items() >= at.items() for life in lives), timeout_s=120)
    master = b.child("dlrover_hooks.master").pid
    os.kill(master, signal.SIGSTOP)
    b.process.kill()
    os.kill(master, signal.SIGKILL)
    b.end()
    assert all_gone([master, *{life["pid"] for life in lives if life["node"] == "b"}])
    c = node("c")
    told = ""
    for one in (a, c):
        code, said = one.end(timeout_s=120)
        assert code == 0, said
        told += said
    assert LEADS in told
    assert ends(a) == [undisturbed]
    assert undisturbed[1] == STEPS * EPOCHS
