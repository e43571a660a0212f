"""Functions of roles that use queues and do not import torch, for tests/contracts/test_job_backends.py."""

from __future__ import annotations

import os
import sys
import threading

from dlrover_hooks.job import current_worker
from tests.contracts.job_roles import folder


def produce() -> None:
    """Puts numbers into the queue of role `main` until the test ends."""
    numbers = current_worker().role("main").queue("numbers")
    number = 0
    while not (folder() / "end").exists():
        numbers.put(number, timeout_s=60.0)
        number += 1


def consume() -> None:
    """Takes 20 numbers, waits until another role trains, and then ends the job."""
    numbers = current_worker().queue("numbers", 2)
    taken = [numbers.get(timeout=60.0) for _ in range(20)]
    (folder() / "consumed").write_text(f"{taken == list(range(20))} {'torch' in sys.modules}")
    while not (folder() / "steps").exists():
        threading.Event().wait(0.02)
    (folder() / "end").touch()


def pass_numbers() -> None:
    """Puts numbers into a queue of role `server` and takes them out; a second life first gets those of the first."""
    numbers, passed = current_worker().role("server").queue("numbers"), 0
    while not (folder() / "end").exists():
        numbers.put(passed, timeout_s=60.0)
        numbers.get(timeout_s=60.0)
        passed += 1
        (folder() / f"passed-{os.getpid()}").write_text(str(passed))
