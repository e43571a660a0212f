"""What a framework's callback costs a training step of about 5 ms: `make bench-callback`.

One process trains with the callback and without it, in turn, so that a busy machine hurts both alike. A figure is the
CPU time of the training thread: with the callback beyond that without, in per cent. Saves are as often as by default,
and their cost is shared out to the steps.
Writes build/bench/callback.json. BENCH_ARGS: `--rounds N` (24).
"""

from __future__ import annotations

import argparse

from tests.benchmarks import keras_callback, transformers_callback
from tests.benchmarks.report import report

MEASURED = (keras_callback.measured, transformers_callback.measured)
"""One function for each framework: given the number of rounds, it returns conditions and figures."""
BARS = {"callback_overhead_pct_keras": 2.0, "callback_overhead_pct_transformers": 2.0}


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench-callback", description=__doc__)
    parser.add_argument("--rounds", type=int, default=24, help="each with new models, some hundred steps of each way")
    given = parser.parse_args()
    conditions, found = dict[str, object](), dict[str, float]()
    for measured in MEASURED:
        more, figures = measured(given.rounds)
        conditions |= more
        found |= figures
    return report("callback", "callback of a framework: cost of a step", conditions, found, BARS)


if __name__ == "__main__":
    raise SystemExit(main())
