"""What a job keeps in the cluster itself: small values by name, its actors, and its placement groups.

The only module that uses Ray's internal key-value store, which is private. It is lost with the head node, unless the
cluster's GCS keeps it in Redis.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import ray
from ray.actor import ActorHandle
from ray.experimental import internal_kv
from ray.util.placement_group import PlacementGroup, remove_placement_group

from dlrover_hooks.protocol import Roles

NAMESPACE = "dlrover_hooks"
_GONE_S = 15.0


class JobMaster(msgspec.Struct, frozen=True):
    """Where the HTTP master of a job is. `submission`: the run of the job. `node`: Ray's id of its node."""

    url: str
    token: str
    submission: str
    node: str


def _key(job: str, what: str) -> bytes:
    return f"dlrover_hooks/{job}/{what}".encode()


def put_address(job: str, address: JobMaster) -> None:
    """From now on clients find the job's master there."""
    internal_kv._internal_kv_put(_key(job, "master"), msgspec.json.encode(address), overwrite=True)


def get_address(job: str) -> JobMaster | None:
    """Where the job's master is; None: there is no such job, or it is over."""
    found = internal_kv._internal_kv_get(_key(job, "master"))
    return msgspec.json.decode(found, type=JobMaster) if found else None


def put_result(job: str, submission: str, roles: Roles) -> None:
    """The job is over. Its master is forgotten."""
    value = msgspec.json.encode([submission, roles])
    internal_kv._internal_kv_put(_key(job, "result"), value, overwrite=True)
    internal_kv._internal_kv_del(_key(job, "master"))


def get_result(job: str, submission: str) -> Roles | None:
    """How this run of the job ended; None: it is not over."""
    found = internal_kv._internal_kv_get(_key(job, "result"))
    if not found:
        return None
    of, roles = msgspec.json.decode(found, type=tuple[str, Roles])
    return roles if of == submission else None


def forget(job: str) -> None:
    """Delete all values of the job."""
    for what in ("master", "result"):
        internal_kv._internal_kv_del(_key(job, what))


# ---- actors ----------------------------------------------------------------------------------------------------------


def actor_name(job: str, *parts: object) -> str:
    """The name of one of the job's actors."""
    return "/".join((job, *map(str, parts)))


def actor_names(prefix: str) -> list[str]:
    """Names of the actors that live, or are about to, and begin with `prefix`."""
    found: list[dict[str, str]] = ray.util.list_named_actors(all_namespaces=True)  # pyright: ignore[reportAssignmentType]
    return [one["name"] for one in found if one["namespace"] == NAMESPACE and one["name"].startswith(prefix)]


def actor(name: str) -> ActorHandle[Any]:
    """Raises ValueError: there is none."""
    return ray.get_actor(name, namespace=NAMESPACE)


def actor_options(name: str, **more: Any) -> dict[str, Any]:
    """Of an actor that lives until it is killed, and is made at most once."""
    return {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True, **more}


def kill(name: str) -> None:
    """Kill an actor for good, if it is there."""
    with contextlib.suppress(ValueError):
        ray.kill(actor(name), no_restart=True)


def kill_all(prefix: str, *, but: str = "") -> list[str]:
    """Kill all actors with this prefix, and wait until they are gone. Names of those that are not gone in time."""
    deadline = time.monotonic() + _GONE_S
    while left := [name for name in actor_names(prefix) if name != but]:
        for name in left:
            kill(name)
        if time.monotonic() > deadline:
            return left
        _pause(0.05)
    return []


def _pause(seconds: float) -> None:
    ray.wait([ray.put(None)], timeout=0)
    time.sleep(seconds)


# ---- placement groups ------------------------------------------------------------------------------------------------


def group_named(name: str) -> PlacementGroup | None:
    """The placement group, if there is one."""
    try:
        return ray.util.get_placement_group(name)
    except ValueError:
        return None


def remove_groups(names: Iterator[str]) -> None:
    """Remove these placement groups; resources are free once that is done."""
    for name in names:
        if (group := group_named(name)) is not None:
            remove_placement_group(group)
