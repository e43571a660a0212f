"""Run the example beside this script on one machine without a configuration, and draw what the master made of it.

`make demo-scaling`. Exit code 1 if the run failed, a step is missing or made twice, or no plan was decided.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--out", default="build/demo-scaling/scaling.png")
options = parser.parse_args()
JOB, HOOKS = f"demo-scaling-{os.getpid()}", [sys.executable, "-m", "dlrover_hooks"]
DECIDED = ("kept", "rolled back")


def plans() -> list[dict]:
    """The plans so far, each with the time at which it was made."""
    found = subprocess.run([*HOOKS, "plans", JOB, "--json"], capture_output=True, timeout=60)
    rows = json.loads(found.stdout).get("plans", []) if found.returncode == 0 else []
    return [row | {"at": time.time() - row["age_s"]} for row in rows]


def run(folder: Path) -> tuple[int, list[list[float]], list[dict]]:
    """The exit code, the rows of the script's log, and the plans, of which three are decided."""
    log, said, found = folder / "steps.csv", folder / "log.txt", []
    script = [str(Path(__file__).with_name("train.py").absolute()), "--log", str(log), "--epochs", "60"]
    flags = ["--mode", "single-job", "--max-workers", "4", "--max-cpu", "4", "--plan-window", "5s"]
    with said.open("w") as file:
        launcher = subprocess.Popen(
            [*HOOKS, "run", *flags, "--job", JOB, *script], cwd=folder, stdout=file, stderr=file
        )
    try:
        while launcher.poll() is None:
            before, found = len(found), plans() or found
            for row in found[before:]:
                print(f"plan {row['number']}: {row['what']} ({row['reason']})", flush=True)
            if sum(row["outcome"] in DECIDED for row in found) >= 3:
                break
            time.sleep(1.0)
    finally:
        ended = launcher.poll()
        launcher.terminate()
        launcher.wait(120)
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    Path(options.out).with_suffix(".log").write_text(said.read_text())
    rows = [[float(word) for word in line.split(",")] for line in log.read_text().splitlines()]
    return ended or 0, rows, found


with tempfile.TemporaryDirectory() as name:
    code, rows, found = run(Path(name))
minutes = [(row[0] - rows[0][0]) / 60 for row in rows]
every = len(rows) // 120 + 1
speeds = [every / (rows[at][0] - rows[at - every][0]) for at in range(every, len(rows), every)]
figure, axis = plt.subplots(figsize=(9, 4))
axis.plot(minutes[every::every], speeds, color="tab:blue", label="steps per second")
axis.set(xlabel="minutes", ylabel="steps per second", ylim=(0, 1.3 * max(speeds)))
nodes = axis.twinx()
nodes.step(minutes, [row[2] for row in rows], color="tab:orange", where="post", label="workers")
nodes.set(ylabel="workers", ylim=(0, 5), yticks=range(5))
for plan in (row for row in found if row["outcome"] in DECIDED):
    what, colour = f"{plan['what']}: {plan['outcome']}", "tab:green" if plan["outcome"] == "kept" else "tab:red"
    axis.axvline((plan["at"] - rows[0][0]) / 60, color=colour, linestyle="--", linewidth=1, label=what)
figure.legend(loc="upper center", ncols=3, fontsize=8)
figure.savefig(options.out, dpi=120)
steps = [int(row[1]) for row in rows]
again, missing = len(steps) - len(set(steps)), max(steps) - min(steps) + 1 - len(set(steps))
decided = sum(row["outcome"] in DECIDED for row in found)
print(f"{len(set(steps))} steps, {missing} missing, {again} made twice; {decided} plans decided: {options.out}")
sys.exit(0 if not code and not missing and not again and decided else 1)
