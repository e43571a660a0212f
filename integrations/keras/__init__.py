"""Keras 3: one callback makes a training with fit() elastic, on the torch, JAX and TensorFlow backends.

Entry point: `ElasticCallback`. TensorFlow and JAX are never imported here: Keras imports its backend.
"""

from __future__ import annotations

try:
    import keras as _keras
except ImportError as _missing:
    if _missing.name == "keras":
        raise ImportError("Keras is not installed: pip install 'dlrover-hooks[keras]' and its backend") from _missing
    raise ImportError(
        f"Keras cannot import its backend ({_missing}): set KERAS_BACKEND to torch, jax or tensorflow, or install it"
    ) from _missing

del _keras

from dlrover_hooks.integrations.keras.callback import KerasElasticCallback as ElasticCallback  # noqa: E402, F401
