"""Requeues a SLURM job, once for each start of the job even if several processes request it."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess

import msgspec

from dlrover_hooks.config import runtime_dir, slurm_environment

log = logging.getLogger("dlrover_hooks")
_ASK_S = 20.0


class Slurm(msgspec.Struct, frozen=True):
    """The SLURM job of this process. `restarts`: how often it was requeued; `end`: its time limit, epoch seconds."""

    job_id: str
    restarts: int = 0
    node_rank: int = 0
    end: float | None = None


def here() -> Slurm | None:
    """The SLURM job of this process; None outside SLURM."""
    env = slurm_environment()
    if not (job_id := env.get("SLURM_JOB_ID")):
        return None
    end = env.get("SLURM_JOB_END_TIME", "")
    return Slurm(
        job_id, int(env.get("SLURM_RESTART_COUNT") or 0), int(env.get("SLURM_NODEID") or 0),
        float(end) if end.isdigit() else None,
    )  # fmt: skip


def requeue(slurm: Slurm) -> bool:
    """Run `scontrol requeue` for this job; True if it was requeued, now or before. SLURM then ends its processes.

    A file in this user's runtime folder, named by job and start, ensures that each node requeues it once.
    """
    marks = f"requeued-{slurm.job_id}-"
    mark = os.path.join(runtime_dir(), f"{marks}{slurm.restarts}")
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        log.info("SLURM job %s is requeued already", slurm.job_id)
        return True
    for old in os.listdir(runtime_dir()):
        if old.startswith(marks) and old != os.path.basename(mark):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(runtime_dir(), old))
    why = _ask(slurm.job_id)
    if why:
        os.unlink(mark)
        log.warning("SLURM job %s could not be requeued (%s): exit code 75 says that it should be", slurm.job_id, why)
        return False
    log.info("SLURM job %s is requeued", slurm.job_id)
    return True


def _ask(job_id: str) -> str:
    """The error message; empty on success."""
    try:
        done = subprocess.run(
            ["scontrol", "requeue", job_id], capture_output=True, text=True, timeout=_ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: scontrol"
    return "" if done.returncode == 0 else (done.stderr.strip() or f"scontrol: exit code {done.returncode}")
