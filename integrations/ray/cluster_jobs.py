"""The jobs of several roles that run on a Ray cluster, for commands."""

from __future__ import annotations

import logging

from dlrover_hooks import config as settings
from dlrover_hooks.errors import UsageError
from dlrover_hooks.integrations.ray import cluster_state

_PRIME = cluster_state.actor_name("", "prime")


def connect(address: str) -> None:
    """Connect this process to a cluster, without the logs of its workers.

    Args:
        address: HOST:PORT of the cluster. "auto": RAY_ADDRESS, or the cluster of this machine.

    Raises:
        UsageError: this is no address.
        LaunchError: no cluster answers there.
    """
    address = (settings.ray_address() or address) if address == "auto" else address
    if address != "auto" and ":" not in address:
        raise UsageError(f"{address!r} is no address of a Ray cluster", hint="give HOST:PORT, or auto")
    cluster_state.connect(address, log_to_driver=False, logging_level=logging.ERROR)


def job_named(job: str | None) -> str:
    """The job of that name, or the only one of the cluster. Raises UsageError."""
    found = sorted(
        name.removesuffix(_PRIME)
        for name in cluster_state.actor_names("")
        if name.endswith(_PRIME) and name.count("/") == 1
    )
    chosen = [one for one in found if job in (None, one)]
    if len(chosen) == 1:
        return chosen[0]
    what = f"no job {job!r} runs in this cluster" if job else "which job?"
    raise UsageError(f"{what} (running there: {', '.join(found) or 'none'})", hint="check its name, and the address")
