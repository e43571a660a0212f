"""The chief's connection to one PS cluster version: a strategy, a coordinator, and the user's program built for them.

TensorFlow binds variables and functions to the cluster for which they were made. So each cluster version gets a new
strategy, and the program is built again. See `docs/tensorflow.md`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import UsageError
from dlrover_hooks.host.ports import free_port
from dlrover_hooks.integrations.tensorflow import _private_api as private

_STEP = "dlrover_hooks_step"
"""Name of the step counter in the checkpoint."""


class PSProgram:
    """What `build(strategy)` returns: the step, and the objects whose variables belong to a checkpoint.

    Args:
        step: called on a worker, inside a `tf.function`, with the sample numbers `begin` and `end` (int64 scalars) of
            one shard: it reads samples `begin` to `end - 1` and applies one optimizer step. It returns a tensor, such
            as the loss, or None.
        trackables: models, optimizers, variables, by the names that they get in the checkpoint. An optimizer must have
            created its variables: `optimizer.build(model.trainable_variables)`.
    """

    def __init__(self, step: Callable[[Any, Any], Any], **trackables: Any) -> None:
        self.step, self.trackables = step, trackables


Build = Callable[[tf.distribute.ParameterServerStrategy], PSProgram]


def connect(
    cluster: p.PSCluster, host: str, partitioner: tf.distribute.experimental.partitioners.Partitioner | None
) -> tuple[tf.distribute.ParameterServerStrategy, tf.distribute.coordinator.ClusterCoordinator]:
    """A new strategy and its coordinator. Blocks until all servers have answered. Raises OpError."""
    # A new chief port each time: with an unchanged cluster TensorFlow keeps the old connection, which is dead.
    spec = {"chief": [f"{host}:{free_port()}"], "worker": list(cluster.workers), "ps": list(cluster.ps)}
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(spec), rpc_layer="grpc", task_type="chief", task_id=0
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
    return strategy, tf.distribute.coordinator.ClusterCoordinator(strategy)


def disconnect(coordinator: tf.distribute.coordinator.ClusterCoordinator) -> None:
    """End the threads of a coordinator; the servers live on."""
    with contextlib.suppress(tf.errors.OpError):
        private.stop(coordinator)


class ClusterConnection:
    """Connects in the constructor, which blocks until all servers of `cluster` have answered. Training thread only.

    Args:
        cluster: addresses of the servers.
        host: address of the chief, at which the servers reach it.
        build: called in the scope of the new strategy.
        partitioner: cuts large variables into parts, see `tf.distribute.experimental.partitioners`.

    Raises:
        UsageError: the program cannot work.
        OpError: a server was lost meanwhile.
    """

    def __init__(
        self,
        cluster: p.PSCluster,
        host: str,
        build: Build,
        partitioner: tf.distribute.experimental.partitioners.Partitioner | None,
    ) -> None:
        self.strategy, self.coordinator = connect(cluster, host, partitioner)
        try:
            with self.strategy.scope():
                program = build(self.strategy)
                counter = tf.Variable(tf.constant(0, tf.int64), name=_STEP)
            check_program(program)
        except BaseException:
            self.close()
            raise
        self.program, self.counter = program, counter
        """Steps that were applied. With several workers it may be more than the shards: see `docs/tensorflow.md`."""
        self.checkpoint = tf.train.Checkpoint(**{**program.trackables, _STEP: counter})

        @tf.function(input_signature=[tf.TensorSpec((), tf.int64), tf.TensorSpec((), tf.int64)])
        def closure(begin: Any, end: Any) -> Any:
            result = program.step(begin, end)
            counter.assign_add(1)
            return tf.constant(0) if result is None else result

        self._closure = closure

    def schedule(self, begin: int, end: int) -> Any:
        """Run one step on any worker. The `RemoteValue` of its result. Raises OpError if a server was lost."""
        return self.coordinator.schedule(self._closure, args=(tf.constant(begin, tf.int64), tf.constant(end, tf.int64)))

    def check(self) -> None:
        """Raise the error of a closure, if there is one."""
        self.coordinator.done()

    def close(self) -> None:
        """Leave this cluster. The servers live on."""
        disconnect(self.coordinator)


def check_program(program: PSProgram) -> None:
    """Raises UsageError if it is none, or cannot work."""
    if not isinstance(program, PSProgram):
        raise UsageError(
            f"build(strategy) returned {type(program).__name__}", hint="return PSProgram(step, model=model, ...)"
        )
    for name, one in program.trackables.items():
        if not type(one).__module__.startswith("keras."):
            continue
        variables = getattr(one, "variables", ())
        if any(private.is_sharded(variable) for variable in variables):
            raise UsageError(
                f"{name} is of Keras 3, which cannot use variables that a partitioner has cut into parts",
                hint="leave partitioner out, or install tf_keras, set TF_USE_LEGACY_KERAS=1 and use tf.keras",
            )
