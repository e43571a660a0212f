"""Access to the state of a Ray cluster: stored values, actors, placement groups and nodes.

Uses private interfaces of Ray: its internal key-value store, the free resources of each node, and the reservation of
each actor. Stored values are lost with the head node, unless the cluster keeps them in Redis.
"""

from __future__ import annotations

import contextlib
import re
import socket
import time
from typing import Any

import msgspec
import ray
from ray import PlacementGroupID
from ray._private.state import available_resources_per_node, state
from ray.actor import ActorHandle
from ray.core.generated.gcs_pb2 import ActorTableData  # pyright: ignore[reportAttributeAccessIssue]
from ray.exceptions import RayError
from ray.experimental import internal_kv
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dlrover_hooks.errors import LaunchError
from dlrover_hooks.protocol import Roles

NAMESPACE = "dlrover_hooks"
_INIT_S, _GONE_S, _CONNECT_S, _TASK_S = 5.0, 15.0, 1.0, 3.0
_HEAD = "node:__internal_head__"
_RESULTS = 8
"""Results of so many submissions of a job are kept, the newest ones."""
NODE_DIED = "its node has died"
"""Ray's error for a lost node contains this text; there is no other way to recognize it."""


def connect(address: str, **options: Any) -> None:
    """Connect this process to a cluster, or start one.

    Args:
        address: HOST:PORT, a URL, or what else `ray.init` takes, as "auto" and "local".
        options: of `ray.init`.

    Raises LaunchError: no cluster answers there.
    """
    try:
        host, _, port = address.rpartition(":")
        if host and "://" not in address:  # where nothing listens, Ray would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), _INIT_S).close()
        ray.init(address=address, namespace=NAMESPACE, **options)
    except (OSError, ValueError, RuntimeError) as error:  # an OSError, too, is Ray's ConnectionError
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise LaunchError(
            f"no Ray cluster answers at {address!r}: {reason}",
            hint="check its HOST:PORT, and set RAY_AUTH_MODE=token if the cluster needs a token",
        ) from error


class JobMaster(msgspec.Struct, frozen=True):
    """The URL and token of a job's HTTP master. `submission`: id of the submission. `node`: Ray's id of its node."""

    url: str
    token: str
    submission: str
    node: str


def _key(job: str, what: str) -> bytes:
    return f"dlrover_hooks/{job}/{what}".encode()


def put_address(job: str, address: JobMaster) -> None:
    """Store the address of the job's master, so that clients find it."""
    internal_kv._internal_kv_put(_key(job, "master"), msgspec.json.encode(address), overwrite=True)


def get_address(job: str) -> JobMaster | None:
    """The address of the job's master; None: there is no such job, or it is over."""
    found = internal_kv._internal_kv_get(_key(job, "master"))
    return msgspec.json.decode(found, type=JobMaster) if found else None


def delete_address(job: str) -> None:
    """Delete the address of the job's master."""
    internal_kv._internal_kv_del(_key(job, "master"))


def put_result(job: str, submission: str, roles: Roles) -> None:
    """Store the result of a submission, and delete the address of its master. Only the newest 8 results are kept."""
    internal_kv._internal_kv_put(_key(job, f"result/{submission}"), msgspec.json.encode(roles), overwrite=True)
    found = internal_kv._internal_kv_get(_key(job, "results"))
    kept = [one for one in (msgspec.json.decode(found, type=list[str]) if found else []) if one != submission]
    for old in kept[: 1 - _RESULTS]:
        internal_kv._internal_kv_del(_key(job, f"result/{old}"))
    internal_kv._internal_kv_put(
        _key(job, "results"), msgspec.json.encode([*kept[1 - _RESULTS :], submission]), overwrite=True
    )
    address = get_address(job)
    if address is not None and address.submission == submission:
        delete_address(job)


def get_result(job: str, submission: str) -> Roles | None:
    """The result of this submission; None: it is not over, or there were 8 later ones."""
    found = internal_kv._internal_kv_get(_key(job, f"result/{submission}"))
    return msgspec.json.decode(found, type=Roles) if found else None


# ---- actors ----------------------------------------------------------------------------------------------------------


def actor_name(job: str, *parts: object) -> str:
    """The name of one of the job's actors."""
    return "/".join((job, *map(str, parts)))


def actor_names(prefix: str) -> list[str]:
    """Names that begin with `prefix`, of actors that run or are being started."""
    found: list[dict[str, str]] = ray.util.list_named_actors(all_namespaces=True)  # pyright: ignore[reportAssignmentType]
    return [one["name"] for one in found if one["namespace"] == NAMESPACE and one["name"].startswith(prefix)]


class RunningActor(msgspec.Struct, frozen=True):
    """A running actor. `resources`: its reservation by Ray's names, memory in bytes. `grouped`: the reservation is in a
    placement group, and Ray uses other resource names for it."""

    name: str
    resources: dict[str, float]
    grouped: bool


