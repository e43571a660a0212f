"""Ranks that hang or fail, in real jobs of three workers: does the log blame the right one, and after how long?

Part of `make bench-health`. Each fault is injected once, in a step and a rank that are drawn with a seed:

- silent ones, many in one job: SIGSTOP, and C code that holds the GIL. The launcher's `--hang-timeout` is 3 s;
- stalls, as many in a job as it may restart because of them: a deadlock, an endless loop. `step_timeout` is 2 s;
- memory without end, one in a job, in a control group of the kernel with 2 GiB;
- a user's exception, one in a job, which ends the job.

A blame is right if it names the rank, and for a stall and an exception also the function in which it is, for a lack of
memory the cause.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dlrover_hooks.master.core.stalls import MOST_RESTARTS
from tests.benchmarks.report import REPOSITORY
from tests.control_groups import group_of_memory

WORLD, APART = 3, 5
"""Workers, and steps from one fault to the next."""
SILENT, STALLS = ("stopped", "holds_the_gil"), ("deadlock", "endless_loop")
SAID = {"stopped": "stopped", "takes_memory": "SIGKILL: out of memory"}
"""Instead of the function."""
SCRIPT = """
import json, os, re, signal, sys, threading, time
from pathlib import Path

import torch
import torch.distributed as dist
from dlrover_hooks import AsyncCheckpointer, elastic_loader
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

plan, steps = json.loads(sys.argv[1]), int(sys.argv[2])

def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)

def holds_the_gil():
    re.match("(a+)+$", "a" * 64 + "b")

def deadlock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def endless_loop():
    while True:
        pass

def takes_memory():
    kept = []
    while True:
        kept.append(torch.ones(1 << 22))

def user_error():
    raise ValueError("the batch is empty")

def inject(step):
    for number, (at, rank, kind) in enumerate(plan):
        mark = Path(f"fault-{number}")
        if at == step and rank == dist.get_rank() and (kind == "user_error" or not mark.exists()):
            mark.exists() or mark.write_text(str(time.time()))
            globals()[kind]()

def main():
    dist.init_process_group("gloo")
    net = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = TensorDataset(torch.ones(6 * steps, 1))
    loader = elastic_loader(DataLoader(data, batch_size=2), optimizer=optimizer)
    with AsyncCheckpointer(model=net, optimizer=optimizer, loader=loader, step_timeout="2s") as saves:
        for batch, in loader:
            inject(saves.step)
            optimizer.zero_grad()
            net(batch).sum().backward()
            optimizer.step()

main()
"""


class Fault(NamedTuple):
    """`at`: the step before which `rank` meets it."""

    at: int
    rank: int
    kind: str


class Blame(NamedTuple):
    """`seconds` from the fault to the line that blames a rank."""

    right: bool
    seconds: float


def plans(kinds: Sequence[str], rounds: int, together: int, chance: random.Random) -> list[list[Fault]]:
    """`rounds` faults of each kind, mixed, for jobs with `together` faults each."""
    mixed = [kind for kind in kinds for _ in range(rounds)]
    chance.shuffle(mixed)
    jobs = [mixed[start : start + together] for start in range(0, len(mixed), together)]
    return [
        [Fault(APART * (turn + 1), chance.randrange(WORLD), kind) for turn, kind in enumerate(kinds_of)]
        for kinds_of in jobs
    ]


def silent(rounds: int, seed: int) -> list[Blame]:
    """One job for all."""
    (plan,) = plans(SILENT, rounds, len(SILENT) * rounds, random.Random(seed))
    return _blames(plan, r"worker (\d+)(?: \(local rank \d+\))? was lost \((.*?)\) at step")


def stalls(rounds: int, seed: int) -> list[Blame]:
    """A job for as many as it may restart."""
    found: list[Blame] = []
    for plan in plans(STALLS, rounds, MOST_RESTARTS, random.Random(seed)):
        found += _blames(plan, r"no rank has made a step for \d+ s: rank (\d+) at (.*?); .*\. Restarting rank \1 \(")
    return found


def out_of_memory(rounds: int, seed: int) -> list[Blame]:
    """Each in a job of its own. Raises OSError or StopIteration if this user cannot make a memory cgroup."""
    found: list[Blame] = []
    for plan in plans(("takes_memory",), rounds, 1, random.Random(seed)):
        with group_of_memory(2 << 30) as group:
            found += _blames(plan, r"worker (\d+) (?:died|was lost) \((.*?)\) at step", group)
    return found


def user_errors(rounds: int, seed: int) -> list[Blame]:
    """Each ends its job; the seconds are those to the launcher's end."""
    found: list[Blame] = []
    for (fault,) in plans(("user_error",), rounds, 1, random.Random(seed)):
        with tempfile.TemporaryDirectory() as name:
            code, lines = _run(Path(name), [fault])
            said = "".join(line for _, line in lines)
            began = float(Path(name, "fault-0").read_text())
        summary = re.search(r"^  who    worker (\d+) .*\n(?:.*\n)*?  why    .*", said, re.MULTILINE)
        traced = "in user_error" in said and "ValueError: the batch is empty" in said
        right = code == 1 and traced and summary is not None and int(summary[1]) == fault.rank
        found.append(Blame(right, lines[-1][0] - began))
    return found


def _blames(plan: list[Fault], pattern: str, group: Path | None = None) -> list[Blame]:
    """Run a job; the blame for each fault: the first line that matches `pattern` after it."""
    with tempfile.TemporaryDirectory() as name:
        code, lines = _run(Path(name), plan, group)
        marks = [Path(name, f"fault-{number}") for number in range(len(plan))]
        times = [float(mark.read_text()) if mark.exists() else None for mark in marks]
    if code != 0:
        sys.stderr.writelines(line for _, line in lines[-40:])
    blamed = [(at, match) for at, line in lines if (match := re.search(pattern, line))]
    found: list[Blame] = []
    for fault, began in zip(plan, times, strict=True):
        first = next(((at, match) for at, match in blamed if began is not None and at > began), None)
        if began is None or first is None:
            found.append(Blame(False, float("inf")))
            continue
        right = int(first[1][1]) == fault.rank
        found.append(Blame(right and SAID.get(fault.kind, f"in {fault.kind}") in first[1][2], first[0] - began))
    if len(blamed) > len(plan):
        print(f"{len(blamed)} blames for {len(plan)} faults", file=sys.stderr)
    return found


def _run(folder: Path, plan: list[Fault], group: Path | None = None) -> tuple[int, list[tuple[float, str]]]:
    """Run a job to its end, in a cgroup: its exit code, and its lines with the time at which they came."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    steps = APART * (len(plan) + 2)
    options = ["--nproc-per-node", str(WORLD), "--hang-timeout", "3s", "--max-restarts", "1000"]
    command = [sys.executable, "-m", "dlrover_hooks", "run", *options, str(script), json.dumps(plan), str(steps)]
    if group is not None:
        command = ["sh", "-c", 'echo $$ > "$0/cgroup.procs"; exec "$@"', str(group), *command]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "DLROVER_HOOKS_ON_STALL": "restart-rank"}
    process = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
    lines: list[tuple[float, str]] = []

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append((time.time(), line))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        code = process.wait(60.0 + 30.0 * len(plan))
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        reader.join(60)
    return code, lines
