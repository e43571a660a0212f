"""A rank that the others wait for is named, with the part of its steps that is slow; it is replaced, or its node."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from dlrover_hooks import protocol as p
from tests.e2e.launched import REPOSITORY, Launched
from tests.waiting import until

SCRIPT = """
    import torch
    import torch.distributed as dist
    from dlrover_hooks import AsyncCheckpointer, elastic_loader
    from dlrover_hooks.worker import step_clock
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, Dataset

    step_clock.WINDOW_S = 0.5

    def work(part):
        until = time.perf_counter() + 0.02
        while dist.get_rank() == 1 and os.path.exists(part) and time.perf_counter() < until:
            pass

    class Samples(Dataset):
        def __len__(self):
            return 1 << 30

        def __getitem__(self, index):
            work("data")
            return torch.ones(8)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(8, 8)

        def forward(self, batch):
            work("compute")
            return self.one(batch)

    def main():
        dist.init_process_group("gloo")
        net = DistributedDataParallel(Model())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loader = elastic_loader(DataLoader(Samples(), batch_size=1, shuffle=True), optimizer=optimizer)
        with AsyncCheckpointer(model=net, optimizer=optimizer, loader=loader) as saves:
            for batch in loader:
                optimizer.zero_grad()
                net(batch).sum().mul(0.0).backward()
                optimizer.step()
                ends = torch.tensor(float(os.path.exists("end")))
                dist.all_reduce(ends)  # both leave at the same step
                if ends:
                    break

    main()
    """


def vitals(job: Launched) -> list[p.RankUse]:
    command = [sys.executable, "-m", "dlrover_hooks", "vitals", job.job, "--json"]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(job.temporary)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60.0, check=True, env=env)
    return list(msgspec.json.decode(done.stdout, type=p.JobVitals).ranks)


@pytest.mark.deep
@pytest.mark.timeout(180)
def test_the_slow_rank_and_its_phase_are_named(launch: Callable[..., Launched], tmp_path: Path) -> None:
    (tmp_path / "compute").touch()
    job = launch(SCRIPT, "--nproc-per-node", "2", "--standby", "0")
    for part, following in (("compute", "data"), ("data", "")):
        assert job.says(f" is slow: its {part} takes ", 90.0)
        fast, slow = vitals(job)
        assert fast.straggler is None
        assert slow.straggler is not None
        assert slow.straggler.phase is p.StepPhase(part)
        assert fast.phases is not None
        assert fast.phases.network_s is not None, "the wait for the slow rank is known"
        if following:
            (tmp_path / following).touch()
        (tmp_path / part).unlink()
    assert job.says(" is no longer slow, after ", 60.0)
    assert vitals(job)[1].straggler is None
    (tmp_path / "end").touch()
    code, said = job.end()
    assert code == 0, said
    assert len(re.findall(r"rank 1 \(.*\) is slow: its (compute|data) takes", said)) == 2
    assert "rank 0 (" not in said


POLICIES = """
    from pathlib import Path

    import torch
    import torch.distributed as dist
    from dlrover_hooks import AsyncCheckpointer, elastic_loader
    from dlrover_hooks.worker import step_clock
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, Dataset

    step_clock.WINDOW_S = 0.5

    def record(name, text):
        fd = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, text.encode())
        os.close(fd)

    class Samples(Dataset):
        def __len__(self):
            return 1 << 30

        def __getitem__(self, index):
            return torch.tensor(index)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(1, 1)

        def forward(self, batch):
            until = time.perf_counter() + 0.06  # longer than another process may keep a fast rank waiting
            while is_slow and time.perf_counter() < until:
                pass
            return self.one(torch.ones(len(batch), 1))

    def main():
        global is_slow
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
        slow, mine = Path("slow"), (str(os.getpid()), os.environ["DLROVER_HOOKS_NODE"])
        net = DistributedDataParallel(Model())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        batches = DataLoader(Samples(), batch_size=2, shuffle=True)
        loader = elastic_loader(batches, optimizer=optimizer, global_batch_size=4)
        with AsyncCheckpointer(model=net, optimizer=optimizer, loader=loader) as saves:
            for batch in loader:
                if rank == 1 and not slow.exists():
                    record("slow", mine[0])
                is_slow = slow.exists() and slow.read_text() in mine
                record("batches", f"{saves.step} {world} " + " ".join(map(str, batch.tolist())) + chr(10))
                optimizer.zero_grad()
                net(batch).sum().mul(0.0).backward()
                optimizer.step()
                ends = torch.tensor(float(os.path.exists("end")))
                dist.all_reduce(ends)  # all leave at the same step
                if ends:
                    break

    main()
    """


REASON = r"rank \d \(b\) is slow: its compute takes .* s per step, the median of all 2 ranks is .* s, for \d+ s"
EXCLUDING = rf"{REASON}\. Excluding node b \(1 of 3 actions because of slow ranks\)"


def recorded(folder: Path) -> list[list[int]]:
    """Of each batch: the steps made before it, the world size, the samples."""
    lines = (folder / "batches").read_text().splitlines() if (folder / "batches").exists() else []
    return [[int(word) for word in line.split()] for line in lines]


def trains_on(folder: Path, world: int, steps: int) -> None:
    """Wait until a world of that size has made so many steps since now."""
    begun = len(recorded(folder))
    until(
        lambda: sum(one[1] == world for one in recorded(folder)[begun:]) >= 2 * steps,
        f"{steps} steps in a world of {world}",
        90.0,
    )


def each_step_has_its_batch(folder: Path) -> None:
    """Whatever was restarted: all attempts at a step train the same four samples, and no other step does."""
    steps: dict[int, set[int]] = {}
    for step, _, *samples in recorded(folder):
        steps.setdefault(step, set()).update(samples)
    last = max(steps)
    assert [step for step in range(last) if len(steps[step]) != 4] == []
    assert len(set[int]().union(*steps.values())) == sum(map(len, steps.values()))


@pytest.mark.deep
@pytest.mark.timeout(180)
def test_a_slow_rank_gets_a_new_process(launch: Callable[..., Launched], tmp_path: Path) -> None:
    job = launch(POLICIES, "--nproc-per-node", "2", "--max-restarts", "0", DLROVER_HOOKS_ON_STRAGGLER="relaunch")
    assert job.says(" s. Restarting it (1 of 3 actions because of slow ranks)", 90.0)
    assert job.says("worker 1 was lost (it was slow, and the others waited for it) at step ")
    trains_on(tmp_path, 2, 60)
    assert [rank.straggler for rank in vitals(job)] == [None, None]
    (tmp_path / "end").touch()
    code, said = job.end()
    assert code == 0, said
    assert re.search(r"job \S+: rank 1 \(.*\) is slow: its compute takes .* s\. Restarting it \(1 of 3 ", said)
    assert said.count("because of slow ranks") == 1
    each_step_has_its_batch(tmp_path)


@pytest.mark.deep  # with a node that takes its place, below
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_node_of_a_slow_rank_is_excluded(node: Callable[..., Launched], tmp_path: Path) -> None:
    (tmp_path / "slow").write_text("b")
    policy = {"DLROVER_HOOKS_ON_STRAGGLER": "exclude"}
    a = node("a", POLICIES, "--nnodes", "1:2", "--max-restarts", "0", **policy)
    a.child("dlrover_hooks.master")
    b = node("b", POLICIES, "--nnodes", "1:2", "--max-restarts", "0", **policy)
    code, said = b.end(120.0)
    assert code == 76, said
    assert re.search(rf"this node is excluded; replace it: {REASON}\n", said), said
    trains_on(tmp_path, 1, 60)
    (tmp_path / "end").touch()
    code, said = a.end()
    assert code == 0, said
    assert re.search(EXCLUDING, said), said
    each_step_has_its_batch(tmp_path)


@pytest.mark.deep
@pytest.mark.timeout(290)
def test_a_spare_node_takes_the_place_of_an_excluded_one(node: Callable[..., Launched], tmp_path: Path) -> None:
    (tmp_path / "slow").write_text("none yet")
    options = (POLICIES, "--nnodes", "1:2", "--max-restarts", "0", "--standby", "0")
    policy = {"DLROVER_HOOKS_ON_STRAGGLER": "exclude"}
    a = node("a", *options, **policy)
    a.child("dlrover_hooks.master")
    b = node("b", *options, **policy)
    trains_on(tmp_path, 2, 5)
    c = node("c", *options, **policy)
    assert c.says(": it has all its nodes: this one waits as a spare")
    (tmp_path / "slow").write_text("b")
    code, said = b.end(180.0)
    assert code == 76, said
    assert re.search(rf"this node is excluded; replace it: {REASON}\n", said), said
    assert c.says(" has pid ", 60.0)
    trains_on(tmp_path, 2, 60)
    (tmp_path / "end").touch()
    (code, said), (other, said_c) = a.end(), c.end()
    assert (code, other) == (0, 0), said + said_c
    assert re.search(EXCLUDING, said), said
    each_step_has_its_batch(tmp_path)


@pytest.mark.deep
@pytest.mark.timeout(290)
def test_a_planned_job_gets_another_node_for_a_slow_one(launch: Callable[..., Launched], tmp_path: Path) -> None:
    """It needs both nodes, and its ranks have no micro-batches to give away."""
    (tmp_path / "slow").write_text("worker-1")
    flags = ("--mode", "manual", "--min-workers", "2", "--max-workers", "2", "--max-cpu", "8", "--standby", "0")
    job = launch(POLICIES, *flags, DLROVER_HOOKS_ON_STRAGGLER="rebalance")
    assert job.says(" s. Replacing node worker-1 (1 of 3 actions because of slow ranks)", 120.0)
    assert job.says("dlrover-hooks worker-2] ", 60.0)
    trains_on(tmp_path, 2, 60)
    (tmp_path / "end").touch()
    code, said = job.end()
    assert code == 0, said
    assert "worker-1 ended" not in said, "a replacement is no failure"
    each_step_has_its_batch(tmp_path)
