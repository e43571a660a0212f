"""How a job is, by its Pods."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dlrover_hooks.kubernetes.elastic_job_spec import job_spec
from dlrover_hooks.master.operator.job_status import ElasticJobPhase, JobSituation, master_end, next_status

Manifest = dict[str, Any]


def ended(code: int, reason: str = "Error", message: str = "") -> Manifest:
    terminated = {"exitCode": code, "reason": reason, "message": message}
    return {"phase": "Failed" if code else "Succeeded", "containerStatuses": [{"state": {"terminated": terminated}}]}


def pod(status: Manifest, kind: str = "worker", **meta: Any) -> Manifest:
    return {"metadata": {"name": "p", "labels": {"replica-type": kind}, **meta}, "status": status}


RUNS, WAITS = {"phase": "Running"}, {"phase": "Pending"}


def situation(
    master: Manifest | None = None, *nodes: Manifest, status: Manifest | None = None, problem: str = "", **spec: Any
) -> JobSituation:
    meta = {"name": "mine", "namespace": "here", "uid": "u", "generation": 2}
    job = {"metadata": meta, "spec": {"replicaSpecs": {}, **spec}} | ({"status": status} if status else {})
    return JobSituation(job, job_spec(job), problem, master, nodes)


def phase(found: JobSituation) -> tuple[str, str]:
    """With the reason of the condition that holds."""
    status = next_status(found, "now")
    (reason,) = [one["reason"] for one in status["conditions"] if one["status"] == "True" and one["type"] != "Valid"]
    return status["phase"], reason


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (situation(), ("Pending", "MasterStarts")),
        (situation(pod(WAITS)), ("Pending", "MasterStarts")),
        (situation(pod(RUNS), pod(WAITS)), ("Pending", "NodesStart")),
        (situation(pod(RUNS), pod(RUNS)), ("Running", "NodesRun")),
        (situation(pod(RUNS), pod(ended(0))), ("Running", "NodesEnd")),
        (situation(pod(RUNS), pod(ended(1))), ("Pending", "NodesStart")),
        (situation(None, pod(RUNS)), ("Running", "NodesRun")),
        (situation(pod(ended(137)), pod(RUNS)), ("Running", "NodesRun")),
        (situation(pod(ended(70))), ("Pending", "MasterLost")),
        (situation(pod(ended(0))), ("Succeeded", "MasterEnded")),
        (situation(pod(ended(1)), pod(RUNS)), ("Failed", "MasterEnded")),
        (situation(pod(RUNS), pod(RUNS), suspend=True), ("Suspended", "Suspended")),
        (situation(None, problem="no template"), ("Pending", "Refused")),
        (situation(pod(RUNS), pod(RUNS), problem="too many"), ("Running", "NodesRun")),
    ],
)
def test_the_phase_of_a_job(found: JobSituation, expected: tuple[str, str]) -> None:
    assert phase(found) == expected


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (RUNS, None), (ended(0), ElasticJobPhase.SUCCEEDED), (ended(1), ElasticJobPhase.FAILED),
        (ended(77), ElasticJobPhase.FAILED),
        (ended(70), "lost"), (ended(137), "lost"), (ended(143), "lost"), (ended(137, "OOMKilled"), "lost"),
        ({"phase": "Failed", "reason": "Evicted"}, "lost"),
    ],
)  # fmt: skip
def test_the_end_of_a_master_is_that_of_the_job_only_with_an_exit_code_of_the_job(
    status: Manifest, expected: ElasticJobPhase | str | None
) -> None:
    end = master_end(pod(status))
    assert (end and (end.phase or "lost")) == expected


def test_a_failed_job_says_why() -> None:
    status = next_status(situation(pod(ended(1, message="worker-0: no such column\n"))), "now")
    (failed,) = [one for one in status["conditions"] if one["type"] == "Failed"]
    assert failed["message"] == "worker-0: no such column"
    assert status["completionTime"] == "now"


def test_a_job_that_is_over_stays_so() -> None:
    before = next_status(situation(pod(ended(0))), "then")
    after = next_status(situation(None, status=before), "now")
    assert (after["phase"], after["completionTime"]) == ("Succeeded", "then")
    assert after["conditions"] == before["conditions"]


def test_the_workers_that_there_are_are_counted() -> None:
    gone = pod(RUNS, deletionTimestamp="now")
    nodes = (pod(RUNS), pod(WAITS), pod(ended(0)), pod(ended(1)), gone, pod(RUNS, "ps"))
    status = next_status(situation(pod(RUNS), *nodes), "now")
    assert status["replicas"] == 2
    assert status["replicaStatuses"] == {
        "ps": {"active": 1, "failed": 0, "succeeded": 0}, "worker": {"active": 3, "failed": 1, "succeeded": 1},
    }  # fmt: skip
    after = next_status(situation(pod(RUNS), status=status), "later")
    assert after["replicaStatuses"] == {kind: {"active": 0, "failed": 0, "succeeded": 0} for kind in ("ps", "worker")}
    assert status["selector"] == "elasticjob-name=mine,replica-type=worker"
    assert status["observedGeneration"] == 2


def test_conditions_keep_the_time_of_their_last_change() -> None:
    first = next_status(situation(pod(RUNS), pod(RUNS)), "1")
    same = next_status(situation(pod(RUNS), pod(RUNS), status=first), "2")
    assert same == first
    lost = next_status(situation(pod(RUNS), pod(WAITS), status=same), "3")
    found = {one["type"]: (one["status"], one["lastTransitionTime"]) for one in lost["conditions"]}
    assert found == {"Valid": ("True", "1"), "Running": ("False", "3"), "Pending": ("True", "3")}


def test_a_spec_that_cannot_be_carried_out_is_said_until_it_is_mended() -> None:
    first = next_status(situation(problem="too many"), "1")
    (valid,) = [one for one in first["conditions"] if one["type"] == "Valid"]
    assert (valid["status"], valid["reason"], valid["message"]) == ("False", "Refused", "too many")
    second = next_status(situation(status=first), "2")
    (valid,) = [one for one in second["conditions"] if one["type"] == "Valid"]
    assert (valid["status"], valid["lastTransitionTime"]) == ("True", "2")


def test_a_master_that_the_cluster_refuses_is_said() -> None:
    found = msgspec.structs.replace(situation(), refusal="exceeded quota")
    assert phase(found) == ("Pending", "MasterRefused")


def test_without_a_readable_spec_there_is_a_status_too() -> None:
    found = msgspec.structs.replace(situation(problem="no spec"), spec=None)
    assert phase(found) == ("Pending", "Refused")
