"""A real trainer for chaos tests: DDP over gloo under `AsyncCheckpointer`, forked out of a zygote with torch."""

from __future__ import annotations

import hashlib
import logging
import os
from typing import Any

import torch
import torch.distributed as dist

from dlrover_hooks.errors import HooksError
from tests.chaos.board import NOTHING
from tests.chaos.traps import Traps
from tests.integrations import torch_cases


def train(folder: str, place: dict[str, Any], settings: dict[str, Any], nbytes: int) -> int:
    """`nbytes` is the number of epochs here. Tells the board each step, and the test the weights it ends with."""
    logging.basicConfig(level=logging.WARNING, format=f"rank {place['rank']} %(name)s: %(message)s")
    traps, rank = Traps(folder, f"rank {place['rank']}"), place["rank"]
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(place["world_size"]), "LOCAL_RANK": str(place["local_rank"])}
    os.environ |= {"DLROVER_HOOKS_NODE": place["node"], "DLROVER_HOOKS_INCARNATION": place["incarnation"]}
    os.environ |= {"DLROVER_HOOKS_JOB": settings["job"], "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(settings.pop("store_port"))}
    torch.set_num_threads(1)
    traps.board.begin(rank, NOTHING, NOTHING)

    def stepping(at: object, place: str, step: int, kill: bool) -> None:
        traps.board.reach(rank, (1, step))

    torch_cases.crash = stepping
    try:
        dist.init_process_group("gloo")
        found = torch_cases.train(epochs=nbytes, **settings)
    except (HooksError, RuntimeError):  # another rank is gone
        logging.exception("rank %d ends", rank)
        return 2
    facts = {name: found[name] for name in ("weights", "moments", "lr", "rng", "step")}
    traps.say(digest=hashlib.sha256(repr(facts).encode()).hexdigest(), step=found["step"])
    return 0
