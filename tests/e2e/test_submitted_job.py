"""A script that submits a job of several roles to this machine: what it prints, Ctrl-C, and where modules are found."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from dlrover_hooks.errors import MasterAway
from dlrover_hooks.job import DLJobBuilder
from dlrover_hooks.job.local import local_job
from tests.descendants import descendants
from tests.waiting import WAIT_S, until

REPOSITORY = Path(__file__).parents[2]
SCRIPT = """
import os, sys, threading
from dlrover_hooks.job import DLJobBuilder, current_worker

def wait():
    folder = current_worker().config["folder"]
    open(os.path.join(folder, "begun"), "w").close()
    while not os.path.exists(os.path.join(folder, "end")):
        threading.Event().wait(0.02)

def fail():
    raise ValueError("no such column")

if __name__ == "__main__":
    job = DLJobBuilder(f"submitted-{os.getpid()}").config(folder=sys.argv[1])
    job.role("main").run(f"train:{sys.argv[2]}").workers(2).restarts(2)
    raise SystemExit(job.build().submit())
"""


class Submitter:
    """The process of the script, which is started in another folder than its own."""

    def __init__(self, folder: Path, function: str) -> None:
        self.folder = folder
        own = folder / "app"
        own.mkdir()
        (own / "train.py").write_text(SCRIPT)
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(own / "train.py"), str(folder), function], cwd=folder, stderr=log, stdout=log
            )

    def begun(self) -> None:
        until((self.folder / "begun").exists, "a worker has begun", diagnostic=self._log.read_text)

    def ended(self, timeout_s: float = WAIT_S) -> tuple[int, list[str]]:
        """The exit code, and what the submitter itself has said."""
        code = self.process.wait(timeout_s)
        lines = self._log.read_text().splitlines()
        return code, [line.removeprefix("[dlrover-hooks] ") for line in lines if line.startswith("[dlrover-hooks]")]

    def output(self) -> str:
        return self._log.read_text()


def test_a_script_says_that_its_job_runs_and_is_done(tmp_path: Path) -> None:
    script = Submitter(tmp_path, "wait")
    script.begun()
    (tmp_path / "end").touch()
    code, (begin, end) = script.ended()
    name = f"job submitted-{script.process.pid}"
    assert code == 0
    assert begin.startswith(f"{name} runs: 2 main. Its master is at http://127.0.0.1:")
    assert end.startswith(f"{name} is done after ")


@pytest.mark.deep
def test_a_script_says_why_its_job_failed_and_what_followed_each_failure(tmp_path: Path) -> None:
    script = Submitter(tmp_path, "fail")
    code, said = script.ended()
    assert code == 1
    assert "ValueError: no such column; the budget of 2 for 'worker main'" in said[-1]
    assert "is started again (life 2)" in script.output()


@pytest.mark.deep
def test_ctrl_c_stops_the_job_without_a_traceback(tmp_path: Path) -> None:
    script = Submitter(tmp_path, "wait")
    script.begun()
    children = psutil.Process(script.process.pid).children(recursive=True)
    assert children
    script.process.send_signal(signal.SIGINT)
    code, said = script.ended()
    assert code == 130
    assert "is stopped after" in said[-1]
    assert said[-1].endswith(": Ctrl-C")
    assert "Traceback" not in script.output()
    psutil.wait_procs(children, timeout=30.0)
    assert not [one for one in children if one.is_running()]


@pytest.mark.deep
def test_a_status_that_no_master_answers_leaves_the_job_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_job, "_STATUS_S", 0.5)
    (tmp_path / "train.py").write_text(SCRIPT)
    job = DLJobBuilder(f"silent-{os.getpid()}").config(folder=str(tmp_path)).env(PYTHONPATH=str(tmp_path))
    handle = job.role("main").run("train:wait").build().submit(wait=False)
    try:
        until((tmp_path / "begun").exists, "the worker has begun")
        (master,) = descendants(os.getpid(), "dlrover_hooks.master", handle.name)
        master.suspend()
        try:
            with pytest.raises(MasterAway):
                handle.status()
        finally:
            master.resume()
        (tmp_path / "end").touch()
        assert handle.wait(WAIT_S) == 0, handle.status()
    finally:
        handle.stop()
