"""`StepDriver` drives a loop without torch: what an adapter of another framework relies on."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

LOOP = """
import json, sys
import numpy as np
from dlrover_hooks import config, protocol as p
from dlrover_hooks.step_driver import StepDriver


class Source:
    mark = commit = property(lambda self: self._moved)

    def __init__(self):
        self.at = self.done = 0

    def _moved(self):
        self.done = self.at

    def state_dict(self):
        return {"at": self.done}

    def load_state_dict(self, state):
        self.at = self.done = state["at"]


class Loop:
    def __init__(self, job):
        self.weights, self.source, self.step = np.zeros(4), Source(), 0
        self.driver = StepDriver(self, config.load(job=job, save_every=1), config.place())
        restored = self.driver.start(check=lambda state: state["weights"])
        if restored is not None:
            self.step, self.weights = restored.state["step"], np.array(restored.state["weights"])
        self.driver.session.watch("train", self.source)
        self.driver.begin(None)

    def state(self):
        return {"step": self.step, "weights": self.weights.tolist()}

    def train(self, until):
        while self.step < until:
            self.driver.before_fetch(self.step)
            self.driver.boundary(self.step, self.state)
            self.source.at += 2
            self.weights += self.source.at
            self.step += 1
            self.driver.stepped()
        self.driver.before_fetch(self.step)
        self.driver.boundary(self.step, self.state)


job, until, end = sys.argv[1], int(sys.argv[2]), sys.argv[3]
loop = Loop(job)
began = loop.step
loop.train(until)
if end == "finish":
    loop.driver.finish(loop.step, loop.state())
    loop.driver.close(p.Departure.DONE, loop.step)
loop.driver.session.wait_copied()
found = {"began": began, "step": loop.step, "weights": loop.weights.tolist(), "at": loop.source.at}
print(json.dumps(found | {"alive": loop.driver.alive, "torch": "torch" in sys.modules}))
"""


def life(job: str, until: int, end: str) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-c", LOOP, job, str(until), end], capture_output=True, text=True, timeout=120, check=True
    )
    return json.loads(run.stdout.splitlines()[-1])


def test_a_loop_without_torch_is_saved_resumed_and_finished(job: str) -> None:
    """The first process ends without `close` (FAILED); the second one continues from its memory, exactly."""
    first = life(job, 3, "fail")
    assert first == {"began": 0, "step": 3, "weights": [12.0] * 4, "at": 6, "alive": True, "torch": False}
    second = life(job, 5, "finish")
    assert second["began"] in (2, 3), "the newest save that was complete when the process ended"
    assert second == {
        "began": second["began"], "step": 5, "weights": [30.0] * 4, "at": 10, "alive": False, "torch": False,
    }  # fmt: skip
