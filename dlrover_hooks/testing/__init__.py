"""For tests and fault drills: fakes of the master and of storage, and faults for real processes. Loaded lazily."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrover_hooks.testing.fakes import (
        ManualClock as ManualClock,
        MasterFake as MasterFake,
        StorageFake as StorageFake,
        StorageFakeClaim as StorageFakeClaim,
    )
    from dlrover_hooks.testing.faults.drill import arm as arm
    from dlrover_hooks.testing.faults.fault_actions import InjectedFault as InjectedFault
    from dlrover_hooks.testing.faults.fault_plan import Fault as Fault, Kind as Kind, Moment as Moment, Target as Target
    from dlrover_hooks.testing.object_store import (
        Bucket as Bucket,
        FaultyStore as FaultyStore,
        faulty_store as faulty_store,
    )
    from dlrover_hooks.testing.scaler_fake import FakeScaler as FakeScaler
    from dlrover_hooks.testing.tcp_proxy import Proxy as Proxy

_PUBLIC = {
    **dict.fromkeys(("StorageFakeClaim", "ManualClock", "MasterFake", "StorageFake"), "fakes"),
    **dict.fromkeys(("Bucket", "FaultyStore", "faulty_store"), "object_store"),
    **dict.fromkeys(("Fault", "Kind", "Moment", "Target"), "faults.fault_plan"),
    "InjectedFault": "faults.fault_actions",
    "arm": "faults.drill",
    "FakeScaler": "scaler_fake",
    "Proxy": "tcp_proxy",
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'dlrover_hooks.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