def running_actors() -> list[RunningActor]:
    """All running actors that have a name in the namespace `dlrover_hooks`."""
    rows: list[bytes] = state._connect_and_get_accessor().get_actor_table(None, "ALIVE")
    found = [ActorTableData.FromString(row) for row in rows]
    return [
        RunningActor(one.name, dict(one.required_resources), bool(one.placement_group_id))
        for one in found
        if one.name and one.ray_namespace == NAMESPACE
    ]


def actor(name: str) -> ActorHandle[Any]:
    """The actor with this name. Raises ValueError if there is none."""
    return ray.get_actor(name, namespace=NAMESPACE)


def actor_options(name: str, *, get_if_exists: bool = True, **more: Any) -> dict[str, Any]:
    """Options of a detached actor, which runs until it is killed.

    `get_if_exists`: an actor that exists is not created again. False: creating it raises ValueError if it exists.
    """
    return {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": get_if_exists, **more}


def end_of_actor(text: str) -> str:
    """The reason in Ray's error message about an ended actor, without its repetitions and advice."""
    if NODE_DIED in text:
        return "its Ray node was lost"
    text = " ".join(text.split())
    found = re.search(r"Worker exit detail: (.*?)(?: Some common causes|$)", text)
    return f"its actor died: {(found.group(1) if found else text)[-300:]}"


def kill(name: str) -> None:
    """Kill an actor, if there is one with this name, and do not let Ray restart it."""
    with contextlib.suppress(ValueError):
        ray.kill(actor(name), no_restart=True)


def kill_all(prefix: str, *, but: str = "") -> list[str]:
    """Kill all actors whose names begin with `prefix`, except `but`, and wait at most 15 s until they are gone.

    Returns the names of those that are not.
    """
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
    """The placement group; None: there is none."""
    try:
        return ray.util.get_placement_group(name)
    except ValueError:
        return None


def remove_groups(prefix: str) -> None:
    """Remove the placement groups whose names begin with `prefix`. Ray frees their resources in the background."""
    table: dict[str, dict[str, Any]] = placement_group_table()
    for one in table.values():
        if one["name"].startswith(prefix) and one["state"] != "REMOVED":
            # Not by name: it belongs to the namespace of the process that submitted the job.
            remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(one["placement_group_id"]))))


# ---- nodes -----------------------------------------------------------------------------------------------------------


class RayNode(msgspec.Struct, frozen=True):
    """A node that Ray considers alive. `address`: address of its raylet."""

    id: str
    address: tuple[str, int]


def nodes() -> dict[str, RayNode]:
    """The nodes that Ray considers alive, by id."""
    found = (one for one in ray.nodes() if one["Alive"])
    return {one["NodeID"]: RayNode(one["NodeID"], (one["NodeManagerAddress"], one["NodeManagerPort"])) for one in found}


def at_the_head() -> Any:
    """The scheduling strategy of a job's masters: on the head node, if Ray lists one."""
    head = next((one["NodeID"] for one in ray.nodes() if one["Alive"] and _HEAD in one["Resources"]), None)
    return NodeAffinitySchedulingStrategy(head, soft=False) if head is not None else "DEFAULT"


def node_of(group: PlacementGroup, bundle: int) -> RayNode | None:
    """The node of a bundle; None: it is not placed at the moment."""
    table: dict[str, Any] = placement_group_table(group)
    return nodes().get(table.get("bundles_to_node_id", {}).get(bundle, ""))


def answers(node: RayNode) -> bool:
    """Whether the raylet of a node accepts connections. That of a hanging node still does."""
    try:
        with socket.create_connection(node.address, timeout=_CONNECT_S):
            return True
    except OSError:
        return False


def runs_tasks(node: RayNode) -> bool:
    """Whether the raylet of a node runs a task within 3 s."""
    where = NodeAffinitySchedulingStrategy(node.id, soft=False)
    task = ray.remote(_nothing).options(num_cpus=0, max_retries=0, scheduling_strategy=where).remote()
    try:
        ray.get(task, timeout=_TASK_S)
    except RayError:
        ray.cancel(task, force=True)
        return False
    return True


def _nothing() -> None:
    pass


def node_with(resources: dict[str, float], but: tuple[str, ...]) -> str | None:
    """The id of a node that has these resources free and answers; None: there is none.

    `but`: nodes to exclude: ids, or their first 12 characters.
    """
    free: dict[str, dict[str, float]] = available_resources_per_node()
    for node in nodes().values():
        has = free.get(node.id, {})
        room = all(has.get(name, 0.0) >= amount for name, amount in resources.items() if name != "disk")
        if room and node.id not in but and node.id[:12] not in but and answers(node):
            return node.id
    return None
