"""The launcher's thread that reports its node."""

from __future__ import annotations

import logging
import os

import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.master.core import node_vitals
from dlrover_hooks.testing import MasterFake
from dlrover_hooks.vitals import node_reports
from dlrover_hooks.vitals.node_reports import NodeReports
from tests.e2e.job_script import join
from tests.waiting import until


@pytest.fixture
def master(monkeypatch: pytest.MonkeyPatch) -> MasterFake:
    """It asks for the next report at once."""
    monkeypatch.setattr(node_vitals, "EVERY_S", 0.0)
    monkeypatch.setattr(node_reports, "FIRST_S", 0.01)
    monkeypatch.setattr(node_reports, "_SHORTEST_S", 0.01)
    return MasterFake()


def test_reports_at_the_masters_interval(master: MasterFake, tmp_path: os.PathLike[str]) -> None:
    master.call(join())
    reports = NodeReports(master, "job", "agent", "node-agent", str(tmp_path))
    reports.follow({"w0": os.getpid()})
    reports.start()
    seen: list[p.NodeVitals] = []

    def several() -> bool:
        kept = master.nodes.reports["job"]["node-agent"].report
        if not seen or kept is not seen[-1]:
            seen.append(kept)
        return len(seen) > 3 and kept.disk is not None

    until(several, "several reports, with the file system")
    reports.stop()
    last = seen[-1]
    assert [one.incarnation for one in last.workers] == ["w0"]
    assert last.workers[0].memory_bytes > 1 << 20
    assert last.disk is not None
    assert last.disk.path == str(tmp_path)
    assert not reports._thread.alive


def test_a_refusal_is_nobodys_business(
    master: MasterFake, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first round the master does not know the job; from then on it is told."""
    monkeypatch.setattr(node_reports, "EVERY_S", 0.01)
    asked: list[p.Message] = []
    real = master.call
    monkeypatch.setattr(master, "call", lambda request, **more: asked.append(request) or real(request, **more))
    reports = NodeReports(master, "job", "agent", "node-agent", os.getcwd())
    with caplog.at_level(logging.INFO):
        reports.start()
        until(lambda: len(asked) > 2, "several refused reports")
        assert master.nodes.reports == {}
        real(join())
        until(lambda: master.nodes.reports["job"], "a report")
        reports.stop()
    assert caplog.records == []
