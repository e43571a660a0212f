"""TensorFlow's parameter server training, on a cluster whose servers come and go.

Entry points: `PSTrainer` for a loop of the user's own step, `fit_elastic` for `fit` of tf_keras, which is imported only
for the names that need it. TensorFlow is imported here and nowhere else in the library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    import tensorflow as _tensorflow
except ImportError as _missing:
    raise ImportError("TensorFlow is not installed: pip install 'dlrover-hooks[tensorflow]'") from _missing

del _tensorflow

from dlrover_hooks.integrations.tensorflow.cluster_connection import PSProgram as PSProgram  # noqa: E402
from dlrover_hooks.integrations.tensorflow.cluster_switch import Reconnect as Reconnect  # noqa: E402
from dlrover_hooks.integrations.tensorflow.trainer import PSReport as PSReport, PSTrainer as PSTrainer  # noqa: E402

if TYPE_CHECKING:
    from dlrover_hooks.integrations.tensorflow.keras_fit import (
        PSClusterChanged as PSClusterChanged,
        PSReconnect as PSReconnect,
        fit_elastic as fit_elastic,
    )

_OF_TF_KERAS = ("PSClusterChanged", "PSReconnect", "fit_elastic")


def __getattr__(name: str) -> Any:
    """Raises MissingExtra, an ImportError, if tf_keras is not installed."""
    if name not in _OF_TF_KERAS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dlrover_hooks.integrations.tensorflow import keras_fit

    return getattr(keras_fit, name)
