"""Two workers of different speed read Python's own standard library line by line. The slow one is killed halfway.

No worker has a fixed part of the data. Each requests the next shard from the master when it has finished the previous
one. The killed worker's unfinished part is handed out again, so the other worker reads all of it.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from dlrover_hooks import ShardDataset, elastic_loader
from dlrover_hooks.client import MasterClient
from dlrover_hooks.data.leased.sources import TextRecords
from dlrover_hooks.protocol import ShowLedger

LIBRARY = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:50]


class Lines(TextRecords):
    """Each line with its number, to count afterwards which worker has read which lines."""

    def __getitems__(self, indices):
        return list(zip(indices, super().__getitems__(indices), strict=True))


def collate(rows):
    return [number for number, _ in rows], torch.tensor(list(b"\n".join(line for _, line in rows)))


def work(log: Path, pause_s: float) -> None:
    model = nn.Embedding(256, 256)  # which character follows which
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    lines = ShardDataset(Lines(LIBRARY, encoding=None), shard_size=512)  # <- the data is leased, not split
    loader = elastic_loader(DataLoader(lines, batch_size=32, collate_fn=collate), optimizer=optimizer)  # <- and acked
    with log.open("a") as seen:
        for numbers, text in loader:
            loss = nn.functional.cross_entropy(model(text[:-1]), text[1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(*numbers, file=seen, flush=True)
            time.sleep(pause_s)
    print(f"worker {log.name} has finished")


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    master = subprocess.Popen([sys.executable, "-m", "dlrover_hooks.master", "--port", "0"], stderr=subprocess.PIPE)
    assert master.stderr is not None
    url = master.stderr.readline().split()[2].decode()
    env = os.environ | {"DLROVER_HOOKS_MASTER": url, "DLROVER_HOOKS_JOB": "lines", "OMP_NUM_THREADS": "1"}
    workers = {
        name: subprocess.Popen([sys.executable, __file__, str(folder / name), pause_s], env=env)
        for name, pause_s in (("fast", "0.002"), ("slow", "0.03"))
    }
    while not (folder / "slow").exists() or len((folder / "slow").read_text()) < 10_000:
        time.sleep(0.1)
    workers["slow"].kill()  # as kill -9 does
    print("worker slow: killed")
    workers["fast"].wait()
    seen = {name: [int(line) for line in (folder / name).read_text().split()] for name in workers}
    times, total = Counter(seen["fast"] + seen["slow"]), len(Lines(LIBRARY))
    books = MasterClient(url, incarnation="reader").call(ShowLedger("lines", "train"))
    print(f"fast read {len(seen['fast'])} lines, slow {len(seen['slow'])}, of {total}")
    print(f"read at least once: {len(times)}; twice, because slow died before it acked: {times.total() - len(times)}")
    print(f"acknowledged, each once: {books.done}; left: {books.todo}")
    master.terminate()


if __name__ == "__main__":
    work(Path(sys.argv[1]), float(sys.argv[2])) if len(sys.argv) > 1 else main()
