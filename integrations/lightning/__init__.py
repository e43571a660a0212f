"""Lightning 2.6: one callback makes a `Trainer` elastic.

Entry points: `ElasticCallback`; `FlashCheckpointIO` for the user's own checkpoints.
"""

from __future__ import annotations

from dlrover_hooks.integrations.lightning.async_checkpoint_io import FlashCheckpointIO as FlashCheckpointIO
from dlrover_hooks.integrations.lightning.callback import ElasticCallback as ElasticCallback
