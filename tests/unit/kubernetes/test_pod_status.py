"""Why a node ended, by the status of its Pod; and names of objects."""

from __future__ import annotations

from typing import Any

import pytest

from dlrover_hooks.kubernetes.names import label_value, object_name
from dlrover_hooks.kubernetes.pod_status import PodEnd, deleted, pod_end, runs
from dlrover_hooks.protocol import NodeExit


def pod(phase: str, code: int | None = None, why: str = "Error", **status: Any) -> dict[str, Any]:
    ended = {"state": {"terminated": {"exitCode": code, "reason": why}}}
    return {"status": {"phase": phase, "containerStatuses": [] if code is None else [ended], **status}}


@pytest.mark.parametrize(
    ("found", "end"),
    [
        (pod("Succeeded", 0, "Completed"), PodEnd(NodeExit.SUCCEEDED, 0)),
        (pod("Failed", 1), PodEnd(NodeExit.ERROR, 1, "exit code 1")),
        (pod("Failed", 65), PodEnd(NodeExit.USER_ERROR, 65, "exit code 65")),
        (pod("Failed", 137), PodEnd(NodeExit.KILLED, -9, "exit code 137")),
        (pod("Failed", 143), PodEnd(NodeExit.KILLED, -15, "exit code 143")),
        (pod("Failed", 137, "OOMKilled"), PodEnd(NodeExit.OUT_OF_MEMORY, -9, "OOMKilled")),
        (pod("Failed", 128, "StartError"), PodEnd(NodeExit.ERROR, 128, "StartError")),
        (
            pod("Failed", 1, reason="Evicted", message="The node was low on resource: memory."),
            PodEnd(NodeExit.KILLED, 1, "Evicted: The node was low on resource: memory."),
        ),
        (pod("Failed", reason="NodeLost"), PodEnd(NodeExit.PREEMPTED, -9, "NodeLost")),
        (pod("Failed", 143, reason="NodeShutdown"), PodEnd(NodeExit.PREEMPTED, -15, "NodeShutdown")),
        (pod("Failed", 75), PodEnd(NodeExit.PREEMPTED, 75, "exit code 75")),
        (pod("Failed"), PodEnd(NodeExit.KILLED, -9, "its Pod failed")),
        (pod("Running"), None),
        (pod("Pending"), None),
        ({}, None),
    ],
)
def test_how_a_pod_ended(found: dict[str, Any], end: PodEnd | None) -> None:
    assert pod_end(found, user_errors={65}) == end


def test_a_pod_that_was_deleted_while_it_ran_was_preempted() -> None:
    assert deleted({"metadata": {"name": "a"}}) == PodEnd(NodeExit.PREEMPTED, -9, "its Pod a was deleted")


def test_only_a_running_pod_runs() -> None:
    assert [runs(pod(phase)) for phase in ("Pending", "Running", "Succeeded", "Failed", "Unknown")] == [
        False, True, False, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize("length", [1, 53, 54, 63, 64, 253, 300])
def test_names_fit_into_labels_and_host_names(length: int) -> None:
    name = object_name("j" * length, "worker-0")
    assert len(name) <= 63
    assert (name == "j" * length + "-worker-0") == (length + 9 <= 63)
    assert object_name("j" * length, "worker-0") != object_name("j" * length, "worker-1")
    assert len(label_value("j" * length)) <= 63


def test_what_cannot_be_a_name_becomes_one_that_nothing_else_becomes() -> None:
    names = [object_name(text, "worker-0") for text in ("My Job", "my.job", "my_job", "my-job", "é", "-", "")]
    assert len(set(names)) == len(names)
    assert names[3] == "my-job-worker-0"
    assert [label_value("My_Job.1"), label_value("-x") != "-x", label_value("") != ""] == ["My_Job.1", True, True]


def test_a_pod_that_a_signal_ended_while_it_was_being_deleted_was_preempted() -> None:
    being_deleted = {"metadata": {"deletionTimestamp": "now"}}
    assert pod_end(pod("Failed", 143) | being_deleted) == PodEnd(NodeExit.PREEMPTED, -15, "exit code 143")
    assert pod_end(pod("Failed", 1) | being_deleted) == PodEnd(NodeExit.ERROR, 1, "exit code 1")
