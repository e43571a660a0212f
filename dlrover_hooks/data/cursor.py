"""The place of one rank in the endless order of positions: begun, yielded, marked, committed. Pure; one thread.

`issued >= fetched >= yielded >= marked >= committed`. Only what is committed may enter a checkpoint; the rest is
replayed by a restore. All ranks commit together, so the committed part is always a prefix of the order, and one
integer describes it at any world size.
"""

from __future__ import annotations

from dlrover_hooks.data.batch_plan import BatchPlan, Slice


class Progress:
    """The data position of one rank. `cursor`: first position not in a finished step.

    `on_batch` counts a micro-batch that the training loop received. `mark` records the complete steps received so far
    (the optimizer stepped). `commit` moves the cursor to the mark (a step boundary). `begin` starts an epoch, or the
    rest of one.
    """

    def __init__(self, plan: BatchPlan) -> None:
        self.counted = False
        self.rewind(plan, 0)

    def rewind(self, plan: BatchPlan, cursor: int) -> None:
        """Put everything at `cursor` (a restore): the next `begin` continues there, also in mid-epoch."""
        self.cursor = self.marked = cursor
        self._stand(plan, cursor)

    def replan(self, plan: BatchPlan) -> None:
        """Continue with another plan after the complete steps received. Mark and cursor do not change."""
        self._stand(plan, self.position())

    def _stand(self, plan: BatchPlan, base: int) -> None:
        self.plan, self.base = plan, base
        self.yielded = self.issued = 0
        q = base % plan.n
        self._length, self._micro_batches, self._full = plan.length(q), plan.micro_batches, plan.full_steps(q)
        self._full_weight = plan.micro_batches / plan.total
        self._last = self._full - (not plan.has_tail(q))
        self._end = base - q + plan.behind(q)
        self._current: tuple[int, Slice] | None = None
        """Number and part of the step requested last, which is requested several times."""

    @property
    def consumed(self) -> bool:
        """True if the loop received something since `begin`; without `on_batch`, if anything was issued."""
        return self.yielded > 0 if self.counted else self.issued > 0

    @property
    def finished(self) -> bool:
        """True if every micro-batch of the current epoch was received."""
        return self.yielded >= self._length

    @property
    def whole(self) -> bool:
        """True between two steps: no step was received in part."""
        return not self.yielded or self.finished or self.yielded % self.plan.micro_batches == 0

    @property
    def peeked(self) -> bool:
        """True if something was received, but no step was made of it and the epoch continues: so it has not begun."""
        return self.counted and self.yielded > 0 and not self.finished and self.marked <= self.base

    @property
    def leaves(self) -> bool:
        """True if the next `begin` leaves an epoch in the middle."""
        return self.counted and self.yielded > 0 and not self.finished and self.marked > self.base

    def following(self) -> int:
        """The start of the next `begin`: the cursor after a restore, the next epoch after a consumed one."""
        q = self.base % self.plan.n
        if not self.consumed or self.peeked:
            return self.base - q + self.plan.behind(q) if self.plan.over(q) else self.base
        all_issued = not self.counted and self.issued >= self.plan.samples(q)
        return self.base - q + (self.plan.behind(q) if self.finished or all_issued else self.plan.n)

    def begin(self) -> int:
        """Start iterating; returns the position.

        If an epoch is left early after at least one step, the rest of it counts as done.
        """
        start = self.following()
        if start > self.base:
            self.marked = start
        self._stand(self.plan, start)
        return start

    def on_batch(self) -> None:
        """The loop received one micro-batch. Call it in the main process, in order."""
        self.counted = True
        self.yielded += 1

    def mark(self) -> int:
        """The optimizer stepped: record the position after the complete steps received so far."""
        self.marked = max(self.marked, self.position())
        return self.marked

    def commit(self) -> int:
        """A step boundary: the marked steps are final. Returns the cursor."""
        self.cursor = self.marked
        return self.cursor

    def position(self) -> int:
        """The position after the complete steps received since `begin`; the next epoch's start after the last one."""
        if self.yielded >= self._length:
            return self._end
        return self.base + min(self.yielded // self._micro_batches, self._full) * self.plan.global_batch_size

    def current(self) -> tuple[Slice, int]:
        """(the step that the last received micro-batch belongs to, its number in that step counted from 1).

        Before the first micro-batch: the first step, and 0.
        """
        number = min(max(self.yielded - 1, 0) // self._micro_batches, self._last)
        if self._current is None or self._current[0] != number:
            q = self.base % self.plan.n + number * self.plan.global_batch_size
            self._current = number, self.plan.step(q)
        return self._current[1], self.yielded - number * self._micro_batches

    @property
    def in_full_step(self) -> bool:
        """True if the micro-batch last received is of a step of the whole global batch."""
        return max(self.yielded - 1, 0) // self._micro_batches < self._full

    @property
    def weight(self) -> float:
        """`Slice.weight` of `current`. Needed in each step, so that of a full step is computed without its slice."""
        return self._full_weight if self.in_full_step else self.current()[0].weight

    @property
    def step_ends(self) -> bool:
        """Whether the last received micro-batch is the last one of its step."""
        if self._micro_batches == 1:
            return self.yielded > 0
        step, number = self.current()
        return number == step.micro_batches

    def first(self) -> int:
        """In-epoch position at which the current epoch began, or the next one if the current is finished."""
        return self.plan.first((self.following() if self.finished else self.base) % self.plan.n)
