"""Which characters follow? A small GPT-2 learns to write Python out of Python's own standard library."""

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from dlrover_hooks.integrations.transformers import elastic_trainer

CONTEXT, VOCABULARY = 48, 128


def windows(part: slice, count: int) -> Any:
    """`count` windows of the library's source; `part`: of its files by name. Nothing is downloaded."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files[part])[: count * CONTEXT]
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().clamp(max=VOCABULARY - 1)
    return [{"input_ids": row, "labels": row} for row in rows.reshape(count, CONTEXT)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--windows", type=int, default=1000, help="training windows of 48 characters")
    given = parser.parse_args()
    set_seed(1)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    args = TrainingArguments(
        "out",
        num_train_epochs=given.epochs,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        eval_strategy="epoch",
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        GPT2LMHeadModel(config),
        args,
        train_dataset=windows(slice(0, 60), given.windows),
        eval_dataset=windows(slice(60, None), given.windows // 10),
    )
    trainer = elastic_trainer(trainer, save_to="saved")
    trainer.train()
    losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    if trainer.is_world_process_zero():
        print(f"held-out loss after each epoch: {losses}")


if __name__ == "__main__":
    main()
