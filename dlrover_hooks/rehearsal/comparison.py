"""Judges which promises a script keeps, and where it breaks one.

Compares an undisturbed run with one that gets faults, and with one whose launcher is killed and started again. Pure:
uses only the traces read by `dlrover_hooks.testing.faults.step_trace`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dlrover_hooks.testing.faults.step_trace import Row, RunTrace, SessionTrace

DATA, SAVED, RECOVERED, SAME, RELAUNCHED, WRITTEN = (
    "1 each sample exactly once",
    "2 the newest checkpoint is whole",
    "3 a dead worker is replaced",
    "4 each step is the same step",
    "5 a relaunch goes on",
    "  what the script itself writes",
)
SURELY_SAVED = 10
"""A process that dies after this step had a checkpoint: saves begin with steps 1, 2, 4 and 8."""


class Verdict(msgspec.Struct, frozen=True):
    """`kept`: None if it cannot be determined. `step`, `rank`, `tensor`: where it is broken first."""

    promise: str
    kept: bool | None
    found: str
    hint: str = ""
    step: int | None = None
    rank: int | None = None
    tensor: str = ""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """The runs. `bound`: the step at which they were ended; `code`: the exit code of the run with faults.

    `struck`: rows of the faults that were injected, in order; `planned`: their intended number. `calm_lines` and
    `hit_lines`: lines that each run added, by file. `again`: the run with a relaunch (None: there was none), with
    `relaunched` workers from then on; `keeps`: the script has a `save_to`.
    """

    calm: RunTrace
    hit: RunTrace
    bound: int
    code: int
    struck: Sequence[Mapping[str, Any]] = ()
    planned: int = 0
    calm_lines: Mapping[str, int] = {}
    hit_lines: Mapping[str, int] = {}
    again: RunTrace | None = None
    again_code: int = 0
    relaunched: int = 0
    keeps: bool = True


def judge(evidence: Evidence) -> list[Verdict]:
    """One verdict for each promise, in order, and one for the files that the script writes."""
    relaunch = [relaunched(evidence)] if evidence.again is not None else []
    return [data(evidence), saved(evidence), recovered(evidence), same(evidence), *relaunch, written(evidence)]


# ---- 1 --------------------------------------------------------------------------------------------------------------


def data(evidence: Evidence) -> Verdict:
    """Checks that both runs have the same positions in each step, and as many steps."""
    calm, hit = evidence.calm.lineage(), evidence.hit.lineage()
    if _leased(evidence):
        return Verdict(DATA, None, "leased data: which worker trains what is another in each run; not compared")
    if not any(row.data for ranks in calm.values() for row in ranks.values()):
        hint = "wrap the training loader: elastic_loader(loader, optimizer=optimizer), or hand it to the adapter"
        return Verdict(
            DATA, False, "no dataset is known: a restart begins with its first sample", hint, min(calm, default=0)
        )
    if (step := _unseen(calm)) is not None:
        hint = "iterate what elastic_loader returned, in every step"
        return Verdict(DATA, False, f"in step {step} no batch was asked of the elastic loader", hint, step)
    for step in sorted(calm.keys() & hit.keys()):
        theirs = next(iter(calm[step].values())).data
        for rank, row in sorted(hit[step].items()):
            if row.data != theirs:
                found = f"step {step}, rank {rank}: {_other_place(row.data, theirs)}"
                hint = "iterate the elastic loader itself, and step the optimizer only where loader.step_ends"
                if _fetches_ahead(calm):
                    hint = "the loop requests the next batch before optimizer.step(): request it behind (docs/loops.md)"
                return Verdict(DATA, False, found, hint, step, rank)
    return _ends(evidence, max(calm, default=0), max(hit, default=0))


def _leased(evidence: Evidence) -> bool:
    return any(row.leased for life in evidence.calm.lives for row in life.rows)


def _unseen(calm: Mapping[int, object]) -> int | None:
    """The first step without a step boundary."""
    return next((step for step in range(1, max(calm, default=0)) if step not in calm), None)


def _fetches_ahead(calm: Mapping[int, Mapping[int, Row]]) -> bool:
    """True if a dataset was two global batches ahead when the first step was over."""
    states = [state for row in calm.get(1, {}).values() for state in row.data.values()]
    return any(isinstance(one, dict) and "G" in one and one.get("cursor") == 2 * one["G"] for one in states)


def _ends(evidence: Evidence, calm: int, hit: int) -> Verdict:
    if hit > calm:
        hint = (
            "epochs are counted from 0 after a restart: use `for epoch in loader.epochs(n)` instead of range(n), and "
            "keep a count of your own in the checkpoint (extra=)"
        )
        return Verdict(DATA, False, f"{hit - calm} steps too many: {hit}, undisturbed {calm}", hint, calm + 1)
    if hit < calm:
        hint = "after a restart the loop ended early: run `for epoch in loader.epochs(n)` and each epoch to their ends"
        return Verdict(DATA, False, f"it ended behind step {hit}, undisturbed behind {calm}", hint, hit + 1)
    if calm >= evidence.bound:
        note = "the script's own end was not reached: whether it counts its epochs over restarts was not seen"
        return Verdict(DATA, True, f"{hit} steps, the same positions in each", note)
    return Verdict(DATA, True, f"{hit} steps to the script's end, the same positions in each")


def _other_place(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """The difference between two data states: the cursor, or a property of the dataset (its length, its seed)."""
    if ours.keys() != theirs.keys():
        return f"datasets {sorted(ours)} instead of {sorted(theirs)}"
    name = next(name for name in ours if ours[name] != theirs[name])
    one, other = ours[name], theirs[name]
    if not isinstance(one, dict) or not isinstance(other, dict):
        return f"dataset {name!r} stands at {one} instead of {other}"
    key = next(key for key in (*one, *other) if one.get(key) != other.get(key))
    return f"dataset {name!r} has {key} {one.get(key)} instead of {other.get(key)}"


# ---- 2 --------------------------------------------------------------------------------------------------------------


def saved(evidence: Evidence) -> Verdict:
    """Checks that the restored state equals the model at that step."""
    restarts = [life for life in evidence.hit.lives if life.head.attempt > 1]
    lost = 0
    for life in restarts:
        reached = _reached(evidence.hit, life.head.attempt)
        lost = max(lost, reached - life.head.begin)
        if life.head.begin == 0 and reached > SURELY_SAVED:
            hint = "keep model and optimizer in an adapter that resumes (AsyncCheckpointer, ElasticCallback)"
            if any("of=keeper" in row["fault"] for row in evidence.struck):
                hint = "the keeper died with what it held: save_to= and persist_every= bound what that costs"
            return Verdict(SAVED, False, f"nothing was restored: {reached} steps were lost", hint, 0, life.head.rank)
        if (broken := _restored_other(evidence.hit, life)) is not None:
            return broken
    if not restarts:
        return Verdict(SAVED, None, "nothing had to be restored")
    times = len({life.head.attempt for life in restarts})
    return Verdict(SAVED, True, f"restored {times} times, bit-equal; at most {lost} steps were trained again")


def _reached(run: RunTrace, attempt: int) -> int:
    """The last step of the last attempt before `attempt` that reached a step."""
    return max(((one.head.attempt, row.step) for one in run.lives if one.head.attempt < attempt for row in one.rows),
               default=(0, 0))[1]  # fmt: skip


def _restored_other(run: RunTrace, life: SessionTrace) -> Verdict | None:
    row = next((row for row in life.rows if row.step == life.head.begin), None)
    told = run.told(life.head.attempt, life.head.begin, life.head.rank)
    if row is None or told is None or told.hashes == row.hashes:
        return None
    tensor, step = _first_other(run, told, row), life.head.begin
    found = f"step {step}, rank {life.head.rank}: {tensor} was restored as it was at no boundary of that step"
    hint = (
        "weights are changed outside optimizer.step(): do that where the step is not over yet, right behind "
        "optimizer.step(), or call wait_copied() before"
    )
    return Verdict(SAVED, False, found, hint, step, life.head.rank, tensor)


def _first_other(run: RunTrace, one: Row, other: Row) -> str:
    names = run.names()
    for number, (left, right) in enumerate(zip(one.hashes, other.hashes, strict=False)):
        if left != right:
            return names[number] if number < len(names) else f"parameter {number}"
    return "the number of parameters"


# ---- 3 --------------------------------------------------------------------------------------------------------------


def recovered(evidence: Evidence) -> Verdict:
    """Checks that the run with faults reached its end."""
    times = [(row, _again_s(evidence, row)) for row in evidence.struck]
    if evidence.code != 0:
        last = f", the last one struck in step {times[-1][0]['now']}" if times else ""
        found = f"it ended with {evidence.code} after {len(times)} of {evidence.planned} faults{last}"
        return Verdict(RECOVERED, False, found, "its log says why", times[-1][0]["now"] if times else None)
    if not times:
        return Verdict(RECOVERED, None, f"none of {evidence.planned} faults struck: it was over before")
    slowest = max((seconds for _, seconds in times if seconds is not None), default=0.0)
    missed = f"; {evidence.planned - len(times)} never struck" if len(times) < evidence.planned else ""
    kept = "; all processes were restarted" if not _survivors(evidence.hit) else "; survivors kept their process"
    restarted = len(evidence.hit.begins()) > 1
    text = f"{len(times)} faults, at most {slowest:.1f} s to the next step{kept if restarted else ''}{missed}"
    return Verdict(RECOVERED, True, text)


def _again_s(evidence: Evidence, row: Mapping[str, Any]) -> float | None:
    again = evidence.hit.again_at(row["at"], row["now"] + (" at=boundary" in row["fault"]), row["rank"])
    return None if again is None else again - row["at"]


def _survivors(run: RunTrace) -> bool:
    pids = [(life.head.attempt, life.head.pid) for life in run.lives]
    return len({pid for _, pid in pids}) < len(set(pids))


# ---- 4 --------------------------------------------------------------------------------------------------------------


def same(evidence: Evidence) -> Verdict:
    """Checks that parameters are bit-equal after each step."""
    calm, hit = evidence.calm.lineage(), evidence.hit.lineage()
    if _leased(evidence):
        return Verdict(SAME, None, "leased data: a step has other samples in each run; not compared")
    worlds = {life.head.world for run in (evidence.calm, evidence.hit) for life in run.lives}
    if len(worlds) > 1:
        return Verdict(SAME, None, f"at world sizes {sorted(worlds)} steps are equal up to the order of summation only")
    for step in sorted(calm.keys() & hit.keys()):
        for rank in sorted(calm[step].keys() & hit[step].keys()):
            if calm[step][rank].hashes != hit[step][rank].hashes:
                return _differs(evidence, step, rank, calm[step][rank], hit[step][rank])
    both = len(calm.keys() & hit.keys() - {0})
    if not any(row.hashes for ranks in hit.values() for row in ranks.values()):
        return Verdict(SAME, None, "no parameters are known to the session: not compared")
    return Verdict(SAME, True, f"parameters bit-equal after each of {both} steps, on every rank")


def _differs(evidence: Evidence, step: int, rank: int, theirs: Row, ours: Row) -> Verdict:
    tensor = _first_other(evidence.calm, theirs, ours)
    where = f"step {step}, rank {rank}: {tensor} differs"
    if ours.losses[:1] != theirs.losses[:1]:
        where += f", loss {_loss(ours)} instead of {_loss(theirs)}"
    begins = [begin for attempt, begin in evidence.hit.begins().items() if attempt > 1 and begin <= step]
    if step == 0:
        hint = "seed before the model is made: torch.manual_seed(n), seed_everything(n)"
        where = f"rank {rank}: {tensor} begins with other values in each run"
    elif not begins:
        hint = "no fault had struck yet: noise without a seed, or an operation that is not deterministic"
    elif any(found.kept is False and (found.step or 0) <= step for found in (saved(evidence), data(evidence))):
        hint = "what is broken above may be the cause"
    else:
        where += f", after a restart behind step {max(begins)}"
        hint = "what decides it is in no checkpoint: noise of a generator of your own, a counter, a schedule (extra=)"
    return Verdict(SAME, False, where, hint, step, rank, tensor)


def _loss(row: Row) -> str:
    return f"{row.losses[0]:.6g}" if row.losses else "none"


# ---- 5 --------------------------------------------------------------------------------------------------------------


def relaunched(evidence: Evidence) -> Verdict:
    """Checks that a relaunch with another number of workers continues where it was and trains the same steps."""
    assert evidence.again is not None
    run, world = evidence.again, evidence.calm.lives[0].head.world
    with_ = f"launched again with {evidence.relaunched} instead of {world} workers"
    if evidence.relaunched == world:
        with_ = f"launched again with {world} workers"
    attempts = run.begins()
    if evidence.again_code != 0:
        hint = "its log says why; every launch must be able to start with any number of workers"
        return Verdict(RELAUNCHED, False, f"{with_} it ended with {evidence.again_code}", hint)
    if len(attempts) < 2:
        return Verdict(RELAUNCHED, None, "it was over before the launcher was killed")
    begin = attempts[max(attempts)]
    if begin == 0 and not evidence.keeps:
        hint = "save_to= keeps durable checkpoints, which a relaunch goes on from"
        return Verdict(RELAUNCHED, None, f"{with_} it began at step 0: it has no save_to", hint)
    if begin == 0:
        hint = "keep model and optimizer in an adapter that resumes (AsyncCheckpointer, ElasticCallback)"
        return Verdict(RELAUNCHED, False, f"{with_} it began at step 0", hint, 0)
    found = data(msgspec.structs.replace(evidence, hit=run))
    text, hint = f"{with_} behind step {begin}: {found.found}", found.hint
    if found.rank is not None and evidence.relaunched != world:
        hint = "give elastic_loader the optimizer; with several micro-batches in a step, step where loader.step_ends"
    return Verdict(RELAUNCHED, found.kept, text, hint, found.step, found.rank)


# ---- written files --------------------------------------------------------------------------------------------------


def written(evidence: Evidence) -> Verdict:
    """Checks that both runs added as many lines to the same files."""
    both = sorted(evidence.calm_lines.keys() & evidence.hit_lines.keys())
    other = [name for name in both if evidence.calm_lines[name] != evidence.hit_lines[name]]
    if other:
        name = other[0]
        lines = f"{evidence.hit_lines[name]} lines, undisturbed {evidence.calm_lines[name]}"
        more = f"; so with {len(other) - 1} more files" if other[1:] else ""
        hint = "steps that are trained again write again: key lines by step, or write at the end"
        return Verdict(WRITTEN, False, f"{name}: {lines}{more}", hint)
    return Verdict(WRITTEN, True, f"{len(both)} files got as many lines in both runs" if both else "no files here")
