"""DLRover's flash checkpoint beside ours (optional): how long a save into memory holds up the training thread.

Theirs is `DdpCheckpointer` as its documentation has it, outside of `dlrover-run`: it starts its saver process itself.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from tests.benchmarks.saver import Gpt, engine, timed

INSTALL = 'pip install "dlrover[k8s]==0.6.1" protobuf'
_FLASH = "dlrover.trainer.torch.flash_checkpoint"
_NEEDED = f"import dlrover_hooks, torch, {_FLASH}.ddp"


def missing(python: str) -> str | None:
    """Why `python` cannot run this group, in one line; None: it can."""
    tried = subprocess.run([python, "-c", _NEEDED], capture_output=True, text=True, check=False)
    if not tried.returncode:
        return None
    why = (tried.stderr.strip().splitlines() or [f"exit status {tried.returncode}"])[-1]
    return f"skipped, {python} cannot import it ({why}); {INSTALL}, or give the path of a Python that has both"


class Dlrover:
    """Their checkpointer. `first`: seconds of its first save; later ones find their memory."""

    def __init__(self, state: dict[str, Any], folder: str) -> None:
        theirs: Any = importlib.import_module(f"{_FLASH}.ddp")
        importlib.import_module("dlrover.python.common.log").default_logger.setLevel(logging.ERROR)
        self._checkpointer, self._memory = theirs.DdpCheckpointer(folder), theirs.StorageType.MEMORY
        self._state, self._step = state, 0

    def save(self) -> None:
        self._step += 1
        self._checkpointer.save_checkpoint(self._step, self._state, storage_type=self._memory)

    def close(self) -> None:
        engine = self._checkpointer._engine
        assert engine._cached_step == self._step, "a save was left out"
        engine._shm_handler.unlink()
        engine.saver_proc.terminate()
        engine.saver_proc.join()
        engine.close()


@contextlib.contextmanager
def theirs(state: dict[str, Any]) -> Iterator[Dlrover]:
    with tempfile.TemporaryDirectory() as folder:
        made = Dlrover(state, folder)
        try:
            yield made
        finally:
            made.close()


def against(pairs: int) -> dict[str, float]:
    """Theirs with one thread of torch and with as many as there are: the quicker one counts."""
    state, threads = Gpt().state(), (1, torch.get_num_interop_threads())
    seconds: dict[str, list[float]] = {"ours": [], **{f"dlrover_{count}t": [] for count in threads}}
    with theirs(state) as them, engine() as ours:
        ours.prepare(state)
        first = ours.saved(state), timed(them.save)
        for _ in range(pairs):
            seconds["ours"].append(ours.saved(state))
            for count in threads:
                torch.set_num_threads(count)
                seconds[f"dlrover_{count}t"].append(timed(them.save))
            torch.set_num_threads(1)
    best = min((f"dlrover_{count}t" for count in threads), key=lambda name: statistics.median(seconds[name]))
    ratios = (mine / other for mine, other in zip(seconds["ours"], seconds[best], strict=True))
    return {
        "vs_dlrover_save": statistics.median(ratios),
        "vs_dlrover_first_save": first[0] / first[1],
        "dlrover_first_save_ms": 1e3 * first[1],
    } | {f"{name}_save_ms": 1e3 * statistics.median(times) for name, times in seconds.items()}
