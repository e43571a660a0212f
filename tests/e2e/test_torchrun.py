"""`torchrun --rdzv-backend=dlrover` with real agents and workers."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.kept import runtime_folder
from tests.e2e.launched import all_gone
from tests.e2e.master_process import LiveMaster
from tests.e2e.torchruns import Torchruns, environment, torchrun

TRAIN = """
    import json, os, sys, threading, time
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset
    from dlrover_hooks import AsyncCheckpointer, elastic_loader

    def note(ev, step):
        line = {"ev": ev, "step": step, "pid": os.getpid(), "node": os.environ["DLROVER_HOOKS_NODE"]}
        line |= {"rank": int(os.environ["RANK"]), "world": int(os.environ["WORLD_SIZE"]), "at": time.time()}
        line |= {"port": os.environ["MASTER_PORT"]}
        fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
        os.write(fd, (json.dumps(line) + chr(10)).encode())
        os.close(fd)

    torch.distributed.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    data = DataLoader(TensorDataset(torch.randn(512, 8), torch.randn(512, 1)), batch_size=4, shuffle=True)
    loader = elastic_loader(data, optimizer=optimizer, global_batch_size=12, accumulation="manual")
    stop = torch.zeros(1)
    with AsyncCheckpointer("saved", model=model, optimizer=optimizer, loader=loader, save_every=1, persist_every=1):
        for epoch in loader.epochs(10**6):
            for inputs, targets in loader:
                loss = torch.nn.functional.mse_loss(model(inputs), targets) * loader.loss_scale
                loss.backward()
                if not loader.step_ends:
                    continue
                optimizer.step()
                optimizer.zero_grad()
                note("step", int(optimizer.state[next(model.parameters())]["step"]))
                threading.Event().wait(0.03)
                stop[0] = os.path.exists(sys.argv[2])
                torch.distributed.all_reduce(stop)
                if stop:
                    break
            if stop:
                break
    note("done", 0)
    torch.distributed.destroy_process_group()
"""


@pytest.fixture
def run(tmp_path: Path, live_master: LiveMaster, job: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Torchruns]:
    with runtime_folder(monkeypatch):
        flags = (f"--rdzv-id={job}", "--nnodes=1:3", "--max-restarts=3")
        made = Torchruns(tmp_path, live_master.url, TRAIN, *flags, conf="last_call=2", token=live_master.token)
        yield made
        made.close()


@pytest.mark.requirement("DL-77", "DL-80", "DL-81", "DL-90", "ED-22", "ED-23", "ED-40", "ED-80", "EZ-13")
@pytest.mark.deep
@pytest.mark.timeout(400)
def test_the_story_of_one_job(run: Torchruns, live_master: LiveMaster) -> None:
    """Two nodes meet; a worker dies, the master dies, a node dies, a node comes, the node of rank 0 dies: it trains on.

    Workers are told nothing but torchrun's flags, and resume by themselves. Ranks of survivors are stable.
    """
    run.start("a")
    run.start("b")
    first = run.training(2)
    one = next(node for node, life in first.items() if life["rank"] == 1)
    zero = next(node for node in first if node != one)

    run.wait_for(lambda lives: lives[-1]["step"] > 10)
    run.kill_worker(one)
    before = len(run.read())
    second = run.training(2, before)
    assert {node: life["rank"] for node, life in second.items()} == {zero: 0, one: 1}
    assert min(life["step"] for life in second.values()) > 5, "resumed by the master that torchrun named"
    assert {life["port"] for life in second.values()} != {life["port"] for life in first.values()}

    live_master.kill()
    live_master.restart()
    before = len(run.read())
    third = run.training(2, before)
    run.wait_for(lambda lives: len(lives) > before + 60)
    assert {life["pid"] for life in run.read()[before:]} == {life["pid"] for life in second.values()}, third

    run.kill(one)
    before = len(run.read())
    fourth = run.training(1, before)
    assert {node: life["rank"] for node, life in fourth.items()} == {zero: 0}

    before = len(run.read())
    run.start("c")
    fifth = run.training(2, before)
    assert {node: life["rank"] for node, life in fifth.items()} == {zero: 0, "c": 1}

    run.kill(zero)
    before = len(run.read())
    sixth = run.training(1, before)
    assert {node: life["rank"] for node, life in sixth.items()} == {"c": 0}
    assert sixth["c"]["step"] >= fifth[zero]["step"] > second[zero]["step"]

    assert run.end() == {"c": 0}, run.logs()
    assert all_gone([life["pid"] for life in run.read()])


@pytest.mark.slow
def test_what_must_be_mended_is_said(live_master: LiveMaster, tmp_path: Path) -> None:
    """The last words of torchrun are ours. More of them: tests/contracts/test_rendezvous.py."""
    endpoint = f"--rdzv-endpoint={live_master.url.removeprefix('http://')}"
    command = torchrun(endpoint, "--rdzv-id=job", str(tmp_path / "none.py"), conf="token=wrong")
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "The bearer token is wrong or missing." in done.stderr, done.stderr
