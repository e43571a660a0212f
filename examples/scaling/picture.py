"""The picture of a run whose nodes were planned: samples per second, workers, and what became of each plan."""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

COLOURS = {"kept": "tab:green", "rolled back": "tab:red"}
BARS = 100
"""At most, of at least a second each."""
LINE = 0.24
"""Of the list of plans, in inches."""


def draw(rows: list[list[float]], plans: list[dict], batch: int, title: str, out: Path) -> None:
    """Save it as `out`.

    rows: of each step the time, its number, the workers that made it, the loss. plans: as `dlrover-hooks plans --json`
    shows them, each with the times `made` and `settled`. batch: samples of a step.
    """
    start, height = plans[0]["made"], 5.85 + LINE * len(plans)
    times, end = [row[0] - start for row in rows], rows[-1][0] - start
    bars = max(1, min(BARS, int(end)))
    figure, (speed, nodes) = plt.subplots(2, sharex=True, figsize=(10, height), height_ratios=(2, 1))
    figure.subplots_adjust(left=0.09, right=0.97, top=4.8 / height, bottom=0.55 / height, hspace=0.08)
    speed.hist(times, bars, (0, end), weights=[batch * bars / end] * len(times), color="tab:blue", alpha=0.7)
    speed.set(xlim=(0, end), ylabel=f"samples per second (means of {end / bars:.1f} s)")
    draw_workers(nodes, times, [row[2] for row in rows])
    for at, plan in enumerate(plans):
        colour, made = COLOURS.get(plan["outcome"], "dimgray"), plan["made"] - start
        for axis in (speed, nodes):
            axis.axvline(made, color=colour, linestyle="--", linewidth=1)
            if plan["outcome"] in COLOURS:
                axis.axvspan(made, plan["settled"] - start, color=colour, alpha=0.15, linewidth=0)
        badge = {"boxstyle": "circle", "facecolor": colour, "edgecolor": "white"}
        style = {"ha": "center", "color": "white", "size": 8, "weight": "bold", "bbox": badge}
        place = ("data", "axes fraction")  # those of two plans made at once are above each other
        speed.annotate(f"{plan['number']}", (made, 1), (0, 10 + 18 * (at % 2)), place, "offset points", **style)
        columns = f"plan {plan['number']}", f"after {made:.0f} s", plan["what"], verdict(plan, batch)
        for left, text in zip((0.09, 0.15, 0.24, 0.6), columns, strict=True):
            figure.text(left, 1 - (0.55 + LINE * at) / height, text, color=colour, size=9)
    figure.suptitle(title, y=1 - 0.15 / height)
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


def verdict(plan: dict, batch: int) -> str:
    """What became of it, with the speeds that decided that."""
    if plan["outcome"] not in COLOURS:
        return plan["outcome"]
    return f"{plan['outcome']}: {batch * plan['before']:.0f} → {batch * plan['measured']:.0f} samples/s"
