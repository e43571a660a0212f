"""`dlrover-hooks vitals`: shows what the nodes and ranks of a job use."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from dlrover_hooks.cli.job_master import asking, job_master
from dlrover_hooks.errors import HooksError, UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from dlrover_hooks.protocol import AcceleratorVitals, JobVitals, NodeUse, RankUse, StepPhases

_USAGE, _FAILED = 78, 1
_PATIENCE_S = 30.0
_EVERY_S = 2.0
_SILENT_S = 20.0
"""A report this old is marked: three were missed."""

_COMPUTE = ("compute",)
_SPLIT = ("forward", "backward")
"""In the place of `_COMPUTE` where the end of the forward pass is known of every rank."""


@click.command(short_help="Show what nodes and ranks use.")
@click.argument("job", required=False)
@click.option("--master", envvar="DLROVER_HOOKS_MASTER",
              help="The master's address, for a job that was not started on this machine.")  # fmt: skip
@click.option("--token", envvar="DLROVER_HOOKS_TOKEN", help="The master's bearer token.")
@click.option("--json", is_flag=True, help="Print the master's answer, a line of JSON.")
@click.option("--watch", is_flag=True, help=f"Show it every {_EVERY_S:g} seconds until Ctrl-C.")
def vitals(job: str | None, master: str | None, token: str | None, json: bool, watch: bool) -> None:
    """Show what the nodes, ranks and tasks of JOB use: CPU, memory and limits, accelerator, and ranks that stall.

    JOB may be left out if it is the only one on this machine.

    Exit codes: 0 done, 1 the master refused or did not answer, 78 wrong address or options, 130 ended with Ctrl-C.
    """
    from dlrover_hooks.protocol import ShowVitals

    try:
        asked = job_master(job, master, token)
        request = ShowVitals(asked.job)
        with asking("vitals", asked.master, asked.token) as client:
            _show(lambda: client.call(request, timeout_s=_PATIENCE_S), as_json=json, watch=watch)
    except HooksError as error:
        click.echo(f"dlrover-hooks vitals: {error}", err=True)
        sys.exit(_USAGE if isinstance(error, UsageError) else _FAILED)


def _show(ask: Callable[[], JobVitals], *, as_json: bool, watch: bool) -> None:
    import msgspec
    from rich.console import Console
    from rich.live import Live

    if as_json:
        click.echo(msgspec.json.encode(ask()))
        while watch:
            time.sleep(_EVERY_S)  # Ctrl-C within the wait of an Event can leave its lock in a wrong state
            click.echo(msgspec.json.encode(ask()))
    elif watch:
        with Live(_tables(ask()), auto_refresh=False) as live:
            while True:
                time.sleep(_EVERY_S)
                live.update(_tables(ask()), refresh=True)
    else:
        Console().print(_tables(ask()))


def _tables(found: JobVitals) -> RenderableType:
    from rich.console import Group

    if not found.nodes and not found.ranks and not found.tasks:
        return f"job {found.job}: no node and no rank of it runs (if it has several roles, use dlrover-hooks roles)"
    parts = (found.nodes, _nodes), (found.ranks, _ranks), (found.tasks, _tasks)
    return Group(*(table(found) for uses, table in parts if uses))


def _nodes(found: JobVitals) -> Table:
    table = _table(f"job {found.job}", "node", "CPU", "load", "memory", "limit", "disk free", "in/s", "out/s", "")
    for use in found.nodes:
        memory, disk = use.memory, use.disk
        table.add_row(
            use.node,
            f"{use.cpu.busy_cores:.1f}/{use.cpu.cores}",
            f"{use.cpu.load[0]:.1f}",
            _part(memory.used_bytes, memory.total_bytes),
            _part(memory.limit_used_bytes, memory.limit_bytes),
            _size(disk.free_bytes) if disk is not None else "no answer",
            _size(use.network.received_bytes_per_s),
            _size(use.network.sent_bytes_per_s),
            _node_note(use),
        )
    return table


def _ranks(found: JobVitals) -> Table:
    table = _table("", "rank", "node", "step", "CPU", "memory", "processes")
    devices = {use.rank: use.vitals.accelerator for use in found.ranks if use.vitals and use.vitals.accelerator}
    if devices:
        for column in ("GPU", "its memory", "°C", "W"):
            table.add_column(column, justify="right")
    known = [use.phases for use in found.ranks if use.phases]
    compute = _SPLIT if all(phases.forward_s is not None for phases in known) else _COMPUTE
    for column in ("step ms", "data", *compute, "network", "optimizer", "checkpoint") if known else ():
        table.add_column(column, justify="right")
    table.add_column()
    for use in found.ranks:
        figures = use.processes or use.vitals
        cells = [str(use.rank), use.node, str(use.step), "", "", ""]
        if figures is not None:
            cells[3:5] = f"{figures.cpu_percent:.0f} %", _size(figures.memory_bytes)
        if use.processes is not None:
            cells[5] = str(use.processes.processes)
        if devices:
            cells += _device_cells(devices.get(use.rank))
        if known:
            cells += _phase_cells(use.phases, compute)
        table.add_row(*cells, _rank_note(use, devices.get(use.rank)))
    return table


def _tasks(found: JobVitals) -> Table:
    table = _table("", "task", "node", "state", "CPU", "its limit", "memory", "its limit", "processes")
    for use in found.tasks:
        tree, limit = use.processes, use.resource
        table.add_row(
            f"{use.type.value} {use.index}",
            use.node,
            use.status.value,
            f"{tree.cpu_percent:.0f} %" if tree is not None else "",
            f"{100 * limit.cpu:.0f} %" if limit.cpu else "",
            _size(tree.memory_bytes) if tree is not None else "",
            _size(limit.memory << 20) if limit.memory else "",
            str(tree.processes) if tree is not None else "",
        )
    return table


def _phase_cells(phases: StepPhases | None, compute: tuple[str, ...]) -> list[str]:
    """Milliseconds per step. "-": the network is not known, and what is in `compute` may hold waiting."""
    if phases is None:
        return [""] * (5 + len(compute))
    parts = (phases.forward_s, phases.backward_s) if compute == _SPLIT else (phases.compute_s,)
    seconds = phases.total_s, phases.data_s, *parts, phases.network_s, phases.optimizer_s, phases.checkpoint_s
    return [f"{1000 * one:.3g}" if one is not None else "-" for one in seconds]


def _device_cells(device: AcceleratorVitals | None) -> list[str]:
    if device is None:
        return ["", "", "", ""]
    numbers = [(device.use_percent, " %"), (device.temperature_c, ""), (device.power_w, "")]
    use, temperature, power = (f"{value:.0f}{unit}" if value is not None else "" for value, unit in numbers)
    return [use, _part(device.memory_used_bytes, device.memory_total_bytes), temperature, power]


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 or column in ("node", "") else "right")
    return table


def _node_note(use: NodeUse) -> str:
    cpu, kills = use.cpu, use.memory.oom_kills or 0
    notes = [
        f"silent for {use.age_s:.0f} s" if use.age_s > _SILENT_S else "",
        f"CPU limit {cpu.limit_cores:g}" if cpu.limit_cores is not None else "",
        f"throttled in {cpu.throttled_percent:.0f} % of periods" if cpu.throttled_percent else "",
        f"{kills} OOM kills" if kills else "",
    ]
    return ", ".join(filter(None, notes))


def _rank_note(use: RankUse, device: AcceleratorVitals | None) -> str:
    notes = [f"no step for {use.stall.seconds:.0f} s: {use.stall.where}"] if use.stall is not None else []
    if (slow := use.straggler) is not None:
        notes.append(f"slow: {slow.phase.value} {slow.seconds:.3g} s per step, median {slow.median_s:.3g} s")
    if (phases := use.phases) is not None and phases.rebalanced:
        notes.append(f"{phases.micro_batches} of {phases.total_micro_batches} micro-batches")
    if device is not None:
        notes += [f"throttled: {', '.join(device.throttled_by)}"] if device.throttled_by else []
        notes += [f"{device.ecc_errors} ECC errors"] if device.ecc_errors else []
        notes += [f"Xid {device.xid}"] if device.xid is not None else []
    return ", ".join(notes)


def _part(used: int | None, total: int | None) -> str:
    """Such as "3.0/25 GB"; empty if one of them is not known."""
    if used is None or total is None:
        return ""
    (number, unit), of = _size(used).split(), _size(total)
    return f"{number}/{of}" if of.endswith(f" {unit}") else f"{number} {unit}/{of}"


def _size(nbytes: float) -> str:
    from dlrover_hooks.checkpoint.storage.free_space import size

    return size(int(nbytes))
