"""A click-through style model on parameter servers: which lines of Python open a block?

Each line of the standard library is a sample: its words, hashed into an embedding that is cut over the parameter
servers, and whether the next line is indented deeper. Started by `dlrover-hooks run --ps 1 --workers 2 train.py`.
"""

import argparse
import itertools
import os
import re
import zlib
from pathlib import Path

import numpy as np
import tensorflow as tf

from dlrover_hooks.integrations.tensorflow import PSProgram, PSTrainer

WORDS, BUCKETS, SIZE = 12, 20_000, 16
RECORD = 4 * (WORDS + 1)
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=3)
options = parser.parse_args()
data = Path("lines.bin").absolute()


def prepare() -> int:
    """Write the samples as records of fixed length, once; their number."""
    if not data.exists():
        rows = []
        for path in sorted(Path(os.__file__).parent.glob("*.py")):
            lines = [line.rstrip() for line in path.read_text("utf-8", "ignore").splitlines() if line.strip()]
            for line, after in itertools.pairwise(lines):
                deeper = len(after) - len(after.lstrip()) > len(line) - len(line.lstrip())
                words = [zlib.crc32(word.encode()) % BUCKETS for word in re.findall(r"\w+|[^\w\s]", line)[:WORDS]]
                rows.append([*words, *[0] * (WORDS - len(words)), int(deeper)])
        np.array(rows, np.int32).tofile(data)
    return data.stat().st_size // RECORD


def build(strategy: tf.distribute.ParameterServerStrategy) -> PSProgram:
    """The model on this set of parameter servers: an embedding, one hidden layer, Adagrad by hand."""
    shapes = {"embedding": (BUCKETS, SIZE), "hidden": (WORDS * SIZE, 32), "out": (32, 1)}
    weights = {name: tf.Variable(tf.random.stateless_normal(shape, (1, 2)) * 0.1) for name, shape in shapes.items()}
    sums = {f"{name}_sum": tf.Variable(tf.fill(shape, 0.1)) for name, shape in shapes.items()}
    parts, totals = ([part for one in kind.values() for part in getattr(one, "variables", [one])]
                     for kind in (weights, sums))  # fmt: skip

    def step(begin: tf.Tensor, end: tf.Tensor) -> tf.Tensor:
        """Read the records of one shard on a worker, and apply one step."""
        records = tf.data.FixedLengthRecordDataset(str(data), RECORD, header_bytes=begin * RECORD)
        batch = records.take(end - begin).batch(end - begin).get_single_element()
        rows = tf.io.decode_raw(batch, tf.int32)
        words, deeper = rows[:, :WORDS], tf.cast(rows[:, WORDS:], tf.float32)
        with tf.GradientTape() as tape:
            x = tf.reshape(tf.nn.embedding_lookup(weights["embedding"], words), (-1, WORDS * SIZE))
            x = tf.nn.relu(tf.matmul(x, tf.convert_to_tensor(weights["hidden"])))
            logits = tf.matmul(x, tf.convert_to_tensor(weights["out"]))
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(deeper, logits))
        for part, total, gradient in zip(parts, totals, tape.gradient(loss, parts), strict=True):
            gradient = tf.convert_to_tensor(gradient)
            total.assign_add(gradient**2)
            part.assign_sub(0.1 * gradient / tf.sqrt(total.read_value()))
        return loss

    return PSProgram(step, **weights, **sums)


with open("losses.csv", "a", buffering=1) as log:
    trainer = PSTrainer(
        build,
        samples=prepare(),
        shard_size=512,
        epochs=options.epochs,
        save_to="saved",
        save_every="2s",
        partitioner=tf.distribute.experimental.partitioners.MinSizePartitioner(64 << 10, max_shards=8),
        on_result=lambda step, loss: log.write(f"{step},{loss:.4f},{trainer.cluster.version}\n"),
    )
    print(trainer.run())
