"""Checks the shared keywords for unusable values; each error suggests a usable one. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dlrover_hooks.errors import UsageError

if TYPE_CHECKING:
    from dlrover_hooks.config.settings import Config


WANTED = {
    "save_to": "a folder (str or Path) or an fsspec URL",
    "storage_options": "a dict of fsspec options",
    "snapshot": '"auto", "eager" or "lazy"',
    "resume": '"auto", "never", "require", a folder or a URL',
    "job": "a name (str)",
    "global_batch_size": "a whole number of samples",
    "master": 'an address such as "http://127.0.0.1:8780"',
    "token": "a text (str)",
    "on_error": '"raise" or "warn"',
    "replicas": "0 or 1",
    "replica_mb_per_s": "a whole number of millions of bytes per second, 0 for no limit",
    "disable": "True or False",
    "fresh": "True or False",
    "preempt_signals": 'names of signals, such as "SIGTERM,SIGUSR1", or "none"',
    "grace": 'seconds, or a duration such as "25s"',
    "step_timeout": '"auto", "none", seconds, or a duration such as "10m"',
    "on_stall": '"warn", "dump", "restart-rank" or "restart-round"',
    "on_straggler": '"report", "rebalance", "relaunch" or "exclude"',
}


def _check_save_to(save_to: str, name: str) -> None:
    """The location must be visible to keeper, master and trainer, which are three processes, and to later starts."""
    if not save_to.strip():
        raise UsageError(
            f"{name}={save_to!r} names no folder",
            hint="leave save_to out to keep checkpoints in memory only, or name a folder",
        )
    if any(chained.startswith("memory://") for chained in save_to.split("::")):
        raise UsageError(
            f"{name}={save_to!r} lies in one process, and what one writes there no other can read",
            hint="leave save_to out: the keeper holds checkpoints in memory for all; or name a folder or a store",
        )


def check(config: Config, said: Mapping[str, str]) -> None:
    """Raises UsageError for an unusable value. `said`: the variable that each keyword came from, if any."""

    def refuse(name: str, why: str, hint: str) -> None:
        raise UsageError(f"{said.get(name, name)}={getattr(config, name)!r} {why}", hint=hint)

    if config.save_to is not None:
        _check_save_to(config.save_to, said.get("save_to", "save_to"))
    if config.replicas not in (0, 1):
        refuse("replicas", "cannot be done", "replicas=1 keeps one replica of each node on another one, 0 none")
    if config.replica_mb_per_s < 0:
        refuse("replica_mb_per_s", "cannot be done", f"give {WANTED['replica_mb_per_s']}")
    if not config.grace_s > 0:
        refuse("grace", "leaves no time to save", 'give the time from the signal to the kill, such as "25s"')
    if config.step_timeout_s is not None and not config.step_timeout_s > 0:
        refuse("step_timeout", "leaves no time for a step", f"give {WANTED['step_timeout']}")
    if config.on_stall not in ("warn", "dump", "restart-rank", "restart-round"):
        refuse("on_stall", "is unknown", f"use {WANTED['on_stall']}")
    if config.on_straggler not in ("report", "rebalance", "relaunch", "exclude"):
        refuse("on_straggler", "is unknown", f"use {WANTED['on_straggler']}")
    if not set(config.signals) <= set(signal.Signals.__members__) - {"SIGKILL", "SIGSTOP"}:
        refuse("preempt_signals", "names no signals", f"give {WANTED['preempt_signals']}")
    if config.on_error not in ("raise", "warn"):
        refuse("on_error", "is unknown", 'use "raise" or "warn"')
    if config.snapshot not in ("auto", "eager", "lazy"):
        refuse("snapshot", "is unknown", 'use "auto", "eager" or "lazy"')
    if config.global_batch_size is not None and config.global_batch_size < 1:
        why = "must be at least 1"
        refuse("global_batch_size", why, "give the samples of one optimizer step over all ranks, or leave it out")
    folder = "/" in config.resume or config.resume.startswith("weights:")
    if config.resume not in ("auto", "never", "require", "weights") and not folder:
        refuse(
            "resume",
            "is unknown",
            'use "auto", "never", "require", "weights", a URL, or "weights:URL"; a folder here is "./NAME"',
        )
