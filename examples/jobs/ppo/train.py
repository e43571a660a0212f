"""PPO as a job of four roles: two workers train, two answer prompts, one serves prompts, one scores answers.

    python examples/jobs/ppo/train.py --kills

With --kills six workers are killed at different times (kill -9). Exit code 1 if a prompt was not trained exactly once
in each epoch, a step is missing, or a worker was restarted that was not killed.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from evidence import Kill, lineage, newest_step, problems
from picture import draw
from template import ppo

from dlrover_hooks.protocol import JobPhase, WorkerState

KILLS = {0.1: "rollout 0", 0.25: "trainer 1", 0.4: "rollout 1", 0.55: "trainer 0", 0.7: "rollout 0", 0.85: "trainer 1"}
"""By the share of all steps that are done before the kill."""


def shoot(handle: Any, target: str) -> bool:
    """Kill a worker. False if it does not run at the moment."""
    running = {f"{one.role} {one.rank}": one.pid for one in handle.status().workers if one.state is WorkerState.RUNNING}
    if target in running:
        os.kill(running[target], signal.SIGKILL)
    return target in running


def run(handle: Any, folder: Path, steps: int, kills: dict[float, str]) -> list[Kill]:
    """Kill workers until all of `kills` are done, or the job is over."""
    done, left = [], list(kills.items())
    while left and handle.status().phase is JobPhase.RUNNING:
        step = newest_step(folder)
        if step >= left[0][0] * steps and shoot(handle, left[0][1]):
            done.append(Kill(left.pop(0)[1], step, time.time()))
            print(f"step {step}: kill -9 {done[-1].target}", flush=True)
        time.sleep(0.05)
    return done


def main(given: argparse.Namespace) -> None:
    config = {"prompts": given.prompts, "epochs": given.epochs, "updates": 2}
    steps = config["updates"] * given.epochs * -(-given.prompts // 64)
    with tempfile.TemporaryDirectory() as name:
        folder, began = Path(name), time.time()
        handle = ppo().config(config, folder=name).build().submit(backend=given.backend, wait=False)
        kills = run(handle, folder, steps, KILLS if given.kills else {})
        code, status, trained = handle.wait(), handle.status(), lineage(folder)
        wrong = [f"exit code {code}: {status.reason}"] if code else problems(folder, status, kills, config)
    made, seen = len(trained) * config["updates"], sum(len(line["positions"]) for of in trained.values() for line in of)
    print(f"{made} of {steps} steps, {seen} answers, {len(kills)} kills, {time.time() - began:.0f} s", flush=True)
    if trained:
        draw(trained, status.workers, kills, given.out)
        print(given.out)
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["local", "ray"], default="local")
    parser.add_argument("--kills", action="store_true", help="kill workers while the job runs")
    parser.add_argument("--prompts", type=int, default=4800)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("build/ppo.png"))
    main(parser.parse_args())
