"""A launched Lightning job is interrupted, launched again, and once more when it is finished."""

import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import uuid
from collections import Counter
from pathlib import Path
from typing import cast

import pytest

from tests.waiting import until

REPOSITORY = Path(__file__).parents[2]
RECORDED = REPOSITORY / "examples" / "demo" / "recorded.py"
EPOCHS, WINDOWS = 2, 640


def evidence_of(records: Path):
    spec = importlib.util.spec_from_file_location("evidence", RECORDED.with_name("evidence.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Run(records)


def launch(folder: Path, job: str, name: str, *options: str) -> subprocess.Popen[str]:
    records = folder / name
    records.mkdir()
    command = [sys.executable, "-m", "dlrover_hooks", "run", "-n", "2", "--job", job, "--standby", "0", *options]
    command += [str(RECORDED), "--epochs", str(EPOCHS), "--windows", str(WINDOWS)]
    env = os.environ | {"DEMO_RECORDS": str(records), "DLROVER_HOOKS_SAVE_EVERY": "1", "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_step(launcher: subprocess.Popen[str], records: Path, step: int) -> None:
    run = evidence_of(records)

    def runs() -> None:
        assert launcher.poll() is None, launcher.communicate()[0]

    until(lambda: run.read().step >= step, f"step {step}", between=runs)


@pytest.mark.deep
def test_interrupted_resumed_and_finished(tmp_path: Path) -> None:
    """Ctrl-C: the keeper makes the newest generation durable; the same job goes on there, each sample exactly once."""
    job = f"relaunch-{uuid.uuid4().hex[:8]}"
    first = launch(tmp_path, job, "first")
    wait_for_step(first, tmp_path / "first", 13)
    first.send_signal(signal.SIGINT)
    output, _ = first.communicate(timeout=200)
    assert first.returncode == 130, output
    latest = json.loads((tmp_path / "saved" / "latest.json").read_text())
    step, saved = latest["generation"]["step"], tmp_path / "saved"
    again = shlex.join(["dlrover-hooks", *cast(list[str], first.args)[3:]])
    said = f"saved step {step} at {saved}; start again with: {again}"
    assert output.splitlines()[-1].endswith(said), output
    second = launch(tmp_path, job, "second")
    output, _ = second.communicate(timeout=200)
    assert second.returncode == 0, output
    before, after = evidence_of(tmp_path / "first").read(), evidence_of(tmp_path / "second").read()
    assert set(after.restored_from) == {"storage"}
    begin = min(after.lineage())
    assert begin >= 13, f"at most the step under way is lost, latest was {latest}"
    lines = [line for step, found in before.lineage().items() if step < begin for line in found]
    lines += [line for found in after.lineage().values() for line in found]
    counts = Counter((line["epoch"], index) for line in lines for index in line["ids"])
    assert counts == Counter((epoch, index) for epoch in range(EPOCHS) for index in range(WINDOWS))

    third = launch(tmp_path, job, "third", "-n", "1")
    output, _ = third.communicate(timeout=200)
    assert third.returncode == 0, output
    assert not list((tmp_path / "third").glob("*.jsonl")), "nothing is left to train"
