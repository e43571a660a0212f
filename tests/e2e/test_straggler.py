"""A rank that the others wait for is named, with the part of its steps that is slow."""

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


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_slow_rank_and_its_phase_are_named(launch: Callable[..., Launched], tmp_path: Path) -> None:
    (tmp_path / "compute").touch()
    job = launch(SCRIPT, "--nproc-per-node", "2")
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
