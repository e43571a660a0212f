"""A parameter server or a worker: a TensorFlow server that runs until the master releases its task.

    python -u -m dlrover_hooks.integrations.tensorflow

`dlrover-hooks run --ps` starts it so; in a cluster described by TF_CONFIG `PSTrainer.run` calls `serve`. The server
knows only itself: the chief sends it the cluster when it connects, so it needs no restart when the cluster changes.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

import tensorflow as tf

from dlrover_hooks import config as settings
from dlrover_hooks.config import Config, TaskPlace
from dlrover_hooks.errors import HooksError, UsageError
from dlrover_hooks.ps.membership import ServerMembership

log = logging.getLogger("dlrover_hooks")
_USAGE, _FAILED = 78, 1
_THREADS = 64
"""Threads that serve requests. TensorFlow has one for each core, and each step holds one on its worker until it ends.

Workers hang with fewer threads than workers + 1 (TensorFlow's guide says so). After the loss of a parameter server the
steps that were under way may keep theirs.
"""


def serve(config: Config, place: TaskPlace) -> int:
    """Serve until the task is released; the exit code. The process must then end: a TensorFlow server cannot be closed.

    Raises:
        UsageError: there is no master, or the address cannot be used.
        MasterError: the master refuses the task.
    """
    kind, index = place.type.value, place.index
    cluster = tf.train.ClusterSpec({kind: {index: place.address}})
    options = tf.compat.v1.ConfigProto(
        device_count={"GPU": 0} if kind == "ps" else {},
        inter_op_parallelism_threads=max(_THREADS, os.cpu_count() or 1),
    )
    try:
        server = tf.distribute.Server(cluster, job_name=kind, task_index=index, protocol="grpc", config=options)
    except tf.errors.OpError as error:
        raise UsageError(
            f"{kind} {index} cannot serve at {place.address}: {error.message}",
            hint="give the task another port, or end the process that uses it",
        ) from None
    membership = ServerMembership(config, place, place.address)
    membership.start()
    log.info("%s %d serves at %s", kind, index, server.target.removeprefix("grpc://"))
    while not membership.over.wait(1.0):
        membership.check()
    log.info("%s %d ends: %s", kind, index, membership.reason)
    membership.close()
    return 0


def serve_and_exit(config: Config, place: TaskPlace) -> NoReturn:
    """`serve`, then end this process: the server's threads would keep the interpreter waiting. Raises as `serve`."""
    code = serve(config, place)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> int:
    """Serve the task that the environment names; the exit code."""
    logging.basicConfig(format="[dlrover-hooks] %(message)s", level=logging.INFO, stream=sys.stderr)
    try:
        place = settings.task()
        if place is None:
            raise UsageError(
                "this process has no task: neither a launcher nor TF_CONFIG names one",
                hint="dlrover-hooks run --ps 1 --workers 1 train.py starts the servers",
            )
        return serve(settings.load(), place)
    except HooksError as error:
        log.error("%s", error)
        return _USAGE if isinstance(error, UsageError) else _FAILED
