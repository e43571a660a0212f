"""A script that ends while gloo's thread is not done with its last collective."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ENDING = """
import importlib, sys, threading, time
import torch
import torch.distributed as dist

store, rank = dist.FileStore(sys.argv[1], 2), int(sys.argv[2])
importlib.import_module(sys.argv[3])

def busy(_):  # it needs the interpreter for longer than the main thread does
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        pass
    print("on the main thread" if threading.current_thread() is threading.main_thread() else "in gloo's thread")

dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
if rank == 1:
    store.wait(["ready"])
reduced = dist.all_reduce(torch.ones(4), async_op=True).get_future()
reduced.then(busy)
store.set("ready", "")
reduced.wait()
print("end")
"""


@pytest.mark.deep
def test_a_script_may_end_right_behind_its_last_collective(tmp_path: Path) -> None:
    """gloo's thread needs the interpreter once more: the end waits for that, or the process would abort."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ENDING, str(tmp_path / "store"), str(rank), module],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank, module in enumerate(("dlrover_hooks.pytorch.ddp_exactness", "dlrover_hooks.pytorch.dcp_writer"))
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=200) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert sorted(outputs[0][0].splitlines()) == ["end", "in gloo's thread"]
