"""For tests and drills: fakes of the master and of storage, and faults for real processes. Names load on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrover_hooks.testing.bucket import Bucket as Bucket
    from dlrover_hooks.testing.bucket import FaultyStore as FaultyStore
    from dlrover_hooks.testing.bucket import faulty_store as faulty_store
    from dlrover_hooks.testing.drill import arm as arm
    from dlrover_hooks.testing.fakes import Hold as Hold
    from dlrover_hooks.testing.fakes import ManualClock as ManualClock
    from dlrover_hooks.testing.fakes import MasterFake as MasterFake
    from dlrover_hooks.testing.fakes import StorageFake as StorageFake
    from dlrover_hooks.testing.faults import Fault as Fault
    from dlrover_hooks.testing.faults import Kind as Kind
    from dlrover_hooks.testing.faults import Moment as Moment
    from dlrover_hooks.testing.faults import Target as Target
    from dlrover_hooks.testing.inject import InjectedFault as InjectedFault
    from dlrover_hooks.testing.proxy import Proxy as Proxy

_PUBLIC = {
    **dict.fromkeys(("Hold", "ManualClock", "MasterFake", "StorageFake"), "fakes"),
    **dict.fromkeys(("Bucket", "FaultyStore", "faulty_store"), "bucket"),
    **dict.fromkeys(("Fault", "Kind", "Moment", "Target"), "faults"),
    "InjectedFault": "inject",
    "arm": "drill",
    "Proxy": "proxy",
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'dlrover_hooks.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
