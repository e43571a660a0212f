"""A Lightning run goes on at other world sizes and with another global batch.

Real processes, real gloo groups: see resize_trial.py.
"""

import sys
from collections import Counter
from pathlib import Path

import pytest

from tests import ranks
from tests.e2e.master_process import LiveMaster

TRIAL = (sys.executable, str(Path(__file__).with_name("resize_trial.py")))
WARM = ("torch._dynamo", "dlrover_hooks.integrations.lightning")
SAMPLES, EPOCHS = 43, 3
Phases = tuple[tuple[int, int, int], ...]
"""World size, global batch, and the step at which it breaks off. An epoch has 4 steps of 12."""


@pytest.mark.deep
@pytest.mark.parametrize("phases", [((3, 12, 6), (1, 8, -1)), ((1, 12, 1), (3, 12, 3), (2, 12, 6), (1, 8, -1))])
def test_every_sample_once_through_resizes_in_mid_epoch(job: str, live_master: LiveMaster, phases: Phases) -> None:
    said = [
        ranks.run([*TRIAL, job, str(size), str(crash)], world, live_master, timeout_s=200, warm=WARM)
        for world, size, crash in phases
    ]
    begins = [max(line.get("restored", 0) for line in lines) for lines in said]
    assert begins[1:] == [crash for _, _, crash in phases[:-1]]
    visits: Counter[tuple[int, int]] = Counter()
    validated: set[tuple[int, int]] = set()
    for lines, end in zip(said, [*begins[1:], 10**9], strict=True):
        for line in lines:
            if "ids" in line and line["step"] < end and not line["ghost"]:
                visits.update((line["epoch"], index) for index in line["ids"])
            elif "validated" in line and line["step"] <= end:
                validated.add((line["validated"], line["step"]))
    assert visits == Counter((epoch, index) for epoch in range(EPOCHS) for index in range(SAMPLES))
    assert sorted(validated) == [(0, 4), (1, 9), (2, 15)]
