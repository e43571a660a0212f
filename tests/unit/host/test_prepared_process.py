"""Processes that limit themselves before their program runs: what the program finds, and what fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dlrover_hooks.host.child_process import ALIVE, Child
from dlrover_hooks.host.prepared_process import Preparation, prepared_command

IGNORED_BY_PYTHON = sum(1 << number - 1 for number in (signal.SIGPIPE, signal.SIGXFSZ))
FORKS: list[int] = []
os.register_at_fork(before=lambda: FORKS.append(os.getpid()))


def output(command: list[str], env: dict[str, str], limits: Preparation) -> str:
    """Of a child that ends with success."""
    heard, said = os.pipe()
    with open(heard, encoding="ascii") as lines:
        child = Child("it", command, env=env, stdout=said, limits=limits)
        os.close(said)
        found = lines.read()
    assert child.end(60) == 0
    return found


def test_the_program_finds_its_limits_its_environment_and_nothing_else(tmp_path: Path) -> None:
    """No setting of the interpreter that prepared it is left: no LC_CTYPE, no ignored signal, no descriptor."""
    entered = tmp_path / "cgroup.procs"
    script = "env; grep SigIgn /proc/self/status; cat entered; ulimit -d; nproc; ls /proc/self/fd"
    first = min(os.sched_getaffinity(0))
    with entered.open("wb", buffering=0) as group:
        limits = Preparation(cgroups=(group.fileno(),), cores=frozenset({first}), data_bytes=1 << 30)
        command = ["sh", "-c", script.replace("entered", str(entered))]
        found = output(command, {"PATH": os.environ["PATH"], "PWD": "/", "ONE": "a=b"}, limits).splitlines()
    assert {line for line in found if "=" in line and not line.startswith("PWD")} == {
        f"PATH={os.environ['PATH']}", "ONE=a=b",
    }  # fmt: skip
    ignored, *rest = [line for line in found if "=" not in line]
    assert int(ignored.removeprefix("SigIgn:"), 16) & IGNORED_BY_PYTHON == 0
    # "0" was written to the group; KiB; one core; `ls` itself opens the folder as 3
    assert rest == [f"0{1 << 20}", "1", "0", "1", "2", "3"]


def test_no_function_of_this_process_runs_in_the_new_one() -> None:
    """Locks and libraries of the other threads are in any state after a fork: a start is a vfork, and then exec."""
    FORKS.clear()
    assert output(["true"], dict(os.environ), Preparation(death_signal=signal.SIGKILL)) == ""
    assert FORKS == []


@pytest.mark.parametrize("death", [None, signal.SIGKILL])
def test_a_program_that_does_not_exist_is_an_error_of_the_start(death: signal.Signals | None) -> None:
    before = set(ALIVE)
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        Child("it", ["no-such-program"], env=dict(os.environ), limits=Preparation(death_signal=death))
    assert before == ALIVE


def test_a_limit_that_cannot_be_set_is_an_error_of_the_start() -> None:
    cores = frozenset({max(os.sched_getaffinity(0)) + 4000})
    with pytest.raises(OSError, match="Invalid argument"):
        Child("it", ["true"], env=dict(os.environ), limits=Preparation(cores=cores))


def test_what_fails_is_on_stderr_without_a_report() -> None:
    command = prepared_command(["no-such-program"], Preparation())
    ended = subprocess.run(command, capture_output=True, check=False, text=True)
    assert ended.returncode == 127
    assert ended.stderr == "cannot start the program: [Errno 2] No such file or directory: 'no-such-program'\n"


def test_a_process_whose_parent_ended_first_ends() -> None:
    """The kernel reports no death that was before it was asked to."""
    command = prepared_command([sys.executable, "-c", "print('ran')"], Preparation(death_signal=signal.SIGTERM))
    command[command.index(str(os.getpid()))] = "1"
    ended = subprocess.run(command, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, b"")
