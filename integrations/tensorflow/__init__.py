"""TensorFlow's parameter server training, on a cluster whose servers come and go.

Entry point: `PSTrainer`. TensorFlow is imported here and nowhere else in the library.
"""

from __future__ import annotations

try:
    import tensorflow as _tensorflow
except ImportError as _missing:
    raise ImportError("TensorFlow is not installed: pip install 'dlrover-hooks[tensorflow]'") from _missing

del _tensorflow

from dlrover_hooks.integrations.tensorflow.cluster_connection import PSProgram as PSProgram  # noqa: E402
from dlrover_hooks.integrations.tensorflow.cluster_switch import Reconnect as Reconnect  # noqa: E402
from dlrover_hooks.integrations.tensorflow.trainer import PSReport as PSReport, PSTrainer as PSTrainer  # noqa: E402
