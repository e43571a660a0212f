"""One process of a training at some world size, the loss being a mean over the labels of a step; prints what it made.

Usage: transformers_world.py JOB FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import GPT2LMHeadModel

from tests.integrations.transformers_cases import made, model
from tests.pace import pace


def calm() -> GPT2LMHeadModel:
    """Without dropout."""
    net = model()
    for module in net.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return net


def main() -> None:
    torch.set_num_threads(1)
    pace()
    trainer = made(Path(sys.argv[2]), sys.argv[1], trainer={"model": calm}, shared={"global_batch_size": 8},
                   include_num_input_tokens_seen="all", optim="sgd", learning_rate=0.5)  # fmt: skip
    trainer.train()
    weights = [value for tensor in trainer.model.state_dict().values() for value in tensor.flatten().tolist()]  # pyright: ignore[reportOptionalMemberAccess]
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    print(json.dumps({"weights": weights, "losses": losses, "tokens": trainer.state.num_input_tokens_seen}), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
