"""The part of a report that concerns this node."""

from __future__ import annotations

from dlrover_hooks.protocol import CheckReport, Measure, NodeReport, NodeVerdict, speed_text


def alone(node: str, measures: tuple[Measure, ...]) -> CheckReport:
    """The report of a node that is checked without a master: it is bad if a measurement failed."""
    failed = "; ".join(f"{one.kind.value} on {one.what}: {one.failed}" for one in measures if one.failed)
    verdict = NodeVerdict.BAD if failed else NodeVerdict.OK
    return CheckReport(wanted=1, nodes=(NodeReport(node, verdict, failed, measures),))


def told(measure: Measure) -> str:
    """The result of a measurement in a few words."""
    result = measure.failed or (speed_text(measure.kind, measure.speed) if measure.speed is not None else "none")
    return f"{measure.kind.value} on {measure.what}: {result}"


def own_of(report: CheckReport, node: str) -> NodeReport:
    """The node's own part: a report to a node always has it."""
    return next(one for one in report.nodes if one.node == node)
