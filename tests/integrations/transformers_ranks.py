"""One rank of a training that is broken off and resumed; prints a JSON line for each life.

Usage: transformers_ranks.py JOB FOLDER CASE. The first life is not disturbed, and is of another job.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.integrations.transformers_cases import Crash, WatchedSeq2Seq, end, lora, made, sft, translator
from tests.pace import pace

CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "SFTTrainer": sft,
    "SFTTrainer with LoRA": lambda: (given := sft()) | {"trainer": given["trainer"] | {"peft_config": lora}},
    "Seq2SeqTrainer": lambda: {
        "cls": WatchedSeq2Seq, "trainer": {"model": translator}, "predict_with_generate": True,
        "eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 2, "generation_max_length": 4,
    },
}  # fmt: skip

CRASH = 3
"""The last step of the first epoch, of four."""


def digest(values: list[torch.Tensor]) -> str:
    """One text for the bits of all."""
    found = hashlib.sha256()
    for one in values:
        found.update(one.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def life(folder: Path, job: str, case: str, crash: int | None) -> dict[str, Any]:
    """Train until the end, or into step `crash`: what was restored, trained, and made."""
    options = {"logging_steps": 1, "num_train_epochs": 2, "shared": {"global_batch_size": 6}}
    trainer = made(folder, job, crash, **(CASES[case]() | options))
    crashed = True
    with contextlib.suppress(Crash):
        trainer.train()
        crashed = False
    elastic: Any = trainer.elastic  # pyright: ignore[reportAttributeAccessIssue]
    restored = elastic.restored.generation.step if elastic.restored is not None else 0
    found = {"rank": trainer.args.process_index, "restored": restored, "seen": trainer.seen}
    if crashed:
        return found | {"end": None}
    state = end(trainer)
    state["weights"] = digest(list(state["weights"].values()))
    state["moments"] = digest(state["moments"])
    return found | {"end": state}


def main() -> None:
    torch.set_num_threads(1)
    pace()
    job, folder, case = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    for name, crash in (("calm", None), ("run", CRASH), ("run", None)):
        print(json.dumps(life(folder, f"{job}-{name}", case, crash)), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
