"""`WorkQueue`: one thread for each key, no change is lost, pauses grow."""

from __future__ import annotations

import math

from hypothesis import given, strategies as st

from dlrover_hooks.kubernetes.work_queue import WorkQueue, WorkRetries

RETRIES = WorkRetries(first_s=1.0, longest_s=4.0)


def test_a_key_is_worked_on_by_one_at_a_time_and_again_if_it_changed_meanwhile() -> None:
    queue = WorkQueue[str](resync_s=300.0)
    queue.add("a", 0.0)
    assert queue.take(0.0) == "a"
    queue.add("a", 1.0)
    assert (queue.take(1.0), queue.due()) == (None, math.inf)
    queue.done("a", 2.0)
    assert queue.take(2.0) == "a"


def test_a_key_is_worked_on_again_without_a_change_until_it_is_gone() -> None:
    queue = WorkQueue[str](resync_s=300.0)
    queue.add("a", 0.0)
    queue.take(0.0)
    queue.done("a", 10.0)
    assert (queue.take(309.0), queue.due()) == (None, 310.0)
    assert queue.take(310.0) == "a"
    queue.done("a", 310.0, known=False)
    assert queue.due() == math.inf


def test_pauses_grow_with_the_failures_in_a_row() -> None:
    queue, now, pauses = WorkQueue[str](resync_s=300.0, retries=RETRIES), 0.0, list[float]()
    queue.add("a", now)
    for _ in range(4):
        assert queue.take(now) == "a"
        queue.failed("a", now)
        pauses.append(queue.due() - now)
        now = queue.due()
    assert pauses == [1.0, 2.0, 4.0, 4.0]
    queue.take(now)
    queue.done("a", now)
    queue.add("a", now)
    queue.take(now)
    queue.failed("a", now)
    assert queue.due() == now + 1.0


def test_a_change_does_not_wait_for_a_pause() -> None:
    queue = WorkQueue[str](resync_s=300.0, retries=RETRIES)
    queue.add("a", 0.0)
    queue.take(0.0)
    queue.failed("a", 0.0)
    queue.add("a", 0.5)
    assert queue.take(0.5) == "a"


def test_the_key_that_has_waited_longest_comes_first() -> None:
    queue = WorkQueue[str](resync_s=300.0)
    for number, key in enumerate("abc"):
        queue.add(key, float(number))
    queue.add("a", 5.0)
    assert [queue.take(5.0) for _ in range(4)] == ["a", "b", "c", None]


@given(st.lists(st.tuples(st.sampled_from(["add", "take", "done", "failed"]), st.sampled_from("abc")), max_size=60))
def test_every_change_is_followed_by_work(steps: list[tuple[str, str]]) -> None:
    """Whatever happens, the newest change of a key is worked on after it; no key is given out twice."""
    queue, now = WorkQueue[str](resync_s=1e9, retries=RETRIES), 0.0
    working, changed = set[str](), dict[str, bool]()
    for what, key in steps:
        now += 1.0
        if what == "add":
            queue.add(key, now)
            changed[key] = True
        elif what == "take" and (taken := queue.take(now)) is not None:
            assert taken not in working
            working.add(taken)
            changed[taken] = False
        elif key in working and what in ("done", "failed"):
            working.discard(key)
            (queue.done if what == "done" else queue.failed)(key, now)
    for key in working:
        queue.done(key, now)
    left = set[str]()
    while (taken := queue.take(now + RETRIES.longest_s)) is not None:
        left.add(taken)
    assert {key for key, missing in changed.items() if missing} <= left
