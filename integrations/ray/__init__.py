"""Jobs of several roles as actors of Ray, and hooks for Ray Train.

Entry points: `RayTrainHooks`, `submit` (called by `JobSpec.submit(backend="ray")`), `attach`, `RayJob`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dlrover_hooks.errors import MissingExtra

if TYPE_CHECKING:
    from dlrover_hooks.integrations.ray.ray_job import RayJob as RayJob, attach as attach, submit as submit
    from dlrover_hooks.integrations.ray.train_hooks import RayTrainHooks as RayTrainHooks

_WHERE = {"RayJob": "ray_job", "RayTrainHooks": "train_hooks", "attach": "ray_job", "submit": "ray_job"}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_WHERE[name]}")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise MissingExtra("Ray is not installed", hint="pip install 'dlrover-hooks[ray]'") from error
    return getattr(module, name)
