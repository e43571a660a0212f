"""SLURM's environment, as srun (23.11) gives it to a task."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from dlrover_hooks.errors import LaunchError, UsageError
from dlrover_hooks.launcher import slurm

BATCH = {  # sbatch --nodes 2 --ntasks-per-node 1 --gpus-per-node 4, then srun; task 1
    "SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "gpu[03-04]", "SLURM_NNODES": "2",
    "SLURM_NODELIST": "gpu[03-04]", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_PROCID": "1",
    "SLURM_NODEID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS_PER_NODE": "4", "SLURM_LAUNCH_NODE_IPADDR": "10.1.0.3",
    "SLURMD_NODENAME": "gpu04", "SLURM_CPUS_ON_NODE": "64", "SLURM_TOPOLOGY_ADDR": "s0.gpu04",
}  # fmt: skip
SALLOC = {  # salloc -N 1 -n 1 on a login node, then srun, no GPU
    "SLURM_JOB_ID": "12", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "cpu7", "SLURM_NNODES": "1",
    "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "3",
    "SLURM_STEP_NODELIST": "cpu7", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.1.0.250", "SLURM_RESTART_COUNT": "1",
}  # fmt: skip


def test_a_batch_step_of_two_nodes() -> None:
    found = slurm.allocation(BATCH)
    assert found == slurm.Allocation(
        job="4711", life="4711-0-0", nodes=2, node_rank=1, first_host="gpu03", port=19711, gpus=4
    )
    assert found.endpoint == "gpu03:19711"
    assert slurm.allocation(BATCH | {"SLURM_NODEID": "0", "SLURM_PROCID": "0"}).endpoint == found.endpoint


def test_one_node_needs_no_address() -> None:
    found = slurm.allocation(SALLOC)
    assert (found.nodes, found.node_rank, found.endpoint, found.gpus, found.life) == (1, 0, "", 0, "12-3-1")


def test_steps_and_jobs_have_ports_of_their_own() -> None:
    ports = {
        slurm.allocation(BATCH | {"SLURM_STEP_ID": step, "SLURM_JOB_ID": job}).port
        for step in "012"
        for job in ("4711", "4712", "4713")
    }
    assert len(ports) == 9
    assert all(15000 <= port < 20000 for port in ports)


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("gpu[03-05,9],login", "gpu03"),
        ("a,b[1-2]", "a"),
        ("n7", "n7"),
        ("rack[0-1]node[12,14]", "rack0node12"),
        ("x[2]y", "x2y"),
        ("c[001-128]-ib", "c001-ib"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_short_form(nodelist: str, first: str) -> None:
    assert slurm.first_host(nodelist) == first


def test_outside_srun_the_way_in_is_told() -> None:
    batch_script = {name: value for name, value in BATCH.items() if name != "SLURM_PROCID"}
    for env in ({}, batch_script):
        with pytest.raises(UsageError) as refusal:
            slurm.allocation(env)
        assert "srun --ntasks-per-node 1 dlrover-hooks run --slurm" in refusal.value.hint


def test_one_launcher_on_each_node() -> None:
    with pytest.raises(UsageError, match="8 tasks on 2 nodes"):
        slurm.allocation(BATCH | {"SLURM_STEP_NUM_TASKS": "8"})


@pytest.mark.parametrize(("text", "gpus"), [("4", 4), ("a100:8", 8), ("", 0), ("many", 0)])
def test_gpus(text: str, gpus: int) -> None:
    env = {name: value for name, value in SALLOC.items()} | {"SLURM_GPUS_ON_NODE": text}
    assert slurm.allocation(env).gpus == gpus


def test_the_first_node_leaves_a_token_for_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the user's alone, a launcher that comes before it waits, and it is gone afterwards."""
    monkeypatch.setenv("HOME", str(tmp_path))
    seen: list[str] = []

    def come() -> None:
        with slurm.shared_token("1-0-0", make=False) as token:
            seen.append(token)

    other = threading.Thread(target=come)
    other.start()
    with slurm.shared_token("1-0-0", make=True) as token:
        other.join(10)
        path = slurm.token_path("1-0-0")
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
    assert seen == [token]
    assert not os.path.exists(path)


def test_a_token_that_does_not_appear_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(slurm, "_SHARED_S", 0.0)
    with pytest.raises(LaunchError, match="did not appear") as refusal, slurm.shared_token("1-0-0", make=False):
        pass
    assert "DLROVER_HOOKS_TOKEN" in refusal.value.hint
