"""Worker log lines about long writes (occasional progress, one at the end) and about problems of the keeper."""

from __future__ import annotations

import logging

from dlrover_hooks.checkpoint.ipc.keeper_messages import Damaged, Persisted, Space, Storing, Unreplicated

LARGE_BYTES, LONG_S = 1 << 30, 10.0
_log = logging.getLogger("dlrover_hooks")


def say(job: str, url: str, notice: Storing | Persisted) -> None:
    """Log the progress of a write, or its result if it was large or long. Any thread."""
    step, seconds = notice.generation.step, notice.seconds
    if isinstance(notice, Storing):
        done, speed = readable(notice.done_bytes), readable(notice.done_bytes / seconds)
        whole = readable(notice.nbytes)
        _log.info("job %s: step %d: %s of %s written in %.0f s, %s/s, %s", job, step, done, whole, seconds, speed, url)
    elif seconds and (notice.file.nbytes >= LARGE_BYTES or seconds >= LONG_S):
        size, speed = readable(notice.file.nbytes), readable(notice.file.nbytes / seconds)
        _log.info("job %s: step %d is written: %s in %.1f s, %s/s, %s", job, step, size, seconds, speed, url)


def warn(job: str, rank: int, notice: Unreplicated | Space | Damaged) -> None:
    """Log a keeper's warning. Any thread."""
    if isinstance(notice, Space):
        hint = f" HINT: {notice.hint}" if notice.hint else ""
        _log.log(logging.WARNING if notice.tight else logging.INFO, "job %s: %s%s", job, notice.line, hint)
    else:
        _log.warning("job %s, rank %d: %s", job, rank, notice.reason)


def readable(nbytes: float) -> str:
    """`4.7 GB`; small ones as MB, KB or B."""
    for unit, size, digits in (("GB", 1e9, 2), ("MB", 1e6, 1), ("KB", 1e3, 1)):
        if nbytes >= 0.1 * size:
            return f"{nbytes / size:.{digits}f} {unit}"
    return f"{nbytes:.0f} B"
