"""Plain PyTorch: one object beside the loop that restores on construction and saves at step boundaries."""

from __future__ import annotations

from dlrover_hooks.pytorch.async_checkpointer import AsyncCheckpointer as AsyncCheckpointer
