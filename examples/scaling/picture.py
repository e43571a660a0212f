"""The picture of a run whose nodes were planned: samples per second, workers, and what became of each plan."""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

COLOURS = {"kept": "tab:green", "rolled back": "tab:red"}
BARS = 100
"""At most, of at least a second each."""


def draw(rows: list[list[float]], plans: list[dict], batch: int, title: str, out: Path) -> None:
    """Save it as `out`.

    rows: of each step the time, its number, the workers that made it, the loss. plans: as `dlrover-hooks plans --json`
    shows them, each with the times `made` and `settled`. batch: samples of a step.
    """
    start = plans[0]["made"]
    times, end = [row[0] - start for row in rows], rows[-1][0] - start
    bars = max(1, min(BARS, int(end)))
    figure, (speed, nodes) = plt.subplots(2, sharex=True, figsize=(10, 6), height_ratios=(2, 1))
    speed.hist(times, bars, (0, end), weights=[batch * bars / end] * len(times), color="tab:blue", alpha=0.7)
    speed.set(xlim=(0, end), ylabel=f"samples per second (means of {end / bars:.1f} s)")
    draw_workers(nodes, times, [row[2] for row in rows])
    for plan in plans:
        colour = COLOURS.get(plan["outcome"], "dimgray")
        made, settled = plan["made"] - start, plan["settled"] - start
        for axis in (speed, nodes):
            axis.axvline(made, color=colour, linestyle="--", linewidth=1)
            if plan["outcome"] in COLOURS:
                axis.axvspan(made, settled, color=colour, alpha=0.15, linewidth=0)
        label(speed, plan, batch, made, colour)
    figure.suptitle(title, y=0.96)
    figure.subplots_adjust(left=0.09, right=0.97, top=0.76, bottom=0.08, hspace=0.08)
    figure.savefig(out, dpi=120)


def draw_workers(axis: Axes, times: list[float], workers: list[float]) -> None:
    """Steps, each with its number."""
    axis.fill_between(times, workers, step="post", color="tab:orange", alpha=0.7, linewidth=0)
    axis.set(xlabel="seconds since the first plan; shaded: from a plan until it is kept or rolled back")
    axis.set(ylabel="workers", ylim=(0, max(workers) + 1), yticks=range(int(max(workers)) + 2))
    changes = [at for at in range(1, len(workers)) if workers[at] != workers[at - 1]]
    for at, after in zip([0, *changes], [*changes, len(workers) - 1], strict=True):
        if times[after] - times[at] > times[-1] / 40:
            middle = (times[at] + times[after]) / 2
            axis.text(middle, workers[at] + 0.1, f"{workers[at]:g}", ha="center", weight="bold")


def label(axis: Axes, plan: dict, batch: int, made: float, colour: str) -> None:
    """Above the axis, in one of three rows, so that the labels of plans that follow each other closely do not meet."""
    words = f"plan {plan['number']}: {plan['what']}: {plan['outcome']}"
    if plan["outcome"] in COLOURS:
        words += f", {batch * plan['before']:.0f} → {batch * plan['measured']:.0f} samples/s"
    row, place = 1.04 + 0.085 * (-plan["number"] % 3), axis.get_xaxis_transform()
    side = "left" if made < 0.6 * axis.get_xlim()[1] else "right"
    axis.plot([made, made], [1, row + 0.05], color=colour, linestyle="--", linewidth=1, transform=place, clip_on=False)
    axis.text(made, row, f" {words} ", color=colour, ha=side, fontsize=9, transform=place)
