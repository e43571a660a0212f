"""Measures what a Ray cluster has for jobs, and what jobs have reserved of it.

`python -m dlrover_hooks.integrations.ray.cluster_view ADDRESS DESCRIPTOR` serves this to a process that does not import
Ray, because Ray ends a connected process when its cluster has been away for a minute. It answers each byte that it
reads from the socket with a line of JSON, and ends when the socket is closed.
"""

from __future__ import annotations

import logging
import math
import re
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import ray
from ray.util.placement_group import placement_group_table

from dlrover_hooks.integrations.ray import cluster_state
from dlrover_hooks.protocol.samples import ClusterAnswer, ClusterJob, ClusterSample

_GROUP = re.compile(r"([^/]+)/group/\d+")
"""The name of a placement group of a job."""
_NOT_COUNTED = re.compile(r"node:|accelerator_type:|bundle_group|.*_group_[0-9a-f]+$|memory$|object_store_memory$")


def cluster_view() -> ClusterSample:
    """The capacity for jobs of the cluster to which this process is connected, and what each job uses.

    The capacity is what the nodes have, without what others than jobs have reserved. Its kinds are "cpu", "gpu", and
    other accelerators by their names in Ray; memory is in MiB. A job uses what it has reserved. Jobs are recognized by
    the names `JOB/...` of their actors in the namespace `dlrover_hooks`, and of their placement groups. Any thread.
    Raises `RayError` if the cluster is away.
    """
    actors = [(one.name.partition("/")[0], one) for one in cluster_state.running_actors() if "/" in one.name]
    reserved = [(job, one.resources) for job, one in actors if not one.grouped]
    return view_of(ray.available_resources(), [*reserved, *_groups()], Counter(job for job, _ in actors))


def view_of(
    free: Mapping[str, float], reserved: list[tuple[str, Mapping[str, float]]], processes: Mapping[str, int]
) -> ClusterSample:
    """The sample for these figures.

    Args:
        free: resources that are not reserved, by Ray's names.
        reserved: (job, resources) of each reservation of a job.
        processes: number of processes of each job.
    """
    by_job = {job: Counter[str]() for job in processes}
    for job, resources in reserved:
        by_job.setdefault(job, Counter()).update(resources)  # pyright: ignore[reportArgumentType]
    used = sum(by_job.values(), Counter[str]())
    found = Counter(free)
    found.update(used)
    names = {"CPU": "cpu", "GPU": "gpu"}
    capacity = {names.get(one, one): math.floor(n + 1e-6) for one, n in found.items() if not _NOT_COUNTED.match(one)}
    return ClusterSample(
        "ray", "", {kind: count for kind, count in sorted(capacity.items()) if count > 0}, round(used["CPU"], 2),
        int(found["memory"]) >> 20, int(used["memory"]) >> 20,
        tuple(ClusterJob(job, processes.get(job, 0), round(one["CPU"], 2), int(one["memory"]) >> 20)
              for job, one in sorted(by_job.items())),
    )  # fmt: skip


def _groups() -> Iterator[tuple[str, Mapping[str, float]]]:
    """(Job, resources) of each bundle of its placement groups, also of those whose actors are not started yet."""
    table: dict[str, dict[str, Any]] = placement_group_table()
    for group in table.values():
        named = _GROUP.fullmatch(group["name"])
        if named is not None and group["state"] == "CREATED":
            for bundle in group["bundles"].values():
                yield named[1], bundle


def _serve(address: str, asked: socket.socket) -> None:
    problem = ""
    try:
        ray.init(address=address, namespace=cluster_state.NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    while asked.recv(1):
        answer = ClusterAnswer(problem=problem) if problem else ClusterAnswer(cluster_view())
        asked.sendall(msgspec.json.encode(answer) + b"\n")


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[2])) as told:
        _serve(sys.argv[1], told)
