"""`dlrover-hooks check`: is this node, and are several nodes together, fit to train?"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click
import msgspec

from dlrover_hooks.cli.duration_type import Duration
from dlrover_hooks.errors import HooksError, UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from dlrover_hooks.node_check.participation import CheckPlan
    from dlrover_hooks.protocol import CheckReport, Measure, NodeReport

_USAGE, _FAILED = 78, 1


@click.command(short_help="Measure nodes, and find the bad and the slow ones.")
@click.option("--folder", "--save-to", default=tempfile.gettempdir, show_default="the temporary directory",
              help="Where the disk is measured: a local folder, such as that of the checkpoints.")  # fmt: skip
@click.option("--nnodes", type=click.IntRange(1, 1 << 20), help="Nodes that are checked together. Start the same "
              "command on each of them; needs --master.  [default: 1]")  # fmt: skip
@click.option("--master", envvar="DLROVER_HOOKS_MASTER", help="The master's address: it keeps the results.")
@click.option("--token", envvar="DLROVER_HOOKS_TOKEN", help="The master's bearer token.")
@click.option("--job", envvar="DLROVER_HOOKS_JOB", default="node-check", show_default=True,
              help="The job whose nodes these are. All nodes give the same.")  # fmt: skip
@click.option("--timeout", type=Duration(), default="30s", show_default=True,
              help="A measurement, or a transfer between two nodes, that takes longer has failed.")  # fmt: skip
@click.option("--wait", type=Duration(), default="10m", show_default=True,
              help="Wait so long for the other nodes, and for the master, then go on without them.")  # fmt: skip
@click.option("--local-addr", default="", metavar="HOST[:PORT]",
              help="How the other nodes reach this one, if not the way it finds.")  # fmt: skip
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True,
              help="Listen on this port for transfers; 0: a free one.")  # fmt: skip
@click.option("--json", is_flag=True, help="Print one JSON object instead of tables.")
def check(json: bool, **flags: Any) -> None:
    """Measure this node, or find the bad and the slow ones among several.

    Compute (each accelerator, or the CPU), memory, disk and the node's own network are measured; a node takes some
    seconds. With --nnodes the nodes then exchange data in pairs. A node whose transfers fail, or are slow, gets a
    fast node as its next peer, so that the bad and the slow node are told from those that only met it.

    \b
    This node:      dlrover-hooks check --save-to /mnt/checkpoints
    Two or more:    python -m dlrover_hooks.master --host node-a     (once; needs DLROVER_HOOKS_TOKEN)
                    dlrover-hooks check --master http://node-a:8780 --nnodes 4     (on each of the four)
    Before a run:   dlrover-hooks run --node-check ... train.py

    \b
    Verdicts: ok; slow: a speed is less than half of the median of all nodes, and an outlier; bad: a measurement
    failed, or no transfer succeeded while those of its peers did; unclear: transfers failed, and no third node shows
    which end is at fault.

    Exit codes: 0 this node is ok or slow, 76 it is bad, 1 unclear, nodes are missing, or the master is, 78 usage.
    """
    try:
        with _progress(quiet=json) as say:
            report, own = _checked(flags, say)
    except HooksError as error:
        click.echo(f"dlrover-hooks check: {error}", err=True)
        sys.exit(_USAGE if isinstance(error, UsageError) else _FAILED)
    if json:
        click.echo(msgspec.json.encode({"own": own, "check": report}))
    else:
        _draw(report, own)
    sys.exit(_exit_code(report, own))


def _checked(flags: dict[str, Any], say: Callable[[str], None]) -> tuple[CheckReport, NodeReport]:
    """The report, and that of this node. Raises UsageError, MasterAway, MasterError."""
    from dlrover_hooks import config as settings
    from dlrover_hooks.node_check.own_report import alone, own_of

    folder, master, node = flags["folder"], flags["master"], settings.place().node
    if not os.path.isdir(folder):
        raise UsageError(f"{folder} is not a folder of this machine", hint="give one to --folder")
    if flags["nnodes"] and master is None:
        raise UsageError(
            f"--nnodes {flags['nnodes']}: the nodes need a master to meet at",
            hint="start one (python -m dlrover_hooks.master) and give all nodes --master http://HOST:8780",
        )
    if master is not None and "://" not in master:
        raise UsageError(f"--master {master!r} is no URL", hint="give one such as http://127.0.0.1:8780")
    report = alone(node, _measured(flags, say)) if master is None else _with_others(flags, node, say)
    return report, own_of(report, node)


def _measured(flags: dict[str, Any], say: Callable[[str], None]) -> tuple[Measure, ...]:
    from dlrover_hooks.node_check.local_check import measure_node

    return measure_node(flags["folder"], flags["timeout"], begins=lambda one: say(f"{one.kind.value} on {one.what}"))


def _with_others(flags: dict[str, Any], node: str, say: Callable[[str], None]) -> CheckReport:
    from dlrover_hooks.client import MasterClient
    from dlrover_hooks.node_check.participation import ignore, take_part
    from dlrover_hooks.protocol import ListJobs

    client = MasterClient(flags["master"], flags["token"], incarnation=f"check-{uuid.uuid4().hex}")
    plan = _plan(flags, node, client.incarnation)
    try:
        client.call(ListJobs(), timeout_s=flags["wait"])  # what is wrong with address or token is said first
        measures = _measured(flags, say)
        say(f"waiting for {plan.most} nodes" if plan.most > 1 else "reporting to the master")
        return take_part(
            plan,
            measures,
            lambda request: client.call(request, timeout_s=flags["wait"]),
            lambda: client.watch(plan.job, ignore, ignore),
            begins=lambda task: say(f"round {task.round}: transfer with {task.peer.node if task.peer else ''}"),
        )
    except OSError as error:
        raise UsageError(
            f"port {plan.listen_port} of {plan.listen_host or 'this machine'} cannot be listened on: {error.strerror}",
            hint="give another --port, or leave it out",
        ) from error
    finally:
        client.close()


def _plan(flags: dict[str, Any], node: str, incarnation: str) -> CheckPlan:
    """Raises UsageError for an address that is none, or a master to which there is no route."""
    from dlrover_hooks.launcher.master_endpoint import endpoint, own_host
    from dlrover_hooks.node_check.participation import CheckPlan

    own = own_host(endpoint(flags["master"]))
    try:
        given = urlsplit(f"//{flags['local_addr']}")
        host, port = given.hostname, given.port or 0
    except ValueError as error:
        raise UsageError(
            f"--local-addr {flags['local_addr']!r} is no address: {error}", hint="give HOST, HOST:PORT or [V6]:PORT"
        ) from error
    count = flags["nnodes"] or 1
    return CheckPlan(
        job=flags["job"], incarnation=incarnation, node=node, host=host or own, port=port,
        listen_host="" if host else own, listen_port=flags["port"], least=count, most=count, gather_s=flags["wait"],
        transfer_s=flags["timeout"],
    )  # fmt: skip


def _exit_code(report: CheckReport, own: NodeReport) -> int:
    from dlrover_hooks.protocol import BAD_NODE, NodeVerdict

    if own.verdict is NodeVerdict.BAD:
        return BAD_NODE
    complete = len(report.nodes) + sum(report.unlisted.values()) >= report.wanted
    return 0 if complete and own.verdict is not NodeVerdict.UNCLEAR else _FAILED


# ---- what is printed -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Shows on stderr what is done now: in one line of a terminal, else in a line of its own. `quiet`: not at all."""
    from rich.console import Console

    console = Console(stderr=True, markup=False, highlight=False)
    if quiet:
        yield lambda text: None
    elif not console.is_terminal:
        yield lambda text: click.echo(f"[dlrover-hooks] {text}", err=True)
    else:
        with console.status("starting") as status:
            yield status.update


