"""What a node measures by itself: in a real child process, which may hang or die, and what each measurement finds."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrover_hooks.host.child_process import ALIVE
from dlrover_hooks.node_check import local_measures
from dlrover_hooks.node_check.local_check import check_folder, measure_node
from dlrover_hooks.node_check.own_report import alone, own_of, told
from dlrover_hooks.protocol import Measure, MeasureKind, NodeVerdict, speed_text
from tests.e2e.launched import REPOSITORY

COMPUTE, DISK_WRITE, DISK_READ = MeasureKind.COMPUTE, MeasureKind.DISK_WRITE, MeasureKind.DISK_READ


def with_torch(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Children import this as torch."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{REPOSITORY}")


def test_a_measurement_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a driver may hang when torch looks for devices."""
    with_torch(tmp_path, "import threading\nthreading.Event().wait()\n", monkeypatch)
    turns, before = list[set[int]](), set(ALIVE)
    found = measure_node(str(tmp_path), 1.0, turn=lambda: turns.append(ALIVE - before))
    assert found == (Measure(COMPUTE, "start", failed="no result within 1 s"),)
    (pid,) = turns[-1]
    assert before == ALIVE
    assert not os.path.exists(f"/proc/{pid}")


def test_a_measurement_that_ends_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_torch(tmp_path, "import os\nos.abort()\n", monkeypatch)
    (found,) = measure_node(str(tmp_path), 60.0)
    assert found.failed == "the process that measures ended: SIGABRT"


def test_what_turn_raises_ends_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher is told to end meanwhile."""
    with_torch(tmp_path, "import threading\nthreading.Event().wait()\n", monkeypatch)

    def turn() -> None:
        raise KeyboardInterrupt

    before = set(ALIVE)
    with pytest.raises(KeyboardInterrupt):
        measure_node(str(tmp_path), 60.0, turn=turn)
    assert before == ALIVE


def first_of(folder: str) -> local_measures.MeasureTask:
    return next(local_measures.tasks(folder))


def test_without_torch_numpy_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    task = first_of("/tmp")
    assert (task.kind, task.what) == (COMPUTE, "cpu")
    assert task.run() > 1e6


@pytest.mark.parametrize("torch", [False, True])
def test_a_wrong_product_is_found(monkeypatch: pytest.MonkeyPatch, torch: bool) -> None:
    """One element of a million, as of a device with a defect."""
    if torch:
        import torch as module

        right = module.matmul

        def wrong_torch(left: Any, other: Any, out: Any) -> None:
            right(left, other, out=out)
            out[7, 11] += 1

        monkeypatch.setattr(module, "matmul", wrong_torch)
    else:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        right_numpy = np.matmul

        def wrong_numpy(left: Any, other: Any, out: Any) -> None:
            right_numpy(left, other, out=out)
            out[7, 11] += 1

        monkeypatch.setattr(np, "matmul", wrong_numpy)
    with pytest.raises(ArithmeticError, match="a matrix product is wrong"):
        first_of("/tmp").run()


def test_each_accelerator_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whatever make: the interface is `torch.accelerator`. Here it shows two, which are the CPU."""
    import torch

    waited: list[int] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    monkeypatch.setattr(local_measures, "_DEVICE_SIZE", 64)
    monkeypatch.setattr(local_measures, "_DEVICE_BYTES", 1 << 20)
    monkeypatch.setattr(local_measures, "_BUDGET_S", 0.01)
    tasks = list(local_measures._by_torch())  # pyright: ignore[reportPrivateUsage]
    assert [(task.kind, task.what) for task in tasks] == [
        (kind, f"cpu:{index}") for index in range(2) for kind in (COMPUTE, MeasureKind.MEMORY)
    ]
    assert all(task.run() > 0 for task in tasks)
    assert set(waited) == {0, 1}


def disk_tasks(folder: Path) -> dict[MeasureKind, float | str]:
    """The results of the disk's measurements."""
    found: dict[MeasureKind, float | str] = {}
    for task in local_measures.tasks(str(folder)):
        if task.kind in (DISK_WRITE, DISK_READ):
            try:
                found[task.kind] = task.run()
            except OSError as error:
                found[task.kind] = error.strerror or str(error)
    return found


def test_a_disk_leaves_no_file_behind(tmp_path: Path) -> None:
    found = disk_tasks(tmp_path)
    assert set(found) == {DISK_WRITE, DISK_READ}
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_returns_other_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def damage(fd: int) -> None:
        fsync(fd)
        os.pwrite(fd, b"\x00\xff", 100)

    monkeypatch.setattr(os, "fsync", damage)
    found = disk_tasks(tmp_path)
    assert found[DISK_READ] == "the bytes that were read are not those that were written"


def test_a_disk_that_cannot_be_written_is_not_read(tmp_path: Path) -> None:
    assert disk_tasks(tmp_path / "missing") == {DISK_WRITE: "No such file or directory"}


def test_the_folder_is_that_of_the_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLROVER_HOOKS_SAVE_TO", str(tmp_path))
    assert check_folder() == str(tmp_path)
    monkeypatch.setenv("DLROVER_HOOKS_SAVE_TO", "s3://bucket/run")
    assert os.path.isdir(check_folder())


def test_the_report_of_a_node_alone() -> None:
    measures = (Measure(COMPUTE, "cpu", speed=1e9), Measure(DISK_WRITE, "/x", failed="Read-only file system"))
    report = alone("a", measures)
    own = own_of(report, "a")
    assert (own.verdict, own.reason) == (NodeVerdict.BAD, "disk write on /x: Read-only file system")
    assert own_of(alone("a", measures[:1]), "a").verdict is NodeVerdict.OK
    assert [told(one) for one in measures] == ["compute on cpu: 1 GFLOP/s", "disk write on /x: Read-only file system"]


@pytest.mark.parametrize(
    ("kind", "speed", "text"),
    [
        (COMPUTE, 4.89e13, "48.9 TFLOP/s"),
        (COMPUTE, 1.2e16, "12 PFLOP/s"),
        (None, 3e9, "3 GB/s"),
        (DISK_WRITE, 999.0, "999 B/s"),
        (None, 0.0, "0 B/s"),
        (None, 999_900.0, "1 MB/s"),
    ],
)
def test_speeds_have_units(kind: MeasureKind | None, speed: float, text: str) -> None:
    assert speed_text(kind, speed) == text
