"""One process that runs a script of the documentation as it is, on data that says which samples a step had.

Usage: page_script.py FOLDER CRASH SCRIPT. The script runs in FOLDER; it is broken off where the optimizer is about to
make step CRASH (0: never). Prints one JSON line: the samples of each step that was made, and the weights at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.utils.data
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import TensorDataset

from tests.pace import pace

SEED = 1
"""As on the pages for several processes, so that those for one make the same data."""


class Crash(Exception):
    pass


class Watched:
    """The optimizer's own count of its steps is that of the model, over all lives."""

    def __init__(self, crash: int) -> None:
        self.crash, self.fetched = crash, list[int]()
        self.steps: dict[int, list[int]] = {}
        self.weights: list[float] = []
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        if _made(optimizer) + 1 == self.crash:
            raise Crash

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        self.steps[_made(optimizer)] = sorted(self.fetched)
        self.fetched.clear()
        self.weights = [value for one in _parameters(optimizer) for value in one.detach().flatten().tolist()]


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def _made(optimizer: Optimizer) -> int:
    state = optimizer.state.get(_parameters(optimizer)[0], {})
    return int(state.get("step", 0))


def main() -> None:
    folder, crash, script = sys.argv[1:]
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    os.chdir(folder)
    os.environ |= {"DLROVER_HOOKS_JOB": Path(folder).name, "DLROVER_HOOKS_SAVE_EVERY": "1"}
    watched = Watched(int(crash))

    class Numbered(TensorDataset):
        __getitems__ = None

        def __getitem__(self, index: int) -> Any:
            watched.fetched.append(int(index))
            return super().__getitem__(index)

    torch.utils.data.TensorDataset = Numbered
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(SEED)
    pace()
    with contextlib.suppress(Crash):
        exec(compile(Path(script).read_text(), script, "exec"), {"__name__": "__main__"})
    print(json.dumps({"steps": watched.steps, "weights": watched.weights}), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
