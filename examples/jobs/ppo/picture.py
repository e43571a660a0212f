"""Draws a run: the reward by step, and the processes of each worker."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from evidence import Kill
from matplotlib.axes import Axes

KILLED = {"trainer": "#c92a2a", "rollout": "#e8590c"}
LIVES = ("#b5e0e4", "#79bdc5", "#3e98a3", "#0b7285")
"""Colours of the first process of a worker, of the second, and so on."""


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def draw(trained: dict[int, list[dict[str, Any]]], workers: Any, kills: list[Kill], out: Path) -> None:
    """Save the picture as `out`.

    trained: the records by step. workers: those of `JobHandle.status`. kills: in order.
    """
    figure, (top, lanes) = plt.subplots(2, sharex=True, figsize=(10, 6.2), height_ratios=(5, 3), layout="constrained")
    rewards = {step: mean([line["reward"] for line in lines]) for step, lines in trained.items()}
    draw_rewards(top, list(rewards), list(rewards.values()))
    times = [mean([line["at"] for line in lines]) for lines in trained.values()]
    for kill in kills:
        colour = KILLED[kill.target.split()[0]]
        pauses = [after - before for before, after in pairwise(times) if before < kill.at + 1 and after > kill.at]
        text = f"kill -9 {kill.target}\npause {max(pauses, default=0):.1f} s"
        top.axvline(kill.step, color=colour, linestyle=(0, (4, 3)), linewidth=1)
        style: dict[str, Any] = {"rotation": 90, "va": "top", "ha": "right", "fontsize": 9, "color": colour}
        top.annotate(text, (kill.step, 0.99), (-3, 0), ("data", "axes fraction"), "offset points", **style)
    draw_lives(lanes, [f"{one.role} {one.rank}" for one in workers], kills, max(trained))
    figure.suptitle(f"{len(kills)} workers are killed; each of the {len(trained)} batches is in the model once")
    for axis in (top, lanes):
        axis.spines[["top", "right"]].set_visible(False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)


def draw_rewards(axis: Axes, steps: list[int], rewards: list[float]) -> None:
    smooth = [mean(rewards[max(0, at - 9) : at + 1]) for at in range(len(rewards))]
    axis.plot(steps, rewards, color="#9aa5b1", linewidth=1, alpha=0.6, label="of one batch")
    axis.plot(steps, smooth, color="#0b7285", linewidth=2, label="mean of the last 10")
    axis.set(ylabel="reward", ylim=(0, 1.18), xlim=(0, steps[-1]), yticks=[0, 0.2, 0.4, 0.6, 0.8, 1])
    axis.legend(loc="lower right", framealpha=1, edgecolor="none")


def draw_lives(axis: Axes, names: list[str], kills: list[Kill], end: int) -> None:
    """Draw a bar for each process, with its life number."""
    for lane, name in enumerate(names):
        starts = [0, *(kill.step for kill in kills if kill.target == name)]
        for life, (start, stop) in enumerate(pairwise([*starts, end]), 1):
            colour = LIVES[min(life, len(LIVES)) - 1]
            axis.barh(lane, stop - start, 0.7, start, color=colour)
            axis.annotate(f"life {life}", (start, lane), (9, 0), textcoords="offset points", va="center", fontsize=8.5)
            if life > 1:
                axis.plot(start, lane, "x", color=KILLED[name.split()[0]], markersize=8, markeredgewidth=2)
    axis.set(xlabel="optimizer steps", yticks=range(len(names)), yticklabels=names)
    axis.tick_params(axis="y", length=0)
    axis.invert_yaxis()
