"""The parts of TensorFlow that have no public name. One function each, each with a test."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def stop(coordinator: tf.distribute.coordinator.ClusterCoordinator) -> None:
    """End the threads of a coordinator that is no longer used.

    Otherwise its preemption thread goes on to set the old cluster on the context that the whole process shares.
    """
    coordinator._cluster.stop()


def wait_ready(value: Any, timeout_s: float) -> bool:
    """Wait until the closure behind a `RemoteValue` has run or failed; False after `timeout_s` seconds.

    The public `get` waits without a limit, and raises the error that the coordinator raises, too.
    """
    return value._status_available_event.wait(timeout_s)


def is_sharded(variable: Any) -> bool:
    """True for a variable that a partitioner has cut into parts."""
    from tensorflow.python.distribute.sharded_variable import (  # pyright: ignore[reportMissingImports]
        ShardedVariable,
    )

    return isinstance(getattr(variable, "value", variable), ShardedVariable) or isinstance(variable, ShardedVariable)


def create_slots(optimizer: Any, variables: Any) -> None:
    """Create an optimizer's variables, so that a checkpoint can be restored into them: also of a legacy optimizer."""
    if hasattr(optimizer, "build"):
        optimizer.build(variables)
    else:
        optimizer._create_all_weights(variables)
