"""Are weights and optimizer state the same bits on 2, 1, 2 and 3 servers? `python ps_exact.py raw|keras|tf_keras`

Prints a line of JSON: `bit_exact`, the number of arrays that were compared, and on how many servers the parts of the
model were each time. It starts plain TensorFlow servers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

import tensorflow as tf

from dlrover_hooks import protocol as p
from dlrover_hooks.host.ports import free_port
from dlrover_hooks.integrations.tensorflow import PSProgram
from dlrover_hooks.integrations.tensorflow.checkpoints import VERSION, PSCheckpoints, PSCheckpointState
from dlrover_hooks.integrations.tensorflow.cluster_connection import ClusterConnection
from tests.integrations.ps_chief import PLAN, Model, parts_of

_SERVER = """
import sys, tensorflow as tf
kind, index, address = sys.argv[1:]
cluster = tf.train.ClusterSpec({kind: {int(index): address}})
server = tf.distribute.Server(cluster, job_name=kind, task_index=int(index), protocol="grpc")
print("serves", flush=True)
server.join()
"""
STEPS = 40


def server(kind: str, index: int) -> tuple[subprocess.Popen[str], str]:
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-c", _SERVER, kind, str(index), address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return process, address


def arrays(folder: str) -> dict[str, bytes]:
    reader = tf.train.load_checkpoint(f"{folder}/model")
    names = [name for name in reader.get_variable_to_shape_map() if name != "_CHECKPOINTABLE_OBJECT_GRAPH"]
    return {name: bytes(reader.get_tensor(name).tobytes()) for name in names if "save_counter" not in name}


def main() -> None:
    plan: dict[str, Any] = PLAN | {"kind": sys.argv[1], "partition": sys.argv[1] != "keras"}
    servers = [server("worker", 0), *(server("ps", index) for index in range(3))]
    for process, _ in servers:
        assert process.stdout is not None
        assert process.stdout.readline() == "serves\n"
    worker, *ps = [address for _, address in servers]
    partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(min_shard_bytes=64, max_shards=8)
    found: list[dict[str, bytes]] = []
    used: list[int] = []
    saved = PSCheckpoints(tempfile.mkdtemp(prefix="ps-exact-"))

    def build(strategy: Any) -> PSProgram:
        model = Model(plan, strategy)
        used.append(len({part.device for part in parts_of(model.seen)}))
        return PSProgram(model.step, **model.kept)

    for version, count in enumerate((2, 1, 2, 3), 1):
        cluster = p.PSCluster(version, tuple(ps[:count]), (worker,))
        connection = ClusterConnection(cluster, "127.0.0.1", build, partitioner if plan["partition"] else None)
        if (newest := saved.newest()) is not None:
            saved.restore(connection.checkpoint, newest[0])
        else:
            for number in range(STEPS):
                connection.schedule(2 * number, 2 * number + 2)
            connection.coordinator.join()
        saved.write(connection.checkpoint, PSCheckpointState(VERSION, "exact", STEPS, {"cursor": version}))
        newest = saved.newest()
        assert newest is not None
        found.append(arrays(newest[0]))
        connection.close()
    same = all(one == found[0] for one in found)
    print(json.dumps({"bit_exact": same, "arrays": len(found[0]), "servers": used}), flush=True)
    for process, _ in servers:
        process.kill()
    os._exit(0)  # TensorFlow would write to the servers that are gone


if __name__ == "__main__":
    main()
