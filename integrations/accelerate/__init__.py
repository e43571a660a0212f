"""Accelerate: one object beside an `Accelerator` makes it elastic.

Entry point: `ElasticAccelerator`.
"""

from __future__ import annotations

from dlrover_hooks.integrations.accelerate.accelerator import ElasticAccelerator as ElasticAccelerator
