"""One consistent cut of a `Trainer`, as the saved tree: Lightning's own checkpoint, and the state that it lacks."""

from __future__ import annotations

from typing import Any

import msgspec
from lightning.pytorch import Trainer

from dlrover_hooks import protocol as p
from dlrover_hooks.integrations.lightning import _private_api as private, output_names as names
from dlrover_hooks.integrations.lightning.preconditions import plain
from dlrover_hooks.integrations.lightning.stateful_loaders import OwnLoaders
from dlrover_hooks.protocol.restored_value_check import require
from dlrover_hooks.pytorch.ddp_exactness import BucketOrder
from dlrover_hooks.pytorch.state_dict import OptimizerForm

_OF_STEPS = ("state_dict", "optimizer_states")
"""Keys that only an optimizer step changes; except buffers, which `StepSnapshot` keeps."""


def cut(
    trainer: Trainer, own: OwnLoaders | None, buckets: BucketOrder | None, *, ended: bool = False
) -> dict[str, Any]:
    """The cut at a step boundary; `ended`: at the end of training."""
    checkpoint = private.dump(trainer)
    if own is not None:
        private.replace_loader_states(trainer, checkpoint, own.at_end if ended else own.at_request)
    for key in ("hyper_parameters", "datamodule_hyper_parameters"):
        if key in checkpoint:
            checkpoint[key] = plain(checkpoint[key])
    return {
        "lightning": checkpoint,
        "bucket_order": buckets.names if buckets is not None else [],
        "optimizer_classes": [type(one).__name__ for one in trainer.optimizers],
        "saved_at": names.saved_at(trainer),
        "stopped": private.limits(trainer) if trainer.should_stop else None,
    }


class _CountsForm(msgspec.Struct):
    total: dict[str, Any]
    current: dict[str, Any]


class _SteppedForm(msgspec.Struct):
    _batches_that_stepped: p.Step


class _FitForm(msgspec.Struct):
    epoch_progress: _CountsForm
    batch_progress: _CountsForm = msgspec.field(name="epoch_loop.batch_progress")
    stepped: _SteppedForm = msgspec.field(name="epoch_loop.state_dict")


class _LoopsForm(msgspec.Struct):
    fit_loop: _FitForm


class _TrainerForm(msgspec.Struct):
    """The fields of the `Trainer`'s own checkpoint that are used here, or by Lightning without a check."""

    state_dict: dict[str, Any]
    optimizer_states: list[OptimizerForm]
    loops: _LoopsForm
    global_step: p.Step
    epoch: p.Step
    version: str = msgspec.field(name="pytorch-lightning_version")
    lr_schedulers: list[dict[str, Any]] = []
    callbacks: dict[str, Any] = {}


class _CutForm(msgspec.Struct):
    """The form of `cut`; fields with a default may be absent in older checkpoints."""

    lightning: _TrainerForm
    bucket_order: list[str]
    stopped: list[int | None] | None
    optimizer_classes: list[str] | None = None
    saved_at: dict[str, int] = {}


def check_state(state: Any) -> None:
    """Raises UsageError for the state of another adapter, Corrupt for a state of none."""
    private.own(state)
    require(state, _CutForm, "the state")


def validating(trainer: Trainer, buckets: BucketOrder | None) -> dict[str, Any]:
    """The part of a cut that may change without an optimizer step, taken as a validation begins.

    The step before is over then: the loaders are positioned after its batch.
    """
    made = cut(trainer, None, buckets)
    made["lightning"] = {key: value for key, value in made["lightning"].items() if key not in _OF_STEPS}
    private.owe_validation(made["lightning"])
    return made


def put_back(cut: dict[str, Any], validating: dict[str, Any]) -> dict[str, Any]:
    """`cut`, made later, with the state of `validating` put back."""
    return cut | validating | {"lightning": cut["lightning"] | validating["lightning"]}
