"""Which characters follow? A recurrent net learns to write Python out of Python's own standard library, with Keras."""

import argparse
import os
import sysconfig
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np

from dlrover_hooks.integrations.keras import ElasticCallback

CONTEXT, VOCABULARY = 40, 128


def windows(part: slice, count: int) -> tuple[np.ndarray, np.ndarray]:
    """`count` windows of the library's source and the characters behind them; `part`: of its files by name."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files[part])[: count * CONTEXT + 1], np.uint8)
    rows = np.minimum(text, VOCABULARY - 1).astype("int32")
    starts = np.arange(count)[:, None] * CONTEXT + np.arange(CONTEXT)
    return rows[starts], rows[starts + 1]


def network() -> keras.Model:
    model = keras.Sequential(
        [
            keras.layers.Input((CONTEXT,), dtype="int32"),
            keras.layers.Embedding(VOCABULARY, 48),
            keras.layers.Conv1D(96, 5, padding="causal", activation="relu"),
            keras.layers.Dropout(0.1),
            keras.layers.Conv1D(96, 5, padding="causal", activation="relu"),
            keras.layers.Dense(VOCABULARY),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--windows", type=int, default=3000, help="training windows of 40 characters")
    given = parser.parse_args()
    keras.utils.set_random_seed(1)
    x, y = windows(slice(0, 60), given.windows)
    el = ElasticCallback(save_to="saved")
    plateau = keras.callbacks.ReduceLROnPlateau(patience=1)
    model = network()
    history = model.fit(
        el.data(x, y, batch_size=32),
        epochs=given.epochs,
        validation_data=windows(slice(60, None), given.windows // 10),
        callbacks=[el, plateau],
    )
    print(f"held-out loss after each epoch: {history.history['val_loss']}")


if __name__ == "__main__":
    main()
