"""Trainings of a small GPT-2 made from a config, that can be broken off in any step."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from dlrover_hooks.integrations.transformers import elastic_trainer

warnings.filterwarnings("ignore")
logging.getLogger("transformers").setLevel(logging.ERROR)

SAMPLES, EVALUATED, TOKENS = 22, 7, 6


class Crash(Exception):
    pass


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The first token is the index of the sample; lengths of what counts in the loss differ."""

    def __init__(self, n: int = SAMPLES) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= self.n:
            raise IndexError(index)
        row = torch.tensor([index, *((index * 7 + 3 * place) % 32 for place in range(1, TOKENS))])
        labels = row.clone()
        labels[TOKENS - index % 3 :] = -100
        return {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": labels}


def model() -> GPT2LMHeadModel:
    """Float64, with dropout."""
    set_seed(3)
    config = GPT2Config(
        vocab_size=64, n_positions=TOKENS, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config).double()


def adapted() -> Any:
    """LoRA around it: all but the adapters is frozen."""
    from peft import get_peft_model

    return get_peft_model(model(), lora())


def lora() -> Any:
    """With dropout."""
    from peft import LoraConfig

    return LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1, task_type="CAUSAL_LM")


class Watched(Trainer):
    """Notes the samples of each step, and breaks off in step `crash`."""

    seen: list[tuple[int, int, list[int]]]
    crash: int | None = None
    at = 0
    arguments: type[TrainingArguments] = TrainingArguments

    def _run_epoch(self, *, epoch: int, **given: Any) -> None:
        self.at = epoch
        super()._run_epoch(epoch=epoch, **given)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.state.global_step == self.crash:
            raise Crash
        elastic: Any = getattr(self, "elastic", None)
        if elastic is None or not elastic.repeats:
            self.seen.append((self.at, self.state.global_step, inputs["input_ids"][:, 0].tolist()))
        return super().training_step(model, inputs, *args, **kwargs)


class WatchedSeq2Seq(Watched, Seq2SeqTrainer):
    """It generates in its evaluations."""

    arguments = Seq2SeqTrainingArguments


def translator() -> T5ForConditionalGeneration:
    """Float64, with dropout."""
    set_seed(3)
    sizes: dict[str, Any] = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = T5Config(**sizes, pad_token_id=62)
    cast(Any, config).decoder_start_token_id = 0
    return T5ForConditionalGeneration(config).double()


class StopsEpochs(TrainerCallback):
    """Leaves each epoch after so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_epoch_stop = state.global_step % self.steps == 0


def made(folder: Path, job: str, crash: int | None = None, *, hook: bool = True, **options: Any) -> Watched:
    """A Trainer; `options` are those of the arguments, except a few."""
    callbacks = options.pop("callbacks", [])
    if patience := options.pop("patience", 0):
        callbacks = [*callbacks, EarlyStoppingCallback(patience)]
    cls, more, shared = options.pop("cls", Watched), options.pop("trainer", {}), options.pop("shared", {})
    args = cls.arguments(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, seed=5,
        **({"logging_steps": 2, "per_device_train_batch_size": 2, "num_train_epochs": 2, "learning_rate": 0.01,
            "save_strategy": "no"} | options),
    )  # fmt: skip
    given: dict[str, Any] = {"model": model, "train_dataset": Texts, "eval_dataset": lambda: Texts(EVALUATED)} | more
    trainer = cls(args=args, callbacks=callbacks, **{name: make() for name, make in given.items()})
    trainer.remove_callback(PrinterCallback)
    trainer.seen, trainer.crash = [], crash
    return elastic_trainer(trainer, job=job, save_every=1, **shared) if hook else trainer


def sft() -> dict[str, Any]:
    """The options for TRL's SFTTrainer."""
    from datasets import Dataset, disable_progress_bars
    from trl import SFTConfig, SFTTrainer

    class WatchedSft(Watched, SFTTrainer):
        arguments = SFTConfig

    def rows(n: int) -> Dataset:
        lengths = [TOKENS - index % 3 for index in range(n)]
        return Dataset.from_list(
            [{"input_ids": Texts(n)[index]["input_ids"][:size].tolist()} for index, size in enumerate(lengths)]
        )

    def tokenizer() -> PreTrainedTokenizerFast:
        words = {f"w{index}": index for index in range(62)} | {"<pad>": 62, "<eos>": 63}
        made = Tokenizer(WordLevel(words, "w0"))
        return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")

    disable_progress_bars()
    data: dict[str, Any] = {"train_dataset": lambda: rows(SAMPLES), "eval_dataset": lambda: rows(EVALUATED)}
    return {
        "cls": WatchedSft, "trainer": data | {"processing_class": tokenizer}, "gradient_accumulation_steps": 2,
        "max_length": TOKENS, "bf16": False, "gradient_checkpointing": False, "num_train_epochs": 1,
    }  # fmt: skip


def end(trainer: Any) -> dict[str, Any]:
    """Everything that must be equal."""
    optimizer = trainer.optimizer.optimizer
    return {
        "weights": {name: value.clone() for name, value in trainer.model.state_dict().items()},
        "moments": [value.clone() for one in optimizer.state.values() for value in one.values()],
        "lr": trainer.lr_scheduler.get_last_lr(),
        "step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "best": (trainer.state.best_metric, trainer.state.best_global_step),
        "log": [
            {key: value for key, value in row.items() if not key.startswith(("dlrover/", "train_", "eval_runtime"))
             and "per_second" not in key} for row in trainer.state.log_history
        ],
    }  # fmt: skip
