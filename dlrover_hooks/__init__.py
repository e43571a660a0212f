"""Hooks that keep training runs alive. Importing this loads no framework: public names are resolved on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrover_hooks.data.index_loader import ElasticIndices as ElasticIndices
    from dlrover_hooks.data.leased.shard_dataset import ShardDataset as ShardDataset
    from dlrover_hooks.data.loader import elastic_loader as elastic_loader
    from dlrover_hooks.data.sampler import ElasticSampler as ElasticSampler
    from dlrover_hooks.elastic.in_process_recovery import elastic_run as elastic_run
    from dlrover_hooks.protocol import Retention as Retention
    from dlrover_hooks.pytorch.async_checkpointer import AsyncCheckpointer as AsyncCheckpointer
    from dlrover_hooks.session import Session as Session

__version__ = "0.1.0"

_PUBLIC = {
    "AsyncCheckpointer": "dlrover_hooks.pytorch.async_checkpointer",
    "ElasticIndices": "dlrover_hooks.data.index_loader",
    "ElasticSampler": "dlrover_hooks.data.sampler",
    "Retention": "dlrover_hooks.protocol",
    "Session": "dlrover_hooks.session",
    "ShardDataset": "dlrover_hooks.data.leased.shard_dataset",
    "elastic_loader": "dlrover_hooks.data.loader",
    "elastic_run": "dlrover_hooks.elastic.in_process_recovery",
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'dlrover_hooks' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
