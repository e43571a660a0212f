"""The SLURM step from srun's environment: number of nodes, this node's rank, the first node's host."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping

import msgspec

from dlrover_hooks.errors import LaunchError, UsageError

_FIRST_PORT, _PORTS = 15000, 5000
"""Range of the master's port, below those of process groups and of outgoing connections; it differs between jobs."""
_SHARED_S = 120.0
"""A network file system may hide a new file for a minute (NFS caches that a name does not exist)."""


class Allocation(msgspec.Struct, frozen=True):
    """One step of one job, seen from one of its nodes. `life`: differs for each start of the step."""

    job: str
    life: str
    nodes: int
    node_rank: int
    first_host: str
    port: int
    gpus: int
    """Of this node; 0 if SLURM allocated none."""

    @property
    def endpoint(self) -> str:
        """HOST:PORT of the master; empty if there is only one node."""
        return f"{self.first_host}:{self.port}" if self.nodes > 1 else ""


def allocation(env: Mapping[str, str]) -> Allocation:
    """Read srun's environment.

    Raises:
        UsageError: this is no SLURM step, or it starts several launchers on a node.
    """
    job = env.get("SLURM_JOB_ID", "")
    if not job.isdigit() or "SLURM_PROCID" not in env:
        raise UsageError(
            "--slurm: srun has not started this process (SLURM_JOB_ID or SLURM_PROCID is missing)",
            hint="in a batch script: srun --ntasks-per-node 1 dlrover-hooks run --slurm train.py",
        )
    nodes = int(_first(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES") or 1)
    tasks = int(_first(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") or nodes)
    if tasks > nodes:
        raise UsageError(
            f"--slurm: SLURM starts {tasks} tasks on {nodes} nodes, and each node needs one launcher, which starts the "
            "workers",
            hint="srun --ntasks-per-node 1 (with all CPUs and GPUs of the node), workers by --nproc-per-node",
        )
    step = env.get("SLURM_STEP_ID", "0")
    return Allocation(
        job=job,
        life=f"{job}-{step}-{env.get('SLURM_RESTART_COUNT', '0')}",
        nodes=nodes,
        node_rank=int(env.get("SLURM_NODEID", "0")),
        first_host=first_host(_first(env, "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")),
        port=_FIRST_PORT + (int(job) + 7 * int(step) if step.isdigit() else int(job)) % _PORTS,
        gpus=_gpus(_first(env, "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")),
    )


def _first(env: Mapping[str, str], *names: str) -> str:
    return next((env[name] for name in names if env.get(name)), "")


def _gpus(text: str) -> int:
    """Parses `4` or `a100:4`."""
    number = text.rpartition(":")[2]
    return int(number) if number.isdigit() else 0


def first_host(nodelist: str) -> str:
    """`gpu[03-05,9],login` -> `gpu03`: the first host of a SLURM node list."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else "")


@contextlib.contextmanager
def shared_token(life: str, *, make: bool) -> Iterator[str]:
    """A secret of this step, in a file of the user's home folder, which the nodes share. Node 0 creates and removes it.

    Raises:
        LaunchError: the file does not appear.
    """
    path = token_path(life)
    if not make:
        yield _read(path)
        return
    token = secrets.token_hex(16)
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(file, token.encode())
        os.close(file)
        yield token
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def token_path(life: str) -> str:
    """Path of the token file."""
    return os.path.join(os.path.expanduser("~"), ".dlrover-hooks", f"slurm-{life}.token")


def _read(path: str) -> str:
    deadline = time.monotonic() + _SHARED_S
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError), open(path, encoding="ascii") as file:
            if token := file.read():
                return token
        time.sleep(0.2)
    raise LaunchError(
        f"{path} did not appear within {_SHARED_S:g} s: the first node leaves the master's token there",
        hint="if the nodes share no home folder, set DLROVER_HOOKS_TOKEN in the batch script: "
        "export DLROVER_HOOKS_TOKEN=$(openssl rand -hex 16)",
    )
