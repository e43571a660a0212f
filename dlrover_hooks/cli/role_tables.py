"""The state of a job of several roles as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dlrover_hooks import protocol as p

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_RIGHT = ("rank", "life", "pid", "used", "limit", "failures", "seconds")
"""Columns of numbers."""
_BUDGETS = {
    "worker": "workers of {}",
    "role": "restarts of {}",
    "job": "restarts of the job",
    "preemption": "preemptions",
    "node": "workers on node {}",
}


def tables(job: str, roles: p.Roles, events: int) -> RenderableType:
    """The job with its workers, budgets, plug-ins that failed, and the newest `events`."""
    from rich.console import Group

    parts: list[RenderableType] = ["\n".join(_head(job, roles))]
    parts += [_workers(roles)] if roles.workers else []
    for table in (_budgets(roles), _plugins(roles), _events(roles, events)):
        parts += ["", table] if table.row_count else []
    return Group(*parts)


def headline(job: str, roles: p.Roles) -> str:
    """The phase of the job, and the reason for it."""
    phase = roles.phase.value if roles.phase is not None else "unknown"
    return f"job {job}: {phase}" + (f": {_printable(roles.reason)}" if roles.reason else "")


def _head(job: str, roles: p.Roles) -> Iterator[str]:
    yield headline(job, roles)
    if roles.avoid:
        yield f"too many workers failed on: {', '.join(roles.avoid)}"
    if roles.workers:
        yield ""


def _workers(roles: p.Roles) -> Table:
    table = _table("role", "rank", "life", "state", "node", "pid", "why it waits, or was started again")
    for one in roles.workers:
        pid = str(one.pid) if one.pid else ""
        note = f"waits: {_printable(one.waits)}" if one.waits else _printable(one.reason)
        table.add_row(one.role, str(one.rank), str(one.life), one.state.value, one.node, pid, note)
    return table


def _budgets(roles: p.Roles) -> Table:
    """Those with a limit, and those of which something is used."""
    table = _table("budget", "used", "limit")
    for one in roles.budgets:
        if one.used or one.limit != p.UNLIMITED:
            limit = "none" if one.limit == p.UNLIMITED else str(one.limit)
            table.add_row(_BUDGETS.get(one.kind, f"{one.kind} {{}}").format(one.of), str(one.used), limit)
    return table


def _plugins(roles: p.Roles) -> Table:
    table = _table("plug-in", "failures", "last failure")
    for one in roles.plugins:
        if one.failures:
            table.add_row(one.name, str(one.failures), _printable(one.problem))
    return table


def _events(roles: p.Roles, most: int) -> Table:
    """The newest ones, the newest last. Each has one line, which is cut off if the terminal is narrow."""
    from rich.text import Text

    table = _table("seconds", "event", "role", "rank", "life", "detail")
    for one in roles.events[len(roles.events) - most if most < len(roles.events) else 0 :]:
        worker = (str(one.rank), str(one.life)) if one.rank >= 0 else ("", "")
        text = ": ".join(filter(None, (_printable(one.text), _printable(one.detail))))
        detail = Text(text, no_wrap=True, overflow="ellipsis")
        table.add_row(f"{one.at:.1f}", one.kind, one.role, *worker, detail)
    return table


def _table(*columns: str) -> Table:
    """The last column is wrapped if the terminal is narrow, the others are not."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns, 1):
        justify = "right" if column in _RIGHT else "left"
        table.add_column(column, justify=justify, no_wrap=number < len(columns), overflow="fold")
    return table


def _printable(text: str) -> str:
    """The first line that is not empty, without control characters: it may be the output of any program."""
    line = next(filter(None, map(str.strip, text.splitlines())), "")
    return "".join(character for character in line if character.isprintable())
