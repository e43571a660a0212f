"""What a broken round asks of one node: which worker took which along, and which live on."""

from __future__ import annotations

import msgspec
import pytest

from dlrover_hooks.launcher.failures.round_diagnosis import (
    all_ended,
    elsewhere,
    ended_by_master,
    left_only,
    live_on,
    lost_worker,
    missing,
    needed_again,
)
from dlrover_hooks.launcher.failures.verdict import (
    USAGE,
    BadNodes,
    FailureVerdict,
    WorkerExit,
    culprit,
    judge as judged,
)
from dlrover_hooks.protocol import AGAIN, BAD_NODE, REQUEUE, JobView, MemberView, Parting, Phase


def member(name: str, *, node: str = "a", gone: str = "", recovers: bool = True, attached: bool = True, **more: int):
    return MemberView(
        incarnation=name, node=node, rank=int(name[1:]), local_rank=0, attached=attached, alive=not gone,
        recovers=recovers, gone=gone, exit_code=more.get("code"),
    )  # fmt: skip


def view(*members: MemberView, number: int = 2, step: int = 7) -> JobView:
    return JobView(
        job="job", run="run", attempt=1, round=number, phase=Phase.BROKEN, step=step, members=members, begun_step=0
    )


def judge(
    cause: WorkerExit, job: JobView | None, began_at: int = 0, *, failures: int = 1, most: int = 1
) -> FailureVerdict:
    return judged(cause, job, began_at, node="a", failures=failures, max_restarts=most, window_s=60)


def test_the_living_live_on_if_all_of_them_keep_their_process() -> None:
    assert live_on(view(member("w0"), member("w1", gone="lost"), member("w2")), (), 1)
    assert not live_on(view(member("w0"), member("w1", gone="lost"), member("w2", recovers=False)), (), 1)


def test_nobody_lives_on_if_nobody_is_left() -> None:
    """The master may not know yet of those whose process has ended here."""
    assert not live_on(view(member("w0"), member("w1", gone="lost")), ("w0",), 1)
    assert not live_on(view(member("w0", gone="lost")), (), 1)


def test_before_all_have_attached_to_a_whole_start_all_start_again() -> None:
    """Later an unattached member is a newcomer, which joins for itself like the others."""
    half = view(member("w0"), member("w1", attached=False, recovers=False))
    assert not live_on(half, (), 2)
    assert live_on(half, (), 1)
    none_yet = view(member("w0", attached=False, recovers=False), member("w1", attached=False, recovers=False))
    assert not live_on(none_yet, (), 2)
    assert live_on(none_yet, (), 1), "survivors whose new round has just been formed are ended"


def test_a_process_that_the_master_has_ended_hangs() -> None:
    """One that said that it leaves ends by itself."""
    job = view(
        member("w0", gone="lost"),
        member("w1", gone="failed"),
        member("w2"),
        member("w3", gone="done"),
        member("w4", gone="stalled"),
        member("w5", gone="slow"),
    )
    names = {f"w{number}" for number in range(6)}
    assert ended_by_master(job, names) == {"w0": "lost", "w4": "stalled", "w5": "slow"}
    assert ended_by_master(job, {"w2"}) == {}
    said = [str(lost_worker("worker", gone)) for gone in ("lost", "stalled", "slow")]
    assert said == [
        "worker was lost (silent for too long)",
        "worker was lost (it made no steps for too long)",
        "worker was lost (it was slow, and the others waited for it)",
    ]


def test_who_left_by_an_exception_may_be_done() -> None:
    """Until a process has failed: exit codes say it, and none has come, or only 0."""
    left, exited = member("w0", gone="failed"), member("w1", gone="exited", code=0)
    assert left_only(view(left, member("w1")))
    assert left_only(view(left, exited, member("w2", gone="failed", code=0), member("w3", gone="done")))
    assert not left_only(view(left, member("w1", gone="failed", code=1)))
    assert not left_only(view(left, member("w1", gone="lost")))
    assert not left_only(view(left, member("w1", gone="replaced")))
    assert not left_only(view(member("w0"), exited))


def test_a_job_has_ended_when_all_its_processes_have() -> None:
    done, zero = member("w0", gone="done"), member("w1", gone="failed", code=0)
    assert all_ended(view(done, zero, member("w2", gone="exited", code=0)))
    assert not all_ended(view(done, zero, member("w2")))
    assert not all_ended(view(done, member("w1", gone="failed")))


def test_who_ended_with_0_in_the_middle_has_taken_the_others_along() -> None:
    """Not so where it has caught what may have been the end of another one."""
    early, echo = WorkerExit("worker 0", 0), WorkerExit("worker 1", 1)
    assert culprit([echo, early]) is early
    assert str(early) == "worker 0 ended with exit code 0 before the others were done"
    assert culprit([WorkerExit("worker 0", 0, left=True), echo]) is echo
    assert culprit([early, WorkerExit("worker 1", -9)]).name == "worker 1"


