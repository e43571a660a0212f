"""`dlrover-hooks vitals` at a real master."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from dlrover_hooks import protocol as p
from dlrover_hooks.cli.main import main
from dlrover_hooks.cli.vitals import _part
from dlrover_hooks.launcher import running_jobs
from tests.e2e.job_script import attach, join
from tests.e2e.master_process import LiveMaster

ROOT = Path(__file__).parents[3]
GPU = p.AcceleratorVitals(
    name="H100",
    device="GPU-1",
    use_percent=93.0,
    memory_used_bytes=60_000_000_000,
    memory_total_bytes=80_000_000_000,
    temperature_c=71.0,
    power_w=650.0,
    ecc_errors=2,
    xid=79,
    throttled_by=("power cap",),
)


@pytest.fixture
def master(live_master: LiveMaster) -> LiveMaster:
    """Rank 0 has reported nothing, rank 1 stalls."""
    agent = live_master.client("agent")
    agent.call(join())
    for worker in ("w0", "w1"):
        live_master.client(worker).call(attach(worker))
    agent.call(p.Heartbeat("job", "w1", 41, p.Vitals(50.0, 1 << 20, GPU), p.Stall(61.0, "data.py:41, in load")))
    report = p.NodeVitals(
        "job",
        "agent",
        "node-agent",
        p.CPUVitals(8, 2.5, (1.5, 1.0, 1.0), limit_cores=4.0, throttled_percent=12.0),
        p.MemoryVitals(64_000_000_000, 30_000_000_000, 8_000_000_000, 7_000_000_000, oom_kills=3),
        p.NetworkVitals(1_500_000.0, 2_000.0),
        workers=(p.WorkerProcesses("w1", 5, 151.0, 12_000_000_000),),
    )
    agent.call(report)
    return live_master


def called(*words: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(main, ["vitals", *words])


def at(master: LiveMaster) -> list[str]:
    return ["--master", master.url, "--token", str(master.token)]


def test_two_tables(master: LiveMaster) -> None:
    done = called("job", *at(master))
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()) for line in done.output.splitlines() if line.strip()]
    assert lines[0] == "job job"
    assert (
        "node-agent 2.5/8 1.5 30/64 GB 7.0/8.0 GB no answer 1.5 MB 2.0 KB "
        "CPU limit 4, throttled in 12 % of periods, 3 OOM kills"
    ) in lines
    assert "0 node-agent 0" in lines
    assert (
        "1 node-agent 41 151 % 12 GB 5 93 % 60/80 GB 71 650 no step for 61 s: data.py:41, in load, "
        "throttled: power cap, 2 ECC errors, Xid 79"
    ) in lines


def test_json_is_the_masters_answer(master: LiveMaster) -> None:
    done = called("job", "--json", *at(master))
    found = msgspec.json.decode(done.output, type=p.JobVitals)
    assert found.ranks[1].vitals == p.Vitals(50.0, 1 << 20, GPU)
    assert len(done.output.splitlines()) == 1


def test_the_only_job_of_this_machine_needs_no_name(
    master: LiveMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("DLROVER_HOOKS_RUNTIME_DIR", str(folder))
    assert "which job? (running on this machine: none)" in called().output
    with running_jobs.listed("job", master.url, master.token):
        assert "node-agent" in called().output
        assert "node-agent" in called("job").output
        other = called("other")
        assert (other.exit_code, "no job 'other' runs here (running on this machine: job)" in other.output) == (
            78,
            True,
        )
        with running_jobs.listed("tasks", master.url, master.token, tasks=True):
            assert "running on this machine: job, tasks" in called().output
            assert running_jobs.find(None, tasks=True).job == "tasks"
    assert list(folder.iterdir()) == []


def test_what_is_refused(master: LiveMaster) -> None:
    unknown = called("nobody", *at(master))
    assert (unknown.exit_code, "keeps no job 'nobody'" in unknown.output) == (1, True)
    assert called("job", "--master", "nowhere").exit_code == 78
    assert "give its name" in called("--master", master.url).output


@pytest.mark.parametrize("flags", [["--json"], []])
def test_a_watch_ends_with_ctrl_c(master: LiveMaster, flags: list[str]) -> None:
    """Without a traceback, and with the exit code of all commands."""
    shown, terminal = pty.openpty()
    command = [sys.executable, "-m", "dlrover_hooks", "vitals", "job", "--watch", *flags, *at(master)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "200"}
    watch = subprocess.Popen(command, stdout=terminal, stderr=subprocess.PIPE, env=env, text=True)
    os.close(terminal)
    try:
        said = ""
        while "node-agent" not in said:
            said += os.read(shown, 1 << 16).decode()
        watch.send_signal(signal.SIGINT)
        _, errors = watch.communicate(timeout=60)
    finally:
        watch.kill()
        os.close(shown)
    assert (watch.returncode, errors) == (130, "ended with Ctrl-C\n")


@pytest.mark.parametrize(
    ("used", "total", "text"),
    [(None, 5, ""), (5, None, ""), (3_000, 25_000, "3.0/25 KB"), (3_000, 25_000_000, "3.0 KB/25 MB")],
)
def test_a_part_of_a_whole(used: int | None, total: int | None, text: str) -> None:
    assert _part(used, total) == text


def test_the_parts_of_a_step(master: LiveMaster) -> None:
    phases = p.StepPhases(41, 50, 10.0, 0.21, 0.01, 0.12, 0.02, 0.001, 0.05)
    master.client("agent").call(p.Heartbeat("job", "w1", 41, phases=phases))
    lines = [" ".join(line.split()) for line in called("job", *at(master)).output.splitlines()]
    assert any("step ms data compute network optimizer checkpoint" in line for line in lines), lines
    assert any("210 10 120 50 20 1" in line for line in lines), lines


def test_compute_is_shown_as_forward_and_backward_if_both_are_known(master: LiveMaster) -> None:
    phases = p.StepPhases(41, 50, 10.0, 0.21, 0.01, 0.12, 0.02, 0.001, 0.05, 0.04, 0.08)
    master.client("agent").call(p.Heartbeat("job", "w1", 41, phases=phases))
    lines = [" ".join(line.split()) for line in called("job", *at(master)).output.splitlines()]
    assert any("step ms data forward backward network optimizer checkpoint" in line for line in lines), lines
    assert any("210 10 40 80 50 20 1" in line for line in lines), lines
