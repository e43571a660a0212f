"""Ranks of one world as torchrun would start them, and jobs whose processes end with their test."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from dlrover_hooks.host.ports import free_port
from tests.e2e.master_process import LiveMaster
from tests.warm import Forked, warm as warmed

ROOT = Path(__file__).parents[1]


@contextlib.contextmanager
def named_job(word: str) -> Iterator[str]:
    """A name for a test's jobs. Whatever has it in its command line at the end, a keeper left behind, is killed."""
    name = f"{word}-{uuid.uuid4().hex[:8]}"
    yield name
    for process in left_of(name):
        process.kill()


def left_of(job: str) -> list[psutil.Process]:
    """Processes with the job's name in their command line: its keepers."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(job in part for part in process.info["cmdline"] or ())
    ]


def environments(world: int, master: LiveMaster | None = None, **more: object) -> list[dict[str, str]]:
    """Of each rank; alone, without torchrun's variables. This process's own of the library are left out."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("DLROVER_HOOKS_")}
    ours |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if master is not None:
        ours |= {"DLROVER_HOOKS_MASTER": master.url, "DLROVER_HOOKS_TOKEN": master.token or ""}
    ours |= {name: str(value) for name, value in more.items()}
    if world == 1 and master is None:
        return [ours]
    torchrun = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": free_port(), "TORCHELASTIC_RUN_ID": "none"}  # fmt: skip
    ranks = (torchrun | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(world))
    return [ours | {name: str(value) for name, value in rank.items()} for rank in ranks]


Rank = subprocess.Popen[str] | Forked


def started(
    command: Sequence[str], world: int, master: LiveMaster | None = None, *, warm: Sequence[str] = ()
) -> Sequence[Rank]:
    """One process for each rank, its outputs kept. `warm`: modules that they find imported, see `tests.warm`."""
    if warm:
        places = environments(world, master)
        server = warmed(warm, places[0])
        return [server.start(command[1:], env) for env in places]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [subprocess.Popen(command, env=env, **pipes) for env in environments(world, master)]


def ended(ranks: Sequence[Rank], timeout_s: float) -> list[tuple[str, str]]:
    """What each wrote on stdout and stderr. None of them outlives this."""
    try:
        return [rank.communicate(timeout=timeout_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def reported(outputs: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """The JSON lines of all of them."""
    return [json.loads(line) for out, _ in outputs for line in out.splitlines() if line.startswith("{")]


def run(
    command: Sequence[str],
    world: int,
    master: LiveMaster | None = None,
    *,
    timeout_s: float,
    warm: Sequence[str] = (),
) -> list[Any]:
    """The JSON lines of all ranks; each must end with 0. `warm`: see `started`."""
    ranks = started(command, world, master, warm=warm)
    outputs = ended(ranks, timeout_s)
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, errors[-4000:]
    return reported(outputs)
