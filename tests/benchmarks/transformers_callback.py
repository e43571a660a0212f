"""What `elastic_trainer` costs a step of a Trainer, for `bench_callback`."""

from __future__ import annotations

import logging
import tempfile
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
from tests.benchmarks import turns

SIZES = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192)
"""Widths of the model."""


class _Tells(TrainerCallback):
    def __init__(self, clock: turns.Clock) -> None:
        self._clock = clock

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._clock.step_ended()


def measured(rounds: int) -> tuple[dict[str, Any], dict[str, float]]:
    """See `turns.measured`."""
    torch.set_num_threads(1)
    logging.getLogger("dlrover_hooks").setLevel(logging.ERROR)
    conditions, figures = turns.measured("transformers", rounds, _train, SIZES)
    return {"transformers_version": transformers.__version__, **conditions}, figures


def _train(clock: turns.Clock, steps: int, hook: bool, size: int) -> None:
    config = GPT2Config(
        vocab_size=256, n_positions=32, n_embd=size, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    rows = torch.randint(256, (8 * steps, 32))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=8, save_strategy="no", use_cpu=True, report_to=[],
            disable_tqdm=True,
        )  # fmt: skip
        data: Any = [{"input_ids": row, "labels": row} for row in rows]
        trainer = Trainer(GPT2LMHeadModel(config), args, train_dataset=data, callbacks=[_Tells(clock)])
        trainer.remove_callback(PrinterCallback)
        if hook:
            elastic: Any = elastic_trainer(trainer, job=f"bench-{uuid.uuid4().hex[:8]}")
            clock.session = lambda: elastic.elastic.loop and elastic.elastic.loop.session
        trainer.train()
