"""A rank that makes no more steps while its process lives: the log says where each rank is, and it may be replaced."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.launched import Launched

SCRIPT = """
    from pathlib import Path

    import torch
    import torch.distributed as dist
    from dlrover_hooks import AsyncCheckpointer, elastic_loader
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, Dataset

    def read_shard(file):
        while not Path(file).exists():
            threading.Event().wait(0.01)

    class Shards(Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            if dist.get_rank() == 1 and saves.step in (4, 6):
                read_shard(f"go-{saves.step}")
            return torch.ones(1)

    def main():
        global saves
        dist.init_process_group("gloo")
        net = DistributedDataParallel(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loader = elastic_loader(DataLoader(Shards(), batch_size=2), optimizer=optimizer)
        with AsyncCheckpointer(model=net, optimizer=optimizer, loader=loader, step_timeout="3s") as saves:
            for batch in loader:
                optimizer.zero_grad()
                net(batch).sum().backward()
                optimizer.step()
            os.write(2, f"ended at step {saves.step}\\n".encode())  # `print` of two ranks would be mixed

    main()
    """


@pytest.mark.deep
@pytest.mark.timeout(180)
def test_the_rank_that_holds_up_the_others_is_named(launch: Callable[..., Launched], tmp_path: Path) -> None:
    job = launch(SCRIPT, "--nproc-per-node", "2", "--standby", "0")
    found = ", in read_shard; rank 0 in backward (script.py:"
    assert job.says(found, 120.0)  # a slow machine may stall before, too
    (tmp_path / "go-4").touch()
    assert job.says(f"rank 1 of job {job.job} makes steps again")
    (tmp_path / "go-6").touch()
    code, said = job.end()
    assert code == 0, said
    line = next(line for line in said.splitlines() if found in line)
    assert f"job {job.job}: no rank has made a step for" in line
    assert "s: rank 1 at script.py:" in line
    assert ", in main)" in line
    assert f"rank 1 of job {job.job} has made no step for" in said
    assert "in read_shard\n" in said, "the whole stack is shown"
    assert said.count("ended at step 16") == 2, "nothing was killed or repeated"


@pytest.mark.deep
@pytest.mark.timeout(240)
@pytest.mark.parametrize("steps", [(4,), (4, 6)])
def test_the_rank_that_holds_up_the_others_is_replaced(
    launch: Callable[..., Launched], tmp_path: Path, steps: tuple[int, ...]
) -> None:
    """Once, or at two steps; neither counts as a failure of the job."""
    for passed in {4, 6} - set(steps):
        (tmp_path / f"go-{passed}").touch()
    policy = {"DLROVER_HOOKS_ON_STALL": "restart-rank"}
    job = launch(SCRIPT, "--nproc-per-node", "2", "--max-restarts", "0", **policy)
    for step in steps:
        assert job.says(f"worker 1 was lost (it made no steps for too long) at step {step}; restarting", 120.0)
        (tmp_path / f"go-{step}").touch()
    code, said = job.end()
    assert code == 0, said
    assert len(re.findall(r"rank 1 at script.py:.*\. Restarting rank 1 \(\d of 3 restarts because", said)) >= len(steps)
    assert said.count("ended at step 16") == 2


HOLDS_THE_GIL = """
    import re

    import torch
    import torch.distributed as dist
    from dlrover_hooks import AsyncCheckpointer, elastic_loader
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset

    def parse():
        re.match("(a+)+$", "a" * 64 + "b")  # takes 2 ** 64 steps, and no other thread runs meanwhile

    def main():
        dist.init_process_group("gloo")
        net = DistributedDataParallel(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loader = elastic_loader(DataLoader(TensorDataset(torch.ones(16, 1)), batch_size=2), optimizer=optimizer)
        with AsyncCheckpointer(model=net, optimizer=optimizer, loader=loader) as saves:
            for (batch,) in loader:
                if dist.get_rank() == 1 and saves.step == 2 and not os.path.exists("held"):
                    open("held", "w").close()
                    parse()
                optimizer.zero_grad()
                net(batch).sum().backward()
                optimizer.step()
            os.write(2, f"ended at step {saves.step}\\n".encode())

    main()
    """


@pytest.mark.deep
@pytest.mark.timeout(180)
def test_a_rank_that_holds_the_gil_shows_its_stack(launch: Callable[..., Launched]) -> None:
    """It sends no heartbeats and cannot log anything. The launcher gets its stacks before it kills it."""
    job = launch(HOLDS_THE_GIL, "--nproc-per-node", "2", "--hang-timeout", "5s")
    assert job.says(", in parse) at step 2", 120.0)
    code, said = job.end(120.0)
    assert code == 0, said
    assert "worker 1 sends no heartbeats (process state: running). Its threads:" in said
    assert re.search(r'File ".*script.py", line \d+ in parse\n.*script.py", line \d+ in main\n', said)
    assert re.search(
        r"worker 1 was lost \(silent for too long, at script.py:\d+, in parse\) at step 2; restarting", said
    )
    assert said.count("ended at step 4") == 2
