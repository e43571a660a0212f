"""`dlrover-hooks rehearse` on real scripts: a good one passes, and of a bad one the right promise is named.

Each mistake is one that people make: see `tests/e2e/rehearsed.py`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.deep import deep
from tests.e2e.launched import REPOSITORY
from tests.waiting import until

SCRIPT = REPOSITORY / "tests" / "e2e" / "rehearsed.py"
PROMISES = ("1 each", "2 the", "3 a dead", "4 each", "5 a relaunch", "  what the script")


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Where rehearsals keep what they need, with a short path."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="dh-") as folder:
        yield Path(folder)


def started(folder: Path, temporary: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dlrover_hooks", "rehearse", *words]
    env = {name: value for name, value in os.environ.items() if not name.startswith("DLROVER_HOOKS_")}
    env |= {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(temporary), "COLUMNS": "250", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.PIPE, text=True)


def rehearsed(folder: Path, temporary: Path, *words: str) -> tuple[int, str]:
    """Its exit code and what it said."""
    process = started(folder, temporary, *words)
    try:
        _, said = process.communicate(timeout=300)
        return process.returncode, said
    finally:
        process.kill()
        process.wait()


def verdicts(said: str) -> dict[str, str]:
    """What was said of each promise, in one text with its hint."""
    rows: dict[str, str] = {}
    for line in said.partition("what was seen")[2].splitlines():
        name = next((name for name in PROMISES if line.startswith(name)), None) or next(reversed(rows), "")
        if name:
            rows[name] = rows.get(name, "") + " " + re.sub(r"\s+", " ", line)
    return rows


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).children(recursive=True)
    return []


@pytest.mark.deep
@pytest.mark.timeout(330)
def test_a_good_script_keeps_every_promise(tmp_path: Path, temporary: Path) -> None:
    """Two workers, one of them killed, and a relaunch with one; nothing of it is left, its checkpoints neither."""
    code, said = rehearsed(tmp_path, temporary, str(SCRIPT), "good", "--kill", "1", "--steps", "20", "--seed", "3")
    assert code == 0, said
    rows = verdicts(said)
    assert [" kept " in rows[name] for name in PROMISES] == [True] * 6, said
    assert "launched again with 1 instead of 2 workers behind step" in rows["5 a relaunch"]
    assert "bit-equal after each of 20 steps" in rows["4 each"]
    assert "requests the next batch before" not in said
    assert list(tmp_path.iterdir()) == []
    assert [path for path in temporary.iterdir() if "rehearsal" in path.name] == []


@pytest.mark.deep
@pytest.mark.timeout(330)
def test_what_a_restart_breaks_is_named(tmp_path: Path, temporary: Path) -> None:
    """range(epochs), an average of the weights that no checkpoint has, and a file that each step appends to."""
    (tmp_path / "faults").write_text("step=18 at=stepped kill\n")
    words = ("--faults", "faults", "--steps", "70", "-n", "1", "--out", "out", str(SCRIPT), "range,outside,twice")
    code, said = rehearsed(tmp_path, temporary, *words)
    assert code == 1, said
    rows = verdicts(said)
    assert "BROKEN" in rows["1 each"]
    assert "15 steps too many: 60, undisturbed 45" in rows["1 each"]
    assert "loader.epochs(n)" in rows["1 each"]
    assert "launched again with 1 workers behind step" in rows["5 a relaunch"]
    assert "steps too many" in rows["5 a relaunch"]
    assert " kept " in rows["2 the"]
    assert " kept " in rows["3 a dead"]
    begun = re.search(r"after a restart behind step (\d+)", rows["4 each"])
    assert begun is not None, said
    assert f"step {int(begun[1]) + 1}, rank 0: 0.weight differs" in rows["4 each"]
    assert "metrics.csv" in rows["  what the script"]
    assert (tmp_path / "out" / "with-faults" / "log.txt").exists()


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.timeout(330)
def test_a_loader_that_is_not_the_elastic_one(tmp_path: Path, temporary: Path) -> None:
    """No step is seen, so none is saved: a worker that dies loses everything."""
    code, said = rehearsed(tmp_path, temporary, "-n", "1", "--relaunch", "0", "--kill", "1", str(SCRIPT), "unwrapped")
    assert code == 1, said
    rows = verdicts(said)
    assert "in step 1 no batch was asked of the elastic loader" in rows["1 each"]
    assert "nothing was restored: 45 steps were lost" in rows["2 the"]


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.timeout(330)
def test_noise_and_a_loop_that_fetches_ahead_are_named(tmp_path: Path, temporary: Path) -> None:
    """The script draws random numbers that nobody seeded: no two runs of it are the same, faults or not. Its loop
    requests a batch before the optimizer steps on the one before, so a restart skips one.
    """
    words = ("-n", "1", "--relaunch", "0", "--kill", "1", "--steps", "12", "--seed", "5", str(SCRIPT), "ahead,noise")
    code, said = rehearsed(tmp_path, temporary, *words)
    assert code == 1, said
    rows = verdicts(said)
    assert "BROKEN" in rows["1 each"]
    assert "requests the next batch before optimizer.step()" in rows["1 each"]
    assert "step 1, rank 0: 0.weight differs" in rows["4 each"]
    assert "no fault had struck yet" in rows["4 each"]


def test_a_script_without_hooks_is_told_so(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "plain.py").write_text("print('trained')\n")
    code, said = rehearsed(tmp_path, temporary, "-n", "1", "plain.py")
    assert code == 1
    assert "no hook of dlrover-hooks saw a step" in said
    (tmp_path / "broken.py").write_text("raise ValueError('wrong')\n")
    code, said = rehearsed(tmp_path, temporary, "-n", "1", "broken.py")
    assert code == 1
    assert "the undisturbed run ended with 1" in said
    assert "ValueError: wrong" in said


@pytest.mark.parametrize("signum", [signal.SIGINT, deep(signal.SIGTERM)])
def test_a_signal_ends_it_and_leaves_nothing(tmp_path: Path, temporary: Path, signum: int) -> None:
    """Ctrl-C while a run is under way: its launcher, workers, master and keeper end, and its folder is removed."""
    (tmp_path / "idle.py").write_text("import threading; open('begun', 'w').close(); threading.Event().wait(600)\n")
    process = started(tmp_path, temporary, "-n", "1", "idle.py")
    until(lambda: (tmp_path / "begun").exists() or process.poll() is not None, "the script")
    running = family(process)
    assert len(running) == 4, [one.cmdline() for one in running]
    process.send_signal(signum)
    process.communicate(timeout=40)
    assert process.returncode == 128 + signum
    assert psutil.wait_procs(running, timeout=5)[1] == []
    assert list(temporary.glob("*rehearsal*")) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian.py"], "trian.py: no such file"),
        (["--faults", "faults.txt", "train.py"], "faults.txt:1"),
        (["--out", ".", "train.py"], "--out"),
        ([], "Missing argument"),
    ],
)
def test_what_must_be_mended_exits_78(words: list[str], said: str, tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "faults.txt").write_text("step=3 explode\n")
    code, text = rehearsed(tmp_path, temporary, *words)
    assert code == 78
    assert said in text
