"""The end of an epoch in which samples could not be read."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from dlrover_hooks import config as settings, protocol as p
from dlrover_hooks.data.leased.shard_dataset import ShardDataset
from dlrover_hooks.errors import ShardsFailed

_SHOWN = 20


def tell_quarantined(dataset: ShardDataset, quarantined: Sequence[p.Quarantined]) -> None:
    """Raise ShardsFailed with the samples that are in no model, or warn of them, by `on_error` of the dataset."""
    lost = sum(one.hi - one.lo for one in quarantined)
    lines = [f"positions [{one.lo}, {one.hi}) {one.partition}: {one.reason}" for one in quarantined[:_SHOWN]]
    if len(quarantined) > _SHOWN:
        lines.append(f"and {len(quarantined) - _SHOWN} more ranges")
    error = ShardsFailed(
        f"dataset {dataset.name!r}: {lost} samples of this epoch could not be read and are in no model:\n"
        + "\n".join(lines),
        hint='mend or remove them; ShardDataset(..., on_error="warn") goes on without them',
        quarantined=tuple(quarantined),
    )
    if settings.load(on_error=dataset.on_error).on_error == "raise":
        raise error
    warnings.warn(str(error), RuntimeWarning, stacklevel=3)
