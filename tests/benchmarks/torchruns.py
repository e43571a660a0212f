"""torchrun after a loss: our rendezvous beside its own c10d, in real processes.

Two agents with one worker each train a small DDP model with two DataLoader workers, `--nnodes=1:3`. A worker is killed,
or an agent with its worker, mid-step. The clock runs from the kill to the next step. A run that has made none within
`DEADLINE_S` has not recovered: it is counted (`_never`), and is in no median.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from dlrover_hooks.host.ports import free_port
from tests.benchmarks.report import Figures
from tests.e2e.master_process import LiveMaster
from tests.e2e.torchruns import Lives, Torchruns

DEADLINE_S = 150.0
TRAIN = """
    import json, os, sys, time
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    def note(step):
        line = {"ev": "step", "step": step, "pid": os.getpid(), "node": os.environ["DLROVER_HOOKS_NODE"]}
        line |= {"rank": int(os.environ["RANK"]), "world": int(os.environ["WORLD_SIZE"]), "at": time.time()}
        line |= {"port": os.environ["MASTER_PORT"]}
        fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
        os.write(fd, (json.dumps(line) + chr(10)).encode())
        os.close(fd)

    torch.distributed.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randn(20000, 64), torch.randn(20000, 64))
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data), num_workers=2)
    step = 0
    while True:
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            step += 1
            note(step)
"""
RESTARTS = ("--nnodes=1:3", "--max-restarts=5", "--rdzv-id=bench")


class Arm(NamedTuple):
    """One way to start torchrun. The last call is how long a round waits for more nodes; c10d's own is 30 s."""

    backend: str
    conf: str = ""


OURS, STOCK, STOCK_1S = Arm("dlrover"), Arm("c10d"), Arm("c10d", "last_call_timeout=1")


def _begun(job: Torchruns) -> dict[str, dict[str, Any]]:
    """Both train together."""
    job.start("a")
    job.start("b")
    return job.training(2, timeout_s=DEADLINE_S)


def _worker_lost(job: Torchruns) -> float:
    """Seconds from the kill of rank 1 to the first new step of the last rank."""
    victim = next(node for node, life in _begun(job).items() if life["rank"] == 1)
    before, killed = len(job.read()), time.time()
    job.kill_worker(victim)
    old = {life["pid"] for life in job.read()}

    def anew(lives: Lives) -> Lives:
        first = {life["rank"]: life for life in reversed(lives[before:]) if life["pid"] not in old}
        return list(first.values()) if len(first) == 2 else []

    return max(life["at"] for life in job.wait_for(anew, DEADLINE_S)) - killed


def _node_lost(job: Torchruns) -> float:
    """Seconds from the kill of an agent and its worker to the other's first step alone. c10d's store survives."""
    _begun(job)
    victim = "b" if _listens(job.agents["a"].pid, job.port) else "a"
    before, killed = len(job.read()), time.time()
    job.kill(victim)
    return min(life["at"] for life in job.training(1, before, DEADLINE_S).values()) - killed


def _listens(pid: int, port: int) -> bool:
    return any(one.laddr.port == port for one in psutil.Process(pid).net_connections("tcp") if one.status == "LISTEN")


@contextlib.contextmanager
def _job(arm: Arm) -> Iterator[Torchruns]:
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as owned:
        folder, endpoint, conf = Path(name), f"127.0.0.1:{free_port()}", arm.conf
        if arm.backend == "dlrover":
            master = LiveMaster(folder)
            owned.callback(master.close)
            endpoint, conf = master.url, f"token={master.token}"
        job = Torchruns(folder, endpoint, TRAIN, *RESTARTS, backend=arm.backend, conf=conf)
        owned.callback(job.close)
        yield job


def restart_s(arm: Arm, lost: Callable[[Torchruns], float], rounds: int) -> list[float]:
    """Of the rounds that recovered."""
    found = []
    for _ in range(rounds):
        with _job(arm) as job, contextlib.suppress(AssertionError):
            found.append(lost(job))
    return found


def _figures(prefix: str, arm: Arm, lost: Callable[[Torchruns], float], rounds: int) -> Figures:
    found = restart_s(arm, lost, rounds)
    return {f"{prefix}_s": statistics.median(found) if found else None, f"{prefix}_never": rounds - len(found)}


def ours(rounds: int) -> Figures:
    """`--rdzv-backend=dlrover`, its own defaults."""
    return _figures("torchrun_backend_restart", OURS, _worker_lost, rounds) | _figures(
        "torchrun_backend_node", OURS, _node_lost, rounds
    )


def stock(rounds: int) -> Figures:
    """c10d as it comes, and with a last call of a second: at most three rounds each, they are long."""
    rounds = min(rounds, 3)
    return (
        _figures("c10d_restart", STOCK, _worker_lost, rounds)
        | _figures("c10d_1s_restart", STOCK_1S, _worker_lost, rounds)
        | _figures("c10d_1s_node", STOCK_1S, _node_lost, rounds)
    )
