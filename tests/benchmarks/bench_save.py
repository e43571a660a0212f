"""What a save costs beside one memcpy of the same bytes: `make bench-save` (DL-91).

State: a GPT of 12 layers, width 352, with Adam, about 210 MB. Rounds are interleaved, so that a busy machine hurts all
alike, and the minimum is compared. Writes build/bench/save.json. BENCH_ARGS: `--rounds N`.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dlrover_hooks.checkpoint.arena import Arena
from dlrover_hooks.checkpoint.checkpointer import Checkpointer
from dlrover_hooks.protocol import Restore, Source

SHM = Path("/dev/shm")
WAIT_S = 60.0


def trained_state() -> dict[str, Any]:
    """Parameters and Adam's moments after one step, as `torch.save` and we are given them."""
    layer = nn.TransformerEncoderLayer(352, 8, 4 * 352, batch_first=True)
    model = nn.Sequential(nn.Embedding(256, 352), nn.TransformerEncoder(layer, 12, enable_nested_tensor=False))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.zeros((1, 8), dtype=torch.long)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def nbytes(tree: Any) -> int:
    if isinstance(tree, torch.Tensor):
        return tree.nbytes
    if isinstance(tree, dict):
        return sum(map(nbytes, tree.values()))
    return sum(map(nbytes, tree)) if isinstance(tree, list | tuple) else 0


def timed(work: Callable[[], Any]) -> float:
    """Seconds."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(rounds: int) -> dict[str, Any]:
    """Seconds of every round, by what was done."""
    torch.set_num_threads(1)
    state = trained_state()
    size = nbytes(state)
    notices: queue.SimpleQueue[Any] = queue.SimpleQueue()
    checkpoints = Checkpointer(f"bench-{uuid.uuid4().hex[:8]}", "node", 0, linger_s=0.0, notify=notices.put)
    checkpoints.begin(uuid.uuid4().hex, 1, 0, 1)
    arena = Arena.create(9, size)
    source, target = np.ones(size, np.uint8), np.frombuffer(arena.view(0, size), np.uint8)
    file = SHM / f"bench-save-{os.getpid()}.pt"
    seconds: dict[str, list[float]] = {name: [] for name in ("memcpy", "save", "torch.save", "restore")}

    def save(step: int) -> None:
        assert checkpoints.save(step, {"state": state}) is not None

    try:
        checkpoints.held()  # the keeper is up
        first = timed(lambda: save(1))
        for step in range(2, rounds + 2):
            generation = notices.get(timeout=WAIT_S).generation  # hashed: the keeper is idle again
            checkpoints.complete(generation)
            restore = Restore(generation, 1, Source.MEMORY)
            seconds["memcpy"].append(timed(lambda: np.copyto(target, source)))
            seconds["save"].append(timed(lambda step=step: save(step)))
            notices.put(notices.get(timeout=WAIT_S))
            seconds["torch.save"].append(timed(lambda: torch.save(state, file)))
            seconds["restore"].append(timed(lambda restore=restore: checkpoints.load(restore)))
    finally:
        checkpoints.close(finished=True)
        file.unlink(missing_ok=True)
        arena.close()
    return {"bytes": size, "rounds": rounds, "first_save_s": first, "seconds": seconds}


def table(found: dict[str, Any]) -> str:
    """Minimum, median and the ratio of the minimum to that of memcpy."""
    base = min(found["seconds"]["memcpy"])
    lines = [
        f"{found['bytes'] / 1e6:.0f} MB, {found['rounds']} rounds",
        f"{'':22}{'min ms':>9}{'median':>9}{'x memcpy':>10}",
    ]
    rows = {**found["seconds"], "first save": [found["first_save_s"]]}
    names = {"memcpy": "memcpy, warm shm", "save": "save", "torch.save": "torch.save, /dev/shm", "restore": "restore"}
    for name, times in rows.items():
        least, median = 1e3 * min(times), 1e3 * float(np.median(times))
        lines.append(f"{names.get(name, name):22}{least:9.1f}{median:9.1f}{least / 1e3 / base:10.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        found = measure(parser.parse_args().rounds)
    found["min_over_memcpy"] = {
        name: min(times) / min(found["seconds"]["memcpy"]) for name, times in found["seconds"].items()
    }
    out = Path("build/bench/save.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    print(out)


if __name__ == "__main__":
    main()
