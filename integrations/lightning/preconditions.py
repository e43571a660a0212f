"""Preconditions of `ElasticCallback`: when it is inactive, what it refuses, what it cannot keep unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from dlrover_hooks import config as settings
from dlrover_hooks.checkpoint.state import pytree
from dlrover_hooks.errors import UnsupportedState, UsageError
from dlrover_hooks.integrations.lightning import _private_api as private
from dlrover_hooks.pytorch.tensor_loading import left_alone


def stand_aside(trainer: Trainer, stage: str, *, disabled: bool) -> str | None:
    """Why the callback is inactive for this Trainer and stage; None if it is active."""
    if stage != "fit":
        return f"stage {stage!r} trains nothing"
    if disabled:
        return "DLROVER_HOOKS_DISABLE is set"
    if private.tunes(trainer):
        return "a trial of Tuner trains nothing that is kept"
    if private.fast_dev_run(trainer):
        return "fast_dev_run checks the code, not the data"
    if private.overfit_batches(trainer) > 0:
        return "overfit_batches repeats the same samples on purpose"
    return None


def other_strategy(trainer: Trainer, on_error: str) -> str | None:
    """Why the callback cannot work with this Trainer's strategy; None if it can. Raises as `left_alone`."""
    if not isinstance(trainer.strategy, DDPStrategy | SingleDeviceStrategy):
        return left_alone(type(trainer.strategy).__name__, "Lightning", on_error)
    return None


def check_devices(trainer: Trainer) -> None:
    """Raises UsageError if each of a launcher's workers would train alone."""
    workers = settings.place().world_size
    if workers == trainer.world_size:
        return
    raise UsageError(
        f"the launcher started {workers} worker(s), but this Trainer has a world of {trainer.world_size}",
        hint="on CPU use Trainer(devices=int(os.environ.get('WORLD_SIZE', 1))), where devices='auto' means one; with "
        "GPUs devices='auto' follows the launcher",
    )


def check_length(trainer: Trainer, loaders: Mapping[str, object]) -> None:
    """Raises UsageError if Lightning fetches a batch ahead, because a cut would count it as trained."""
    if loaders and not private.has_length(trainer):
        raise UsageError(
            "a training loader without a length stands beside an elastic one, and the longest of them ends the epoch: "
            "Lightning fetches a batch ahead there, which every checkpoint would count as trained",
            hint="give that loader a __len__, or use CombinedLoader(loaders, 'min_size')",
        )


def plain(parameters: dict[str, Any]) -> dict[str, Any]:
    """Hyper-parameters that can be saved as they are; others as their repr, with one warning each."""
    plain = {}
    for name, value in parameters.items():
        try:
            pytree.flatten(value)
            plain[name] = value
        except UnsupportedState:
            private.warn_once(f"hyper-parameter {name!r} ({type(value).__name__}) is kept as its repr only")
            plain[name] = repr(value)
    return plain
