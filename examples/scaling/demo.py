"""Run the example beside this script on one machine without a configuration, and draw what the master made of it.

`make demo-scaling`. Flags that are not listed here are those of `dlrover-hooks run`. Exit code 1 if the run failed, a
step is missing or was made twice, the job did not grow, or no plan was decided.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from picture import draw

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--out", type=Path, default="build/demo-scaling/scaling.png", help="with a .csv and a .log beside it"
)
parser.add_argument("--decided", type=int, default=3, help="the run ends once so many are kept or rolled back (3)")
parser.add_argument("--more", type=int, default=400, help="steps after the last of them (400)")
options, more_flags = parser.parse_known_args()
FLAGS = ["--mode", "single-job", "--max-workers", "4", "--max-cpu", "4", "--plan-window", "5s", *more_flags]
JOB, HOOKS = f"demo-scaling-{os.getpid()}", [sys.executable, "-m", "dlrover_hooks"]
BATCH = 64  # samples of a step, however many workers there are


def note(plans: dict[int, dict]) -> int:
    """Add what `dlrover-hooks plans` shows, with the times. Returns how many plans are decided."""
    found = subprocess.run([*HOOKS, "plans", JOB, "--json"], capture_output=True, timeout=60)
    now = time.time()
    for row in json.loads(found.stdout).get("plans", []) if found.returncode == 0 else []:
        before = plans.get(row["number"], {"made": now - row["age_s"], "settled": now, "outcome": ""})
        if row["outcome"] != before["outcome"]:
            print(f"plan {row['number']}, {row['what']} ({row['reason']}): {row['outcome']}", flush=True)
            plans[row["number"]] = before | row | {"settled": now}
    return sum(plan["outcome"] in ("kept", "rolled back") for plan in plans.values())


def run(log: Path) -> tuple[int, dict[int, dict]]:
    """The exit code, and the plans by number."""
    script, plans, last = Path(__file__).with_name("train.py").absolute(), {}, sys.maxsize
    command = [*HOOKS, "run", *FLAGS, "--job", JOB, str(script), "--log", str(log.absolute()), "--epochs", "40"]
    with log.with_suffix(".log").open("w") as said:
        launcher = subprocess.Popen(command, cwd=log.parent, stdout=said, stderr=said)
    try:
        while launcher.poll() is None and (steps := log.read_text().count("\n")) < last:
            time.sleep(2.0)
            if note(plans) >= options.decided and last == sys.maxsize:
                last = steps + options.more
    finally:
        launcher.terminate()
        launcher.wait(120)
    return launcher.returncode, plans


options.out.parent.mkdir(parents=True, exist_ok=True)
log = options.out.with_suffix(".csv")
log.write_text("")
code, plans = run(log)
rows = [[float(word) for word in line.split(",")] for line in log.read_text().splitlines()]
steps, grown = [int(row[1]) for row in rows], {int(row[2]) for row in rows}
if not rows:
    sys.exit(f"no step was made: see {log.with_suffix('.log')}")
missing, again = max(steps) - len(set(steps)), len(steps) - len(set(steps))
decided = sum(plan["outcome"] in ("kept", "rolled back") for plan in plans.values())
said = f"{min(grown)} to {max(grown)} workers, {len(set(steps))} steps, {missing} missing, {again} made twice"
draw(rows, list(plans.values()), BATCH, said, options.out)
print(f"{said}; plans decided: {decided}; {options.out}")
good = not missing and not again and decided and grown > {1}
ended = code in (0, 75, 143)  # 75 and 143: by this script, when enough was seen
sys.exit(0 if ended and good else f"exit code of the launcher: {code}; it says: {log.with_suffix('.log')}")
