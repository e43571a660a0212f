"""One of three ranks, which replicate entries of their RNG journal in many groups, each of which ends by a cut.

python journal_exchange.py RANK PORT GROUPS
"""

from __future__ import annotations

import random
import sys
import threading
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from dlrover_hooks.config import Place
from dlrover_hooks.elastic.process_groups import Groups
from dlrover_hooks.elastic.rng_journal_replication import JournalReplication, Peers
from dlrover_hooks.rng.rank_journal import RngJournal

WORLD, LEAVES = 3, 1
ENTRY_BYTES = 16_000


class Entries:
    """What a journal has of it: the entry to send, and those that came in."""

    within = bytes(ENTRY_BYTES)

    def heard(self, entries: list[bytes]) -> None:
        assert [len(one) for one in entries] == [ENTRY_BYTES]


def main(rank: int, port: int, count: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, WORLD, rank == 0, timeout=timedelta(seconds=60))
    chance, meet = random.Random(rank), torch.zeros(1)
    for number in range(count):
        groups = Groups(lambda: None)
        with groups.watched():
            dist.init_process_group("gloo", store=dist.PrefixStore(str(number), store), rank=rank, world_size=WORLD)
        peers = Peers((rank + 1) % WORLD, ((rank - 1) % WORLD,))
        journal = JournalReplication(cast(RngJournal, Entries()), Place(rank=rank, world_size=WORLD), peers, 0)
        for _ in range(3):
            journal.tell(WORLD)
            dist.all_reduce(meet)
        if rank != LEAVES:
            cut = threading.Timer(chance.choice((0.0, 0.0002, 0.0005, 0.001)), groups.cut)
            cut.start()
            try:
                journal.tell(WORLD)
                dist.all_reduce(meet)
                raise AssertionError("without a rank no step can be made")
            except RuntimeError:
                cut.join()
        groups.destroy()
    print("done", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
