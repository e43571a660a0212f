"""What a worker's log says of long writes: one line now and then, one at the end. No torch."""

from __future__ import annotations

import logging

from dlrover_hooks.checkpoint.wire import Persisted, Storing

LARGE_BYTES, LONG_S = 1 << 30, 10.0
_log = logging.getLogger("dlrover_hooks")


def say(job: str, url: str, notice: Storing | Persisted) -> None:
    """Log how far a write is, or how it went if it was large or long. Any thread."""
    step, seconds = notice.generation.step, notice.seconds
    if isinstance(notice, Storing):
        done, speed = gigabytes(notice.done_bytes), gigabytes(notice.done_bytes / seconds)
        whole = gigabytes(notice.nbytes)
        _log.info("job %s: step %d: %s of %s written in %.0f s, %s/s, %s", job, step, done, whole, seconds, speed, url)
    elif seconds and (notice.file.nbytes >= LARGE_BYTES or seconds >= LONG_S):
        size, speed = gigabytes(notice.file.nbytes), gigabytes(notice.file.nbytes / seconds)
        _log.info("job %s: step %d is written: %s in %.1f s, %s/s, %s", job, step, size, seconds, speed, url)


def gigabytes(nbytes: float) -> str:
    """`4.7 GB`; small ones as MB."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"
