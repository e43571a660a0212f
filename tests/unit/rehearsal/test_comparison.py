"""Which promise is broken, and where: two traces that differ in one thing (rehearsal)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dlrover_hooks.rehearsal.comparison import (
    DATA,
    RECOVERED,
    RELAUNCHED,
    SAME,
    SAVED,
    WRITTEN,
    Evidence,
    Verdict,
    judge,
)
from dlrover_hooks.testing.faults.step_trace import Head, Row, RunTrace, SessionTrace

NAMES = ("0.weight", "0.bias")


def life(
    attempt: int, begin: int, last: int, *, rank: int = 0, pid: int = 0, world: int = 2, at: float = 0.0
) -> SessionTrace:
    head = Head(job="j", run="r", rank=rank, world=world, attempt=attempt, begin=begin, pid=pid or 10 * attempt + rank,
                at=at)  # fmt: skip
    return SessionTrace(head, [row(step, at=at + step) for step in range(begin, last + 1)])


def row(step: int, **other: Any) -> Row:
    usual = {"at": float(step), "data": {"train": {"cursor": 10 * step}}, "hashes": (f"w{step}", f"b{step}")}
    return Row(**{"step": step, "names": NAMES, "losses": (1 / (step + 1),)} | usual | other)


def run(*lives: SessionTrace) -> RunTrace:
    made = RunTrace(Path())
    made.lives = list(lives)
    return made


def both_ranks(attempt: int, begin: int, last: int, **more: Any) -> list[SessionTrace]:
    return [life(attempt, begin, last, rank=rank, **more) for rank in (0, 1)]


def evidence(**other: Any) -> Evidence:
    """20 steps, and the same with a kill in step 13 after which the run went on behind step 11."""
    calm, hit = run(*both_ranks(1, 0, 20)), run(*both_ranks(1, 0, 12), *both_ranks(2, 11, 20, at=100.0))
    struck = [{"fault": "step=13 rank=1 kill", "now": 13, "rank": 1, "at": 12.5}]
    return Evidence(**{"calm": calm, "hit": hit, "bound": 50, "code": 0, "struck": struck, "planned": 1} | other)


def change(run: RunTrace, which: Callable[[Head, Row], bool], **other: Any) -> RunTrace:
    for one in run.lives:
        one.rows = [msgspec.structs.replace(row, **other) if which(one.head, row) else row for row in one.rows]
    return run


def broken(found: list[Verdict]) -> dict[str, Verdict]:
    return {verdict.promise: verdict for verdict in found if verdict.kept is False}


def test_a_good_script_keeps_all() -> None:
    found = judge(evidence())
    assert broken(found) == {}
    texts = {verdict.promise: verdict.found for verdict in found}
    assert texts[DATA] == "20 steps to the script's end, the same positions in each"
    assert texts[SAVED] == "restored 1 times, bit-equal; at most 1 steps were trained again"
    assert texts[RECOVERED] == "1 faults, at most 100.5 s to the next step; all processes were restarted"
    assert texts[SAME] == "parameters bit-equal after each of 20 steps, on every rank"


def test_a_loop_that_fetches_ahead_of_the_optimizer_is_named() -> None:
    """Each step marks one batch too many; a restart adds another one."""
    calm, hit = evidence().calm, evidence().hit
    for one in (*calm.lives, *hit.lives):
        ahead = one.head.attempt
        one.rows = [
            msgspec.structs.replace(
                row, data={"train": {"cursor": 10 * (row.step + ahead) if row.step else 0, "G": 10}}
            )
            for row in one.rows
        ]
    verdict = broken(judge(evidence(calm=calm, hit=hit)))[DATA]
    assert "cursor 130 instead of 120" in verdict.found
    assert "before optimizer.step()" in verdict.hint


def test_the_next_step_is_that_of_the_rank_that_was_struck() -> None:
    """Another rank may end the step under way, before it hears of the fault."""
    hit = run(life(1, 0, 13), life(1, 0, 12, rank=1), *both_ranks(2, 11, 20, at=100.0))
    assert "at most 100.5 s to the next step" in judge(evidence(hit=hit))[2].found


def test_survivors_that_keep_their_process_are_named() -> None:
    hit = run(*both_ranks(1, 0, 12), life(2, 11, 20, rank=0, pid=10), life(2, 11, 20, rank=1))
    assert "survivors kept their process" in judge(evidence(hit=hit))[2].found


def test_other_positions_are_named_with_step_and_rank() -> None:
    hit = change(evidence().hit, lambda head, row: head.attempt == 2 and row.step >= 14 and head.rank == 1,
                 data={"train": {"cursor": 0}})  # fmt: skip
    verdict = broken(judge(evidence(hit=hit)))[DATA]
    assert (verdict.step, verdict.rank) == (14, 1)
    assert verdict.found == "step 14, rank 1: dataset 'train' has cursor 0 instead of 140"


def test_epochs_that_are_counted_anew() -> None:
    """range(n) after a restart: every step is right, and there are too many of them."""
    hit = run(*both_ranks(1, 0, 12), *both_ranks(2, 11, 26))
    verdict = broken(judge(evidence(hit=hit)))[DATA]
    assert verdict.found == "6 steps too many: 26, undisturbed 20"
    assert "loader.epochs(n)" in verdict.hint
    assert verdict.step == 21


def test_an_end_that_was_not_seen_is_said() -> None:
    verdict = judge(evidence(bound=20))[0]
    assert verdict.kept
    assert "own end was not reached" in verdict.hint


def test_no_elastic_loader_at_all_or_one_that_is_not_iterated() -> None:
    calm = change(evidence().calm, lambda *_: True, data={})
    assert "no dataset" in broken(judge(evidence(calm=calm)))[DATA].found
    calm = run(*both_ranks(1, 0, 20))
    for one in calm.lives:
        one.rows = [row for row in one.rows if row.step in (0, 20)]
    verdict = broken(judge(evidence(calm=calm)))[DATA]
    assert (verdict.step, "iterate" in verdict.hint) == (1, True)


def test_leased_data_is_not_compared() -> None:
    calm = change(evidence().calm, lambda *_: True, leased=True)
    hit = change(evidence().hit, lambda *_: True, hashes=("other",))
    found = judge(evidence(calm=calm, hit=hit))
    assert (found[0].kept, found[3].kept) == (None, None)


def test_a_checkpoint_that_is_not_what_the_model_was() -> None:
    """Weights that were changed while they were copied: the restored tensor is named, and what follows from it."""
    hit = change(evidence().hit, lambda head, row: head.attempt == 2 and head.rank == 1, hashes=("w", "torn"))
    hit = change(hit, lambda head, row: head.attempt == 2 and row.step == 11, hashes=("w11", "torn"))
    found = broken(judge(evidence(hit=hit)))
    assert (found[SAVED].step, found[SAVED].rank, found[SAVED].tensor) == (11, 0, "0.bias")
    assert found[SAME].hint == "what is broken above may be the cause"


def test_nothing_was_restored() -> None:
    hit = run(*both_ranks(1, 0, 12), *both_ranks(2, 0, 20))
    assert broken(judge(evidence(hit=hit)))[SAVED].found == "nothing was restored: 12 steps were lost"
    early = run(*both_ranks(1, 0, 3), *both_ranks(2, 0, 20))
    assert judge(evidence(hit=early))[1].kept, "before the first save there is nothing"


def test_state_that_is_in_no_checkpoint() -> None:
    hit = change(
        evidence().hit, lambda head, row: head.attempt == 2 and row.step > 11, hashes=("x", "y"), losses=(9.0,)
    )
    verdict = broken(judge(evidence(hit=hit)))[SAME]
    assert (verdict.step, verdict.rank, verdict.tensor) == (12, 0, "0.weight")
    assert "loss 9 instead of 0.0769231, after a restart behind step 11" in verdict.found
    assert "in no checkpoint" in verdict.hint


def test_a_script_that_is_no_two_times_the_same() -> None:
    """Told apart from what a restart breaks: nothing had struck yet."""
    hit = change(evidence().hit, lambda head, row: row.step >= 4, hashes=("x", "y"))
    verdict = broken(judge(evidence(hit=hit)))[SAME]
    assert verdict.step == 4
    assert "no fault had struck yet" in verdict.hint
    hit = change(evidence().hit, lambda head, row: True, hashes=("x", "y"))
    assert "torch.manual_seed" in broken(judge(evidence(hit=hit)))[SAME].hint


def test_another_world_size_is_not_compared_bit_by_bit() -> None:
    hit = run(*both_ranks(1, 0, 12), life(2, 11, 20, world=1))
    assert judge(evidence(hit=hit))[3].kept is None


def relaunch(**other: Any) -> Verdict:
    """The launcher of two workers was killed in step 13, and started again with one."""
    again = run(*both_ranks(1, 0, 12), life(2, 11, 20, world=1, at=100.0))
    found = judge(evidence(**{"again": again, "relaunched": 1} | other))
    return next(verdict for verdict in found if verdict.promise == RELAUNCHED)


def test_a_relaunch_trains_the_same_steps() -> None:
    assert RELAUNCHED not in [verdict.promise for verdict in judge(evidence())]
    verdict = relaunch()
    assert verdict.kept
    wanted = (
        "launched again with 1 instead of 2 workers behind step 11: 20 steps to the script's end, the same positions"
    )
    assert verdict.found.startswith(wanted)


def test_a_relaunch_that_trains_other_steps() -> None:
    """A plain loop that makes a step of each micro-batch, and epochs that are counted from 0 again."""
    again = change(run(*both_ranks(1, 0, 12), life(2, 11, 20, world=1)), lambda head, row: row.step == 13,
                   data={"train": {"cursor": 125}})  # fmt: skip
    verdict = relaunch(again=again)
    assert (verdict.kept, verdict.step, verdict.rank) == (False, 13, 0)
    assert "behind step 11: step 13, rank 0: dataset 'train' has cursor 125 instead of 130" in verdict.found
    assert "step_ends" in verdict.hint
    verdict = relaunch(again=run(*both_ranks(1, 0, 12), life(2, 11, 32, world=1)))
    assert "12 steps too many: 32, undisturbed 20" in verdict.found
    assert "loader.epochs(n)" in verdict.hint


def test_a_relaunch_that_fails_or_begins_anew() -> None:
    assert "it ended with 1" in relaunch(again_code=1).found
    anew = run(*both_ranks(1, 0, 12), life(2, 0, 20, world=1))
    assert (relaunch(again=anew).kept, relaunch(again=anew, keeps=False).kept) == (False, None)
    assert "save_to" in relaunch(again=anew, keeps=False).hint
    assert relaunch(again=run(*both_ranks(1, 0, 20))).kept is None


def test_a_run_that_did_not_come_to_its_end() -> None:
    verdict = broken(judge(evidence(code=77, planned=3)))[RECOVERED]
    assert verdict.found == "it ended with 77 after 1 of 3 faults, the last one struck in step 13"


def test_faults_that_never_struck() -> None:
    assert "2 never struck" in judge(evidence(planned=3))[2].found
    assert judge(evidence(struck=[]))[2].kept is None


def test_lines_that_were_written_twice() -> None:
    verdict = broken(judge(evidence(calm_lines={"a.csv": 20, "b": 1}, hit_lines={"a.csv": 22, "b": 1})))[WRITTEN]
    assert verdict.found == "a.csv: 22 lines, undisturbed 20"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lineage_is_what_survives(rank: int) -> None:
    """Steps that were rolled back do not count, nor what a rank had done ahead of the others."""
    found = evidence().hit.lineage()
    assert list(found) == list(range(21))
    assert found[12][rank].at == 112.0
    assert found[10][rank].at == 10.0
    undone = run(*both_ranks(1, 0, 12), life(2, 5, 6, at=100.0)).lineage()
    assert list(undone) == list(range(7)), "what nobody has trained again is not there"
    assert list(undone[5]) == [0]
