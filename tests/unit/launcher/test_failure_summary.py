"""The first-failure screen, word by word."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from dlrover_hooks.launcher.failures.summary import Failure, FailureRecord, FailureSummary, again, screen
from dlrover_hooks.launcher.failures.verdict import DONE, GAVE_UP, USAGE, USER_ERROR, WorkerExit
from dlrover_hooks.launcher.interruption import after
from dlrover_hooks.launcher.processes.worker_errors import WorkerError
from dlrover_hooks.protocol import BAD_NODE, REQUEUE, JobView, Phase

COMMAND = "dlrover-hooks run --job mine -n 2 train.py"
RULE = "-" * 80
WORDS = WorkerError(
    "ValueError: the learning rate is not a number, nor is it anything else that could be used", "a.py:12, f"
)

KILLED = f"""\
{RULE}
job mine: the first failure (the job is done)
  who    worker 1 on node a
  why    SIGKILL
  when   at step 17 or later
  lost   at least 1 step: it went on from step 16
  done   restarting 2 workers
  end    the job is done
{RULE}
"""

GIVEN_UP = f"""\
{RULE}
job mine: the first failure
  who    worker 1 on node b
  why    exit code 1: ValueError: the learning rate is not a number, nor is it
         anything else that could be used
         a.py:12, f
  when   at step 17 or later
  lost   no step that is known to be finished: it went on from step 17
  done   restarting 2 workers
  later  worker 0 on node a at step 20 or later: SIGSEGV
         worker 0 on node a at step 21 or later: lost: silent for too long
         worker 0 on node a before training began: exit code 3, see its own
         output above
         and 2 more failures
  end    given up (exit code 77): look for the cause above first, then
  next   {COMMAND}
{RULE}
"""

AT_ONCE = f"""\
{RULE}
job mine: the first failure
  who    worker 0 on node a
  why    exit code 1: ValueError: the learning rate is not a number, nor is it
         anything else that could be used
         a.py:12, f
  when   before training began
  done   nothing: it would fail again
  end    the script failed (exit code 1): mend it first, then
  next   {COMMAND}
{RULE}
"""

SPENT = f"""\
{RULE}
job mine: the first failure
  who    worker 0 on node a
  why    SIGKILL
  when   at step 3 or later
  done   nothing: the restarts are spent (--max-restarts)
  end    given up (exit code 77): look for the cause above first, then
  next   {COMMAND}
{RULE}
"""

INTERRUPTED = f"""\
{RULE}
job mine: the first failure (the job went on until it was ended)
  who    worker 1 on node a
  why    SIGKILL
  when   at step 17 or later
  lost   at least 1 step: it went on from step 16
  done   restarting 2 workers
  end    ended with Ctrl-C
  next   {COMMAND}
{RULE}
"""


def failure(code: int | None, step: int | None, *, name: str = "worker 0", node: str = "a", then: str = "",
            resumed: int | None = None, reported: WorkerError | None = None) -> Failure:  # fmt: skip
    return Failure(WorkerExit(name, code, reported=reported), node, then, 1, step, resumed)


@pytest.mark.parametrize(
    ("code", "failures", "text"),
    [
        (0, [failure(-9, 17, name="worker 1", then="restarting 2 workers", resumed=16)], KILLED),
        (
            77,
            [
                failure(
                    1, 17, name="worker 1 on node b", node="", then="restarting 2 workers", resumed=17, reported=WORDS
                ),
                *(failure(-11, 20), failure(None, 21), failure(3, None), failure(-9, 22), failure(-9, 23)),
            ],
            GIVEN_UP,
        ),
        (1, [failure(1, None, reported=WORDS)], AT_ONCE),
        (77, [failure(-9, 3)], SPENT),
        (130, [failure(-9, 17, name="worker 1", then="restarting 2 workers", resumed=16)], INTERRUPTED),
    ],
)
def test_word_by_word(code: int, failures: list[Failure], text: str) -> None:
    shown = screen(FailureSummary("mine", code, tuple(failures), COMMAND))
    assert shown == text
    assert max(map(len, shown.splitlines())) <= 80
    assert "\x1b" not in shown
    assert screen(FailureSummary("mine", code, tuple(failures), COMMAND), colour=True).count("\x1b") == 2


def view(attempt: int, step: int, begun: int | None) -> JobView:
    return JobView("mine", "run", attempt, 1, Phase.TRAINING, step, begun_step=begun)


def test_a_later_attempt_says_what_was_lost() -> None:
    """The master is asked when it is known anyway: at the next failure, and at the end."""
    record = FailureRecord("a")
    record.failed(WorkerExit("worker 0", -9), view(1, 17, 0), "restarting 1 worker")
    record.heard(view(1, 17, 0))
    record.failed(WorkerExit("worker 3 on node b", 1, here=False), view(2, 30, 16), "")
    record.heard(None)
    first, second = record.failures
    assert (first.step, first.resumed, first.node) == (17, 16, "a")
    assert (second.step, second.resumed, second.node) == (30, None, "")


@pytest.mark.parametrize(
    ("given", "command"),
    [
        (["run", "-n", "2", "train.py", "--fresh-eyes", "a b"],
         "dlrover-hooks run --job mine -n 2 train.py --fresh-eyes 'a b'"),
        (["run", "--job", "mine", "--fresh", "train.py"], "dlrover-hooks run --job mine train.py"),
        (["run", "--rdzv-id=mine", "train.py"], "dlrover-hooks run --rdzv-id=mine train.py"),
        (["run", "--job", "mine", "--token", "secret", "train.py"],
         "dlrover-hooks run --job mine --token ... train.py"),
        (["run", "--job", "mine", "--token=secret", "train.py"], "dlrover-hooks run --job mine --token=... train.py"),
    ],
)  # fmt: skip
def test_the_command_goes_on(given: list[str], command: str) -> None:
    assert again(given, "mine") == command


def test_one_table_of_exit_codes() -> None:
    """What the manual's table names is what the launcher says; every end has a line here."""
    page = (Path(__file__).parents[3] / "docs/operate.md").read_text()
    table = page[page.index("## Exit codes") :].split("\n\n")[2]
    codes = [int(code) for code in re.findall(r"^\| (\d+) \|", table, re.M)]
    assert codes == [DONE, USER_ERROR, REQUEUE, BAD_NODE, GAVE_UP, USAGE, 128 + signal.SIGINT, 128 + signal.SIGTERM]
    assert codes == [0, 1, 75, 76, 77, 78, 130, 143], "stable: scripts and pod failure policies know them"
    for code in codes:
        text = screen(FailureSummary("mine", code, (failure(-9, 3),), COMMAND))
        assert f"end    exit code {code}" not in text
        assert ("  next  " in text) == (code != DONE)


@pytest.mark.parametrize(
    ("number", "codes", "finished", "code"),
    [
        (signal.SIGTERM, [75, 75], False, 75),
        (signal.SIGTERM, [75, -9], False, 143),
        (signal.SIGTERM, [0, 0], True, 0),
        (signal.SIGTERM, [0, 0], False, 143),
        (signal.SIGTERM, [], False, 143),
        (signal.SIGINT, [75, 75], False, 130),
    ],
)
def test_what_a_signal_ends_with(number: int, codes: list[int], finished: bool, code: int) -> None:
    seen = JobView("mine", "run", 1, 1, Phase.TRAINING, 5, finished=finished)
    assert after(number, codes, seen) == code
    assert after(number, codes, None) == (code if not finished else 143)
