"""Real trainers (DDP over gloo, AdamW, dropout, a schedule) of which workers, keepers and the master are
killed at random moments, end with the weights, moments and random state of a run that nobody touched.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dlrover_hooks.host.ports import free_port
from tests.chaos.cluster import Cluster
from tests.waiting import until

VICTIMS = ("rank 0", "rank 1", "rank 0", "rank 1", "n0", "master", "n0+rank 1", "master+rank 0")


class Real(Cluster):
    """Trainers with torch, out of a zygote of their own: keepers and the master must never see it."""

    def __init__(self, folder: Path, runtime: Path, *, epochs: int, **settings: Any) -> None:
        super().__init__(folder, runtime, world=2, nodes=1, nbytes=epochs, **settings)
        self._trainers = self._zygote("tests.chaos.ddp")

    def start_trainers(self) -> None:
        self.settings["store_port"] = free_port()
        super().start_trainers()

    def run(self, chance: random.Random | None, kills: int) -> tuple[dict[str, str], Counter[str]]:
        """Digests of what each rank ends with, and which processes were killed."""
        tally: Counter[str] = Counter()
        digests: dict[str, str] = {}
        self.start_trainers()
        at = self._next(chance)

        def turn() -> None:
            nonlocal at
            notice = self.hear(lambda facts: "digest" in facts, 0.01)
            if notice is not None:
                digests[notice.facts["who"]] = notice.facts["digest"]
                notice.let_go()
            elif digests:
                return
            elif chance is not None and tally.total() < kills and self.board.reached(0)[1] >= at:
                victims = chance.choice(VICTIMS)
                tally[victims] += 1
                self.kill(*victims.split("+"))
                if self.mend():
                    self.start_trainers()
                at = self._next(chance)
            elif any(self.processes[name].ended() for name in self.ranks):
                assert self.mend()  # one noticed by itself that another was lost
                self.start_trainers()

        until(
            lambda: len(digests) == self.world, "the end of all ranks", 20.0 * (kills + 1),
            between=turn, diagnostic=self.whereabouts, every_s=0.0,
        )  # fmt: skip
        return digests, tally

    def _next(self, chance: random.Random | None) -> int:
        return 0 if chance is None else self.board.reached(0)[1] + chance.randrange(1, 8)


@pytest.mark.chaos
@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_real_trainers_end_as_if_nobody_had_been_killed(
    kills: int, chaos_seed: int, runtime: Path, tmp_path: Path
) -> None:
    print(f"seed {chaos_seed}")
    ends = []
    for kind, chance in (("calm", None), ("chaos", random.Random(chaos_seed))):
        folder, sockets = tmp_path / kind, runtime / kind
        folder.mkdir()
        sockets.mkdir()
        real = Real(folder, sockets, epochs=2 + kills, save_to=str(folder / "ck"), persist_every=4, save_every=1)
        with real:
            ends.append(real.run(chance, kills))
    (calm, nobody), (chaos, tally) = ends
    print(dict(tally))
    assert nobody.total() == 0
    assert tally.total() == kills, f"the run was over before {kills} kills: {dict(tally)}"
    assert chaos == calm
