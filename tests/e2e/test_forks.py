"""Whatever a forked child does with its parent's objects, the run goes on as if it had not been there."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from dlrover_hooks.checkpoint.save.background_saves import BackgroundSaves
from dlrover_hooks.checkpoint.save.copy_thread import CopyThread
from dlrover_hooks.checkpoint.storage import generations
from dlrover_hooks.data.leased.leased_loader import LeasedLoader
from dlrover_hooks.data.leased.shard_dataset import ShardDataset
from dlrover_hooks.errors import UsageError
from tests.e2e.launched import Launched
from tests.e2e.master_process import LiveMaster
from tests.ranks import ROOT

SCRIPT = """
import gc, os, signal, sys, threading, torch
from torch.utils.data import DataLoader, TensorDataset
from dlrover_hooks import AsyncCheckpointer, elastic_loader
from dlrover_hooks.checkpoint.save.overlapped_writer import LazyWriter

torch.set_num_threads(1)  # its thread pool does not outlive a fork
go, fill = threading.Event(), LazyWriter.fill
def held_back(self, shot, target, places, *, alone=False):
    if alone:
        go.wait(60)
    fill(self, shot, target, places, alone=alone)
LazyWriter.fill = held_back

def forked(what):
    "Runs while a copy behind the step is under way. True in a child that is to go on."
    if (child := os.fork()) == 0:
        signal.alarm(20)
        what()
        return True
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 7), f"step {c.step}: the child ended with {status}"
    return False

def sweep():
    global loader
    c.close()
    loader = None
    gc.collect()
    sys.exit(7)

def fail():
    sys.stderr = open(os.devnull, "w")
    sys.excepthook = lambda *_: os._exit(7)
    raise RuntimeError("only in the child")

THINGS = {4: lambda: sys.exit(7), 6: fail, 8: sweep} if LAUNCHED else {4: lambda: None}
parent, left, twin = os.getpid(), 3, False
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
loader = elastic_loader(DataLoader(TensorDataset(torch.randn(224, 64)), batch_size=16), optimizer=optimizer)
with AsyncCheckpointer(URL, model=model, optimizer=optimizer, loader=loader, save_every=1, snapshot="lazy",
                       job=JOB) as c:
    assert c.step == 0, f"begins at step {c.step}: another life was here"
    for (x,) in loader:
        go.clear()
        if not twin and c.step in THINGS:
            twin = forked(THINGS[c.step])
        go.set()
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        left -= twin
        if not left:
            break  # a child that trained on ends the block as if training were over
assert (os.getpid() == parent) != twin
assert twin or c.step == 14, c.step
"""


def _whole(url: str) -> list[int]:
    return [one.generation.step for one in generations.scan(url, None, None).manifests]


@pytest.mark.deep
def test_a_launched_worker_outlives_whatever_its_children_do(launch: Callable[..., Launched], tmp_path: Path) -> None:
    """They leave the block by exit, error and `close`, while a save is under way: none gives up the seat."""
    url = str(tmp_path / "saved")
    run = launch(f"LAUNCHED, URL, JOB = True, {url!r}, None\n{SCRIPT}")
    code, errors = run.end(60.0)
    assert code == 0, errors
    assert "restarting" not in errors
    assert 14 in _whole(url)


@pytest.mark.deep
def test_a_child_that_trains_on_is_told_that_nothing_is_saved(job: str, tmp_path: Path) -> None:
    """Without a launcher; it ends the block as if training were over."""
    url = str(tmp_path / "saved")
    script = f"LAUNCHED, URL, JOB = False, {url!r}, {job!r}\n{SCRIPT}"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert f"job {job} rank 0: process" in done.stderr
    assert "was forked from this worker: nothing of it is saved" in done.stderr
    assert 14 in _whole(url)


def _child(act: Callable[[], object]) -> int:
    """The exit code of a forked child that does `act`; it is killed after a while."""
    child = os.fork()
    if child == 0:
        threading.Timer(60.0, os._exit, (9,)).start()
        try:
            act()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_leases_are_the_parents(live_master: LiveMaster, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that reads on is refused; when it closes the loader the parent keeps its leases."""
    for name, value in (("MASTER", live_master.url), ("TOKEN", live_master.token or ""), ("JOB", job)):
        monkeypatch.setenv(f"DLROVER_HOOKS_{name}", value)
    loader = LeasedLoader(DataLoader(ShardDataset(list(range(12)), shard_size=4, epochs=2), batch_size=2))
    seen, rows = list[int](), iter(loader)
    seen += next(rows).tolist()
    loader.mark()

    def read_on() -> None:
        with pytest.raises(UsageError, match=f"lent to process {parent}, not to what was forked"):
            next(rows)
        with pytest.raises(UsageError, match="lent to process"):
            next(iter(loader))
        loader.close()

    parent = os.getpid()
    assert _child(read_on) == 0
    for batch in rows:
        seen += batch.tolist()
        loader.mark()
    loader.close()
    assert sorted(seen) == list(range(12))


def test_what_runs_beside_the_step_is_the_parents() -> None:
    """A copy and a write are under way, their locks held: the child waits for neither, and does neither again."""
    go, done = threading.Event(), list[int]()
    aside, behind = CopyThread(), BackgroundSaves()

    def copy() -> None:
        go.wait(60)

    aside.begin(copy, 0)
    behind.save("folder", lambda: (go.wait(60), done.append(os.getpid())))

    def end() -> None:
        aside.wait()
        aside.close()
        behind.room()
        behind.wait()
        behind.close()

    with behind._changed:  # as the thread does now and then
        assert _child(end) == 0
    go.set()
    end()
    assert done == [os.getpid()]
