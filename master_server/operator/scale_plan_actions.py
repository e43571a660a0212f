"""What is done about the difference between a `ScalePlan` and the Pods of its job. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from dlrover_hooks.kubernetes.api_server import Manifest
from dlrover_hooks.kubernetes.custom_resources import LeavingPod, PodMeta, ScalePlanSpec, ScalePlanStatus, TriedPod
from dlrover_hooks.kubernetes.node_departures import NodeDeparture, seconds_left
from dlrover_hooks.kubernetes.node_pods import launch_of, pod_name
from dlrover_hooks.kubernetes.pod_status import pod_end


class CreatePod(msgspec.Struct, frozen=True):
    """Create the Pod of this entry, under this name."""

    entry: PodMeta
    name: str


class DeletePod(msgspec.Struct, frozen=True):
    """Delete this Pod. `grace_s`: between SIGTERM and SIGKILL; None: as the Pod says."""

    pod: Manifest
    grace_s: int | None


def pod_actions(
    spec: ScalePlanSpec, status: ScalePlanStatus, pods: Iterable[Manifest]
) -> tuple[list[CreatePod], list[DeletePod]]:
    """What is to be done now; nothing: the Pods are as planned.

    A Pod that has ended by itself is left for its log, until another one of its name is created. A Pod whose deletion
    has begun is deleted again only if it is to have less time than it was given.

    Args:
        spec: `create_pods` are all that are to be.
        status: its `tried_pods` are not created again in the same attempt, even if they are gone.
        pods: all Pods of the job's nodes.
    """
    present = {pod["metadata"]["name"]: pod for pod in pods}
    tried = _attempts(status)
    create, delete = list[CreatePod](), list[DeletePod]()
    wanted = set[tuple[str, str]]()
    for entry in spec.create_pods:
        name = _name_in(spec, entry)
        wanted.add((name, entry.launch))
        found = present.get(name)
        if found is None and entry.attempt > tried.get(entry.launch, 0):
            create.append(CreatePod(entry, name))
        elif found is not None and launch_of(found) != entry.launch and pod_end(found) is not None:
            delete.append(DeletePod(found, None))  # then there is room for this one
    graces = {(_name_in(spec, entry), entry.launch): entry.grace_seconds for entry in spec.remove_pods}
    for name, pod in present.items():
        key = name, launch_of(pod)
        if key in wanted or pod_end(pod) is not None:
            continue
        if "deletionTimestamp" not in pod["metadata"] or _sooner(graces.get(key), pod):
            delete.append(DeletePod(pod, graces.get(key)))
    return create, delete


def next_status(
    spec: ScalePlanSpec, status: ScalePlanStatus, generation: int, tried: Iterable[TriedPod], now: str, *, over: bool,
    leaving: Iterable[LeavingPod] = (),
) -> ScalePlanStatus:  # fmt: skip
    """The status after these Pods were tried, too.

    Args:
        generation: of the plan.
        now: RFC 3339.
        over: there was nothing to do: the Pods are as planned.
        leaving: Pods on machines that will go.
    """
    wanted = {one.launch for one in spec.create_pods}
    known = {one.launch: one for one in (*status.tried_pods, *tried)}
    again = status.observed_generation != generation
    begun = now if again or not status.create_time else status.create_time
    ended = status.finish_time if not again and status.finish_time else now
    return ScalePlanStatus(
        phase="Succeeded" if over else "Scaling",
        create_time=begun,
        finish_time=ended if over else None,
        tried_pods=[one for launch, one in known.items() if launch in wanted],
        leaving_pods=list(leaving),
        observed_generation=generation,
    )


def leaving_pods(pods: Iterable[Manifest], departures: Mapping[str, NodeDeparture]) -> list[LeavingPod]:
    """Those that live on a machine that will go. `departures`: by the name of the machine."""
    found = list[LeavingPod]()
    for pod in sorted(pods, key=lambda one: one["metadata"]["name"]):
        departure = departures.get(pod["spec"].get("nodeName", ""))
        if departure is None or pod_end(pod) is not None or "deletionTimestamp" in pod["metadata"]:
            continue
        if (seconds := seconds_left(pod, departure)) is not None:
            found.append(LeavingPod(pod["metadata"]["name"], launch_of(pod), departure.reason, seconds))
    return found


def unreported(spec: ScalePlanSpec, status: ScalePlanStatus, tried: Iterable[TriedPod]) -> list[TriedPod]:
    """Those of `tried` that are still wanted, and that the status does not have."""
    wanted, known = {one.launch for one in spec.create_pods}, _attempts(status)
    return [one for one in tried if one.launch in wanted and one.attempt > known.get(one.launch, 0)]


def _attempts(status: ScalePlanStatus) -> dict[str, int]:
    """The newest attempt by launch."""
    found = dict[str, int]()
    for one in status.tried_pods:
        found[one.launch] = max(one.attempt, found.get(one.launch, 0))
    return found


def _name_in(spec: ScalePlanSpec, entry: PodMeta) -> str:
    return pod_name(spec.owner_job, entry.name)


def _sooner(grace_s: int | None, pod: Manifest) -> bool:
    given = pod["metadata"].get("deletionGracePeriodSeconds")
    return grace_s is not None and given is not None and grace_s < given
