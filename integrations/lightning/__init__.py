"""Lightning 2.6: one callback makes a `Trainer` elastic.

Entry points: `ElasticCallback`; `FlashCheckpointIO` for the user's own checkpoints.
"""

from __future__ import annotations

from dlrover_hooks.integrations.lightning.callback import ElasticCallback as ElasticCallback
from dlrover_hooks.integrations.lightning.checkpoint_io import FlashCheckpointIO as FlashCheckpointIO
