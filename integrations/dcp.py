"""torch.distributed.checkpoint for dlrover-hooks generations: a reader, a stager and a writer without pickle."""

from __future__ import annotations

from dlrover_hooks.pytorch.dcp_reader import FlashReader as FlashReader, saved_values as saved_values
from dlrover_hooks.pytorch.dcp_writer import FlashStager as FlashStager, FlashWriter as FlashWriter
