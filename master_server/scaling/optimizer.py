"""What every optimizer offers."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from dlrover_hooks.protocol import Node, OptimizeStage, ResourcePlan

NO_CONFIG: Mapping[str, Any] = MappingProxyType({})
"""Read-only, so that no call can leave something in it for the next one."""


class ResourceOptimizer(metaclass=ABCMeta):
    """Makes resource plans for one job. An empty plan means: as it is."""

    @abstractmethod
    def generate_opt_plan(self, stage: OptimizeStage, config: Mapping[str, Any] = NO_CONFIG) -> ResourcePlan:
        """The plan for a stage."""

    @abstractmethod
    def generate_oom_recovery_plan(
        self, oom_nodes: Sequence[Node], stage: OptimizeStage, config: Mapping[str, Any] = NO_CONFIG
    ) -> ResourcePlan:
        """The plan for nodes that were killed because their memory was used up."""

    @abstractmethod
    def generate_resource_plan_with_optimizer(self, config: Mapping[str, Any] = NO_CONFIG) -> ResourcePlan:
        """The plan of the fitted model alone."""

    def predict(self, plan: ResourcePlan) -> float | None:
        """Steps per second with this plan; None: nothing predicts them."""
        return None

    def explain(self, plan: ResourcePlan) -> str:
        """Why it made `plan`, for a person; empty: it has no special reason."""
        return ""
