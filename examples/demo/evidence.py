"""Reads the records and final weights of the demo's runs, and compares the runs."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file


class Run:
    """The records of one run: one file of lines per round and rank. `read` may be called while the files grow."""

    def __init__(self, records: Path) -> None:
        self.records = records
        self.lives: dict[int, dict[int, list[dict[str, Any]]]] = {}
        self._offsets: dict[Path, int] = {}

    def read(self) -> "Run":
        for path in sorted(self.records.glob("*.jsonl")):
            life, rank = map(int, path.stem.split("-"))
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
                self._offsets[path] = self._offsets.get(path, 0) + (len(whole) + 1 if whole else 0)
            self.lives.setdefault(life, {}).setdefault(rank, []).extend(map(json.loads, whole.splitlines()))
        return self

    @property
    def step(self) -> int:
        """The newest step in the newest round."""
        lines = [line for lines in self.lives.get(max(self.lives, default=0), {}).values() for line in lines]
        return max((line["step"] for line in lines if "step" in line), default=0)

    @property
    def master(self) -> str:
        return self._heads()[0]["master"]

    @property
    def pids(self) -> dict[int, int]:
        return {rank: lines[0]["pid"] for rank, lines in self.lives[max(self.lives)].items()}

    @property
    def restored_from(self) -> list[str]:
        return [head["restored_from"] for head in self._heads() if head["restored_from"] is not None]

    def _heads(self) -> list[dict[str, Any]]:
        return [ranks[min(ranks)][0] for _, ranks in sorted(self.lives.items())]

    def first_step_after(self, at: float) -> float | None:
        """The time of the first step that was recorded by a worker that started after time `at`."""
        found = [
            line["at"]
            for ranks in self.lives.values()
            for lines in ranks.values()
            if lines and lines[0]["at"] > at
            for line in lines
            if "step" in line and line["at"] > at
        ]
        return min(found, default=None)

    def lineage(self) -> dict[int, list[dict[str, Any]]]:
        """For each step the lines of the last round that trained it. Earlier ones were rolled back."""
        steps: dict[int, list[dict[str, Any]]] = {}
        for _, ranks in sorted(self.lives.items()):
            lines = [line for lines in ranks.values() for line in lines if "step" in line]
            for step in [step for step in steps if lines and step >= min(line["step"] for line in lines)]:
                del steps[step]
            for line in lines:
                steps.setdefault(line["step"], []).append(line)
        return dict(sorted(steps.items()))

    def losses(self) -> tuple[list[int], list[float]]:
        lineage = self.lineage()
        return list(lineage), [sum(line["loss"] for line in lines) / len(lines) for lines in lineage.values()]

    def weights(self) -> dict[str, Any]:
        """The final generation, read with stock safetensors."""
        root = self.records.parent / "saved"
        newest = json.loads((root / "latest.json").read_text())
        (folder,) = [path for path in root.glob("step-*") if path.name.startswith(f"step-{_step(newest):010d}")]
        return load_file(next(folder.glob("shard-00001-*.safetensors")))


def _step(latest: dict[str, Any]) -> int:
    return latest["generation"]["step"] if "generation" in latest else latest["step"]


def visited_exactly_once(run: Run, epochs: int, windows: int, workers: int) -> bool:
    """True if every window was trained once per epoch along the surviving lineage, and no step is missing."""
    lineage = run.lineage()
    counts: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(epochs)}
    for lines in lineage.values():
        for line in lines:
            counts[line["epoch"]].update(line["ids"])
    whole = list(lineage) == list(range(1, len(lineage) + 1)) and all(len(x) == workers for x in lineage.values())
    return whole and all(count == Counter(range(windows)) for count in counts.values())


def compare(calm: Run, shot: Run, shots: list[Any], options: Any) -> dict[str, Any]:
    ours, theirs = shot.weights(), calm.weights()
    state = [name for name in theirs if name.startswith("state.")]
    difference = max(
        float((ours[name].double() - theirs[name].double()).abs().max()) for name in state if theirs[name].numel()
    )
    lineage = shot.lineage()
    report = {
        "kills": len([shot for shot in shots if shot.at]),
        "killed": [{"target": s.target, "step": s.step, "recovery_s": round(s.recovery_s, 2)} for s in shots],
        "workers": options.workers,
        "steps": len(lineage),
        "samples": sum(len(line["ids"]) for lines in lineage.values() for line in lines),
        "visited_exactly_once": all(
            visited_exactly_once(run, options.epochs, options.windows, options.workers) for run in (calm, shot)
        ),
        "max_param_diff": difference,
        "final_loss": shot.losses()[1][-1],
        "undisturbed_final_loss": calm.losses()[1][-1],
        "restored_from": shot.restored_from,
        "recovery_s": [round(shot.recovery_s, 2) for shot in shots],
    }
    report["kept"] = bool(
        report["visited_exactly_once"]
        and difference == 0.0
        and report["kills"] >= 3
        and "memory" in report["restored_from"]
        and len(lineage) == options.steps
    )
    return report


def plot(calm: Run, shot: Run, shots: list[Any], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    axes.plot(*calm.losses(), color="#9aa5b1", linewidth=5, alpha=0.6, label="left alone", solid_capstyle="round")
    axes.plot(*shot.losses(), color="#0b7285", linewidth=1.3, label=f"shot {len(shots)} times")
    top = axes.get_ylim()[1]
    for kill in shots:
        axes.axvline(kill.step, color="#c92a2a", linestyle=(0, (4, 3)), linewidth=1)
        axes.annotate(f"kill -9 {kill.target}", (kill.step, top), (4, -6), textcoords="offset points", rotation=90,
                      va="top", fontsize=8, color="#c92a2a")  # fmt: skip
    axes.set(xlabel="optimizer step", ylabel="training loss", title="Same losses, same weights, bit for bit")
    axes.legend(loc="upper right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _back(kill: dict[str, Any]) -> str:
    return "training never stopped, answers again" if kill["target"] == "master" else "trains again"


def table(console: Console, report: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(report, indent=2) + "\n")
    rows = Table(show_header=False, box=None, padding=(0, 2))
    for kill in report["killed"]:
        when = f"at step {kill['step']}, {_back(kill)} after {kill['recovery_s']:.1f} s"
        rows.add_row(f"kill -9 {kill['target']}", when)
    rows.add_row("resumed from", ", ".join(report["restored_from"]))
    rows.add_row("steps, samples", f"{report['steps']}, {report['samples']}")
    rows.add_row("every sample exactly once", str(report["visited_exactly_once"]))
    rows.add_row("largest difference of any weight", str(report["max_param_diff"]))
    rows.add_row("final loss", f"{report['final_loss']:.4f} (undisturbed {report['undisturbed_final_loss']:.4f})")
    console.print(rows)
    verdict = "[green]every promise kept[/]" if report["kept"] else "[red]A PROMISE IS BROKEN[/]"
    console.print(f"{verdict}: {path}, {path.with_name('loss.png')}")
