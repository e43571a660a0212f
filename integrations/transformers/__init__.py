"""Transformers 5: one line makes a `Trainer` elastic.

Entry point: `elastic_trainer`.
"""

from __future__ import annotations

try:
    import transformers as _transformers
except ImportError as _missing:
    raise ImportError("Transformers is not installed: pip install 'dlrover-hooks[transformers]'") from _missing

del _transformers

from dlrover_hooks.integrations.transformers.elastic_trainer import (  # noqa: E402
    ElasticTraining as ElasticTraining,
    elastic_trainer as elastic_trainer,
)
