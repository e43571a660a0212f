"""Accelerate 1.15: one object beside an `Accelerator` makes it elastic.

The way in: `ElasticAccelerator`.
"""

from __future__ import annotations

from dlrover_hooks.integrations.accelerate.accelerator import ElasticAccelerator as ElasticAccelerator
