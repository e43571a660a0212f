"""The demos on a small scale, and the judgement of the first one: it must notice a broken promise."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.ranks import ROOT, left_of

DEMO = ROOT / "examples" / "demo"


@pytest.fixture(scope="module")
def evidence() -> ModuleType:
    spec = importlib.util.spec_from_file_location("evidence", DEMO / "evidence.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_shot_three_times_and_bit_identical(tmp_path: Path) -> None:
    """Two workers, a kill -9 of each and of the master: exactly once, difference exactly 0.0, restored from memory."""
    options = ["--epochs", "2", "--windows", "1200", "--out", str(tmp_path), "--seed", "7"]
    command = [sys.executable, str(DEMO / "demo.py"), *options]
    found = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert found.returncode == 0, found.stdout + found.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["kills"] >= 3
    assert report["visited_exactly_once"] is True
    assert report["max_param_diff"] == 0.0
    assert "memory" in report["restored_from"]
    assert report["steps"] == 76
    assert report["samples"] == 2400
    assert report["final_loss"] == report["undisturbed_final_loss"]
    assert len(report["recovery_s"]) == 3
    assert (tmp_path / "loss.png").stat().st_size > 10_000


def written(folder: Path, lives: dict[str, list[tuple[int, list[int]]]]) -> Path:
    """Records of one worker: per life the (step, ids) it trained, epoch 0."""
    folder.mkdir()
    for number, (name, steps) in enumerate(lives.items()):
        head = {"pid": number, "master": "", "restored_from": None if number == 0 else "memory", "at": number}
        lines = [head] + [{"step": step, "epoch": 0, "ids": ids, "loss": 1.0, "at": number} for step, ids in steps]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize(
    ("lives", "kept"),
    [
        ({"0-0": [(1, [0, 1]), (2, [2, 3])], "1-0": [(2, [2, 3]), (3, [4, 5])]}, True),
        ({"0-0": [(1, [0, 1]), (2, [2, 3])], "1-0": [(3, [2, 3]), (4, [4, 5])]}, False),  # trained twice
        ({"0-0": [(1, [0, 1])], "1-0": [(2, [4, 5])]}, False),  # lost
        ({"0-0": [(1, [0, 1])], "1-0": [(3, [2, 3]), (4, [4, 5])]}, False),  # a step is missing
    ],
)
def test_the_evidence_sees_what_was_lost_or_repeated(
    evidence: ModuleType, tmp_path: Path, lives: dict[str, list[tuple[int, list[int]]]], kept: bool
) -> None:
    run = evidence.Run(written(tmp_path / "records", lives)).read()
    assert evidence.visited_exactly_once(run, epochs=1, windows=6, workers=1) is kept


@pytest.mark.deep
def test_the_scaling_demo_grows_and_loses_no_step(tmp_path: Path) -> None:
    """It ends once a plan is decided: from one worker to two, each step once, and a picture of it."""
    picture = tmp_path / "scaling.png"
    pace = ["--decided", "1", "--more", "0", "--plan-window", "500ms", "--max-workers", "2", "--standby", "0"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("DLROVER_HOOKS_")}
    env |= {"PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(tmp_path), "MPLBACKEND": "agg"}
    command = [sys.executable, str(ROOT / "examples/scaling/demo.py"), "--out", str(picture), *pace]
    with (tmp_path / "said.txt").open("wb") as output:
        demo = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=output, stderr=output, start_new_session=True)
        try:
            code = demo.wait(240)
        finally:
            if demo.poll() is None:  # with its launcher, and so with all nodes
                os.killpg(demo.pid, signal.SIGKILL)
                demo.wait()
    said, log = (tmp_path / "said.txt").read_text(), picture.with_suffix(".log").read_text()
    assert code == 0, said + log
    rows = [line.split(",") for line in picture.with_suffix(".csv").read_text().splitlines()]
    assert [int(row[1]) for row in rows] == list(range(1, len(rows) + 1)), log
    assert {int(row[2]) for row in rows} == {1, 2}, said
    assert re.search(r"^plan 3, worker 1 -> 2 .*: (kept|rolled back)$", said, re.M), said
    assert f"1 to 2 workers, {len(rows)} steps, 0 missing, 0 made twice; plans decided: 1" in said
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000
    assert left_of(f"demo-scaling-{demo.pid}") == []
