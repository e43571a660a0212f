"""What `elastic_trainer` costs a step of a Trainer, for `bench_callback`."""

from __future__ import annotations

import logging
import statistics
import tempfile
import threading
import time
import uuid
from typing import Any

import torch
import transformers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from dlrover_hooks.integrations.transformers import elastic_trainer

FIRST, TURN_S = 30, 60.0
"""Steps at the start that are left out; timeout of one turn."""


class Turns:
    """Lets two threads make a step each, in turn."""

    def __init__(self) -> None:
        self._changed, self._next, self._over = threading.Condition(), 0, False

    def wait(self, mine: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._over or self._next == mine, TURN_S), "the other one hangs"

    def hand_over(self, mine: int) -> None:
        with self._changed:
            self._next = 1 - mine
            self._changed.notify_all()

    def end(self) -> None:
        """The other one goes on alone."""
        with self._changed:
            self._over = True
            self._changed.notify_all()


class Clock(TrainerCallback):
    """CPU seconds of this thread, and wall seconds, from one turn of the step's end to that of the next."""

    def __init__(self, turns: Turns, mine: int) -> None:
        self._turns, self._mine, self._begun = turns, mine, (0.0, 0.0)
        self.cpu_s, self.wall_s = list[float](), list[float]()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.cpu_s.append(time.thread_time() - self._begun[0])
        self.wall_s.append(time.perf_counter() - self._begun[1])
        self._turns.hand_over(self._mine)
        self._turns.wait(self._mine)
        self._begun = time.thread_time(), time.perf_counter()


def measured(steps: int) -> tuple[dict[str, Any], dict[str, float]]:
    """The conditions, and the cost in per cent of a step without the hook, medians of `steps` steps of each way."""
    torch.set_num_threads(1)
    logging.getLogger("dlrover_hooks").setLevel(logging.ERROR)
    turns, failures = Turns(), list[BaseException]()
    clocks = Clock(turns, 0), Clock(turns, 1)

    def train(mine: int) -> None:
        try:
            turns.wait(mine)
            _train(clocks[mine], FIRST + steps, hook=mine == 1)
        except BaseException as error:
            failures.append(error)
        finally:
            turns.end()

    plain = threading.Thread(target=train, args=(0,))
    plain.start()
    train(1)  # on the main thread, as a training script would
    plain.join(TURN_S)
    if failures:
        raise failures[0]
    without, hooked = (clock.cpu_s[FIRST:] for clock in clocks)
    step_s, more_s = statistics.median(without), statistics.median(b - a for a, b in zip(without, hooked, strict=True))
    conditions = {
        "transformers_version": transformers.__version__,
        "transformers_steps": len(hooked),
        "transformers_step_ms": step_s * 1e3,
        "transformers_step_wall_ms": statistics.median(clocks[0].wall_s[FIRST:]) * 1e3,
        "transformers_hook_step_wall_ms": statistics.median(clocks[1].wall_s[FIRST:]) * 1e3,
    }
    return conditions, {"callback_overhead_pct_transformers": 100 * more_s / step_s}


def _train(clock: Clock, steps: int, *, hook: bool) -> None:
    config = GPT2Config(vocab_size=256, n_positions=32, n_embd=48, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    rows = torch.randint(256, (8 * steps, 32))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=8, save_strategy="no", use_cpu=True, report_to=[],
            disable_tqdm=True,
        )  # fmt: skip
        data: Any = [{"input_ids": row, "labels": row} for row in rows]
        trainer = Trainer(GPT2LMHeadModel(config), args, train_dataset=data, callbacks=[clock])
        trainer.remove_callback(PrinterCallback)
        if hook:
            trainer = elastic_trainer(trainer, job=f"bench-{uuid.uuid4().hex[:8]}")
        trainer.train()
