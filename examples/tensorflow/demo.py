"""Scale the example 1 -> 2 -> 3 -> 1 while one parameter server and one worker are killed; check it and draw the loss.

`make demo-ps`. Exit code 1 if a step is missing, the loss did not fall, or the run failed.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--python", default=sys.executable, help="the Python that has TensorFlow")
parser.add_argument("--out", default="build/demo-ps/loss.png")
options = parser.parse_args()
EVENTS = {60: "scale --ps 2", 170: "scale --ps 3", 280: "kill ps 1", 390: "kill worker 0", 500: "scale --ps 1"}
JOB = f"demo-ps-{os.getpid()}"


def act(event: str, log: Path) -> None:
    """Scale, or kill the process that runs a task now."""
    command, _, rest = event.partition(" ")
    if command == "scale":
        hooks = [options.python, "-m", "dlrover_hooks", "scale", "--job", JOB, "--no-wait", *rest.split()]
        subprocess.run(hooks, check=True, stdout=subprocess.DEVNULL, timeout=60)
    else:
        os.kill(int(re.findall(rf"\] {rest}: pid (\d+)", log.read_text())[-1]), signal.SIGKILL)


def run(folder: Path) -> tuple[int, list[list[str]], list[tuple[str, int]]]:
    """The exit code, the rows of losses.csv, and the events with the number of rows before each."""
    log, losses, done = folder / "log.txt", folder / "losses.csv", []
    script = Path(__file__).with_name("train.py").absolute()
    command = [options.python, "-m", "dlrover_hooks", "run", "--ps", "1", "--workers", "2", "--job", JOB, str(script)]
    with log.open("w") as file:
        launcher = subprocess.Popen(command, cwd=folder, stdout=file, stderr=file, start_new_session=True)
    try:
        rows: list[list[str]] = []
        while launcher.poll() is None:
            rows = [line.split(",") for line in losses.read_text().splitlines()] if losses.exists() else []
            if len(done) < len(EVENTS) and rows and len(rows) >= list(EVENTS)[len(done)]:
                event = list(EVENTS.values())[len(done)]
                print(f"step {rows[-1][0]}: {event}", flush=True)
                act(event, log)
                done.append((event, len(rows)))
            time.sleep(0.05)
    finally:
        launcher.send_signal(signal.SIGINT)
        launcher.wait(60)
    print(log.read_text() if launcher.returncode else log.read_text().splitlines()[-1])
    return launcher.returncode, [line.split(",") for line in losses.read_text().splitlines()], done


with tempfile.TemporaryDirectory() as name:
    code, rows, events = run(Path(name))
loss = [float(row[1]) for row in rows]
steps = {int(row[0]) for row in rows}
mean = [sum(loss[max(0, at - 15) : at + 1]) / len(loss[max(0, at - 15) : at + 1]) for at in range(len(loss))]
plt.figure(figsize=(9, 4))
plt.plot(mean, color="tab:blue", linewidth=1.5, label="loss, mean of 16 steps")
for event, at in events:
    colour = "tab:red" if event.startswith("kill") else "tab:green"
    plt.axvline(at, color=colour, linestyle="--", linewidth=1)
    plt.text(at + 3, max(mean) * 0.98, event, rotation=90, va="top", color=colour, fontsize=9)
plt.xlabel("steps, in the order in which they were made (those since a checkpoint are made again after a kill)")
plt.ylabel("loss")
plt.legend()
plt.tight_layout()
Path(options.out).parent.mkdir(parents=True, exist_ok=True)
plt.savefig(options.out, dpi=120)
missing = len(set(range(1, max(steps) + 1)) - steps)
again = len(rows) - len(steps)
print(f"{len(steps)} steps, {missing} missing, {again} made again; loss {mean[15]:.3f} -> {mean[-1]:.3f}")
sys.exit(0 if code == 0 and not missing and len(events) == len(EVENTS) and mean[-1] < mean[15] / 2 else 1)
