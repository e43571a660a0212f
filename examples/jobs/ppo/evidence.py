"""What the records of the trainers and the events of the job say about a run."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def rounds(folder: Path) -> dict[int, list[Line]]:
    """The lines of all ranks, by round. A line that is still being written is left out."""
    found: dict[int, list[Line]] = {}
    for path in folder.glob("*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        found.setdefault(int(path.stem.split("-")[0]), []).extend(json.loads(one) for one in lines if one[-1] == "\n")
    return dict(sorted(found.items()))


def newest_step(folder: Path) -> int:
    """Of the newest round; -1: there is none yet."""
    last = max(rounds(folder).items(), default=(0, []))[1]
    return max((line["step"] for line in last), default=-1)


def lineage(folder: Path) -> dict[int, list[Line]]:
    """For each step that is in the model, the lines of the last round that made it. What came before was undone."""
    steps: dict[int, list[Line]] = {}
    for lines in rounds(folder).values():
        first = min(line["step"] for line in lines)
        steps = {step: before for step, before in steps.items() if step < first}
        for line in lines:
            steps.setdefault(line["step"], []).append(line)
    return dict(sorted(steps.items()))


def problems(folder: Path, status: Any, kills: list[str], config: dict[str, int], trainers: int = 2) -> list[str]:
    """What is not as promised. `kills`: the killed workers, as `ROLE RANK`, in order."""
    found, steps = [], lineage(folder)
    batches = config["epochs"] * -(-config["prompts"] // (32 * trainers))
    if list(steps) != [config["updates"] * number for number in range(batches)]:
        found.append(f"{len(steps)} batches were trained, the last one at step {max(steps)}, not {batches}")
    if any(len(lines) != trainers for lines in steps.values()):
        found.append("a trainer's part of a step is missing, or is there twice")
    for epoch in range(config["epochs"]):
        lines = [line for of in steps.values() for line in of if line["epoch"] == epoch]
        seen = Counter(position for line in lines for position in line["positions"])
        if seen != Counter(range(config["prompts"])):
            found.append(f"epoch {epoch}: {len(seen)} positions were seen, in all {seen.total()} times")
    lost = [f"{one.role} {one.rank}" for one in status.events if one.kind == "lost"]
    if lost != kills:
        found.append(f"the events say that these were lost: {lost}")
    for one in status.events:
        if one.kind in ("replace", "rejoin") and one.kind != ("rejoin" if one.role == "trainer" else "replace"):
            found.append(f"{one.role} {one.rank}: {one.kind}")
    if any(one.kind in ("role", "job") for one in status.events):
        found.append("more than the killed worker was started again")
    for one in status.workers:
        if one.life != 1 + kills.count(f"{one.role} {one.rank}"):
            found.append(f"{one.role} {one.rank} is at life {one.life}")
    return found