def test_ends_on_other_nodes_are_those_that_nobody_asked_for() -> None:
    job = view(
        member("w0", gone="lost", code=-9), member("w1", node="b", gone="lost", code=-9),
        member("w2", node="b", gone="replaced"), member("w3", node="c", gone="done"),
        member("w4", node="c", gone="lost"), member("w5", node="c", gone="stalled", code=-9),
    )  # fmt: skip
    assert [str(end) for end in elsewhere(job, "a")] == [
        "worker 1 on node b died (SIGKILL)",
        "worker 4 on node c was lost (silent for too long)",
        "worker 5 on node c was lost (it made no steps for too long)",
    ]


def test_the_own_node_is_not_missing() -> None:
    job = msgspec.structs.replace(view(member("w0", gone="lost")), lost_nodes=("a", "b", "c"))
    assert missing(job, "a") == "b, c"
    assert missing(None, "a") == ""


@pytest.mark.parametrize("first", [-9, None])
def test_a_signals_victim_or_a_lost_one_takes_the_others_along(first: int | None) -> None:
    """Wherever it is: what a collective's error made of the others is no verdict on their script."""
    echo = WorkerExit("worker 0", 1)
    far = WorkerExit("worker 1 on node b", first, here=False)
    assert culprit([echo, far]) == far
    verdict = judge(far, view(step=0))
    assert verdict.code is None


def test_one_that_knows_why_comes_before_an_echo_and_here_before_there() -> None:
    assert culprit([WorkerExit("a", 1), WorkerExit("b", USAGE)]).name == "b"
    assert culprit([WorkerExit("far", 1, here=False), WorkerExit("near", 1)]).name == "near"


def test_what_a_script_says_is_judged_on_its_own_node() -> None:
    """That node tells the others; they wait for its word, and the budget."""
    for code in (1, USAGE):
        near, far = WorkerExit("worker 0", code), WorkerExit("worker 1 on node b", code, here=False)
        assert judge(near, view(step=0)).code == code
        assert judge(far, view(step=0)).code is None
    assert judge(WorkerExit("far", None, here=False), view()).code is None
    spent = judge(WorkerExit("far", None, here=False), view(), failures=2)
    assert spent.code == 77
    assert "gave up after 1 restart (--max-restarts) of the job within 60 s (--restart-window), on" in spent.text
    assert judge(WorkerExit("near", AGAIN), view(step=0)).code is None


@pytest.mark.parametrize("code", [REQUEUE, BAD_NODE])
def test_what_a_worker_says_of_its_node_is_the_launchers_word_there(code: int) -> None:
    """Whatever the step, and though other workers were shot meanwhile. Other nodes go on."""
    near, far = WorkerExit("worker 0", code), WorkerExit("worker 1 on node b", code, here=False)
    assert judge(near, view(step=0), failures=9).code == code
    assert judge(near, None).code == code
    assert judge(far, view()).code is None
    assert (culprit([WorkerExit("shot", -9), near]) == near) == (code == BAD_NODE)


def test_a_worker_that_leaves_for_another_nodes_sake_is_started_again() -> None:
    """All ranks leave together, with 75; only the launcher of the node that goes says so."""
    for node, wanted in (("a", REQUEUE), ("b", None)):
        job = msgspec.structs.replace(view(), parting=Parting(1, nodes=(node,)))
        assert judge(WorkerExit("worker 0", REQUEUE), job).code == wanted


def test_a_node_is_bad_if_its_workers_die_in_a_row_and_no_step_is_made() -> None:
    """Not if the script says why it ended, if another node's worker was the cause, or if it is the only node."""
    here, there = WorkerExit("worker 0", -11), WorkerExit("worker 1 on node b", -9, here=False)
    both = member("w0"), member("w1", node="b")
    job, later = view(*both), view(*both, step=8)
    for story, falls in (
        ([(here, job)] * 3, True),
        ([(WorkerExit("worker 0", None), job)] * 3, True),
        ([(here, job), (here, job), (here, later)], False),
        ([(here, job), (here, job), (here, later), (here, later), (here, later)], True),
        ([(here, job), (here, job), (there, job), (here, job)], False),
        ([(WorkerExit("worker 0", 1), job)] * 9, False),
        ([(here, view(member("w0"), member("w1")))] * 9, False),
        ([(here, view(*both, step=0))] * 9, False),
        ([(here, None)] * 9, False),
    ):
        blame = BadNodes("a")
        said = [blame.falls(cause, seen) for cause, seen in story]
        assert not any(said[:-1])
        assert bool(said[-1]) == falls, story


def test_workers_that_were_done_are_needed_if_too_few_are_left_without_them() -> None:
    """Those that fail are replaced; newcomers of this node may have no seat yet."""
    job = view(member("w0", gone="done"), member("w1", gone="lost"), member("w2"))
    assert needed_again(job, ["w1"], (), 3)
    assert not needed_again(job, ["w1"], (), 2)
    assert needed_again(view(member("w0", gone="done"), member("w1"), member("w2")), ["w1"], (), 3)
    assert needed_again(view(member("w0", gone="done"), member("w2", gone="done")), (), {"n1"}, 2)
    assert not needed_again(view(member("w0", gone="done"), member("w2", gone="done")), (), {"n1"}, 1)
