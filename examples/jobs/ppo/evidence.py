"""Checks a run by the records of its trainers and the events of its job."""

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

Line = dict[str, Any]


class Kill(NamedTuple):
    """A kill. `target`: `ROLE RANK`. `step`: the newest step at that time. `at`: the time, from `time.time`."""

    target: str
    step: int
    at: float


FAILURES = ("lost", "replace", "rejoin", "role", "job", "fail")
"""Kinds of events: a worker was lost, or a policy was applied."""


def rounds(folder: Path) -> dict[int, list[Line]]:
    """The records of all ranks, by round. A line that is still being written is skipped."""
    found: dict[int, list[Line]] = {}
    for path in folder.glob("*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        found.setdefault(int(path.stem.split("-")[0]), []).extend(json.loads(one) for one in lines if one[-1] == "\n")
    return dict(sorted(found.items()))


def newest_step(folder: Path) -> int:
    """The newest step of the newest round; -1: there is none yet."""
    last = max(rounds(folder).items(), default=(0, []))[1]
    return max((line["step"] for line in last), default=-1)


def lineage(folder: Path) -> dict[int, list[Line]]:
    """For each step that is in the model, the records of the last round that made it. Earlier ones were rolled back."""
    steps: dict[int, list[Line]] = {}
    for lines in rounds(folder).values():
        first = min(line["step"] for line in lines)
        steps = {step: before for step, before in steps.items() if step < first}
        for line in lines:
            steps.setdefault(line["step"], []).append(line)
    return dict(sorted(steps.items()))


def problems(folder: Path, status: Any, kills: list[Kill], config: dict[str, int], trainers: int = 2) -> list[str]:
    """What is wrong with a run, as sentences."""
    steps, batches = lineage(folder), config["epochs"] * -(-config["prompts"] // (32 * trainers))
    found = []
    if list(steps) != [config["updates"] * number for number in range(batches)]:
        found.append(f"{len(steps)} batches were trained, the last one at step {max(steps)}, not {batches}")
    if any(len(lines) != trainers for lines in steps.values()):
        found.append("a trainer's part of a step is missing, or is there twice")
    for epoch in range(config["epochs"]):
        lines = [line for of in steps.values() for line in of if line["epoch"] == epoch]
        seen = Counter(position for line in lines for position in line["positions"])
        if seen != Counter(range(config["prompts"])):
            found.append(f"epoch {epoch}: {len(seen)} positions were trained, {seen.total()} times in all")
    policy = {"trainer": "rejoin", "rollout": "replace"}
    expected = [(kind, kill.target) for kill in kills for kind in ("lost", policy[kill.target.split()[0]])]
    events = [(one.kind, f"{one.role} {one.rank}") for one in status.events if one.kind in FAILURES]
    if events != expected:
        found.append(f"the events are {events}")
    targets = [kill.target for kill in kills]
    for one in status.workers:
        if one.life != 1 + targets.count(f"{one.role} {one.rank}"):
            found.append(f"{one.role} {one.rank} is at life {one.life}")
    return found