def _draw(report: CheckReport, own: NodeReport) -> None:
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    console.print(_measures(own))
    if report.number:
        console.print(_nodes(report))
        if rest := ", ".join(f"{count} {verdict}" for verdict, count in report.unlisted.items()):
            console.print(f"and others: {rest}")
    for line in _ends(report, own):
        click.echo(line)


def _measures(own: NodeReport) -> Table:
    from rich.table import Table

    from dlrover_hooks.protocol import speed_text

    table = Table("measurement", "where", "speed", "result", box=None, pad_edge=False)
    for one in own.measures:
        speed = speed_text(one.kind, one.speed) if one.speed is not None else ""
        where = one.what if one.model in ("", one.what) else f"{one.what} ({one.model})"
        table.add_row(one.kind.value, where, speed, f"failed: {one.failed}" if one.failed else "ok")
    return table


def _nodes(report: CheckReport) -> Table:
    from rich.table import Table

    from dlrover_hooks.protocol import speed_text

    table = Table("node", "verdict", "network", "round trip", "reason", box=None, pad_edge=False)
    for one in report.nodes:
        network = speed_text(None, one.network) if one.network is not None else ""
        trip = f"{1000 * one.round_trip_s:.3g} ms" if one.round_trip_s is not None else ""
        table.add_row(one.node, one.verdict.value, network, trip, one.reason)
    return table


def _ends(report: CheckReport, own: NodeReport) -> Iterator[str]:
    came = len(report.nodes) + sum(report.unlisted.values())
    if came < report.wanted:
        yield f"only {came} of {report.wanted} nodes came"
    yield f"node {own.node}: {own.verdict.value}" + (f": {own.reason}" if own.reason else "")
