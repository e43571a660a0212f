"""How a bench tells what it found: a table with the bars, and JSON under build/bench."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).parents[2]
Figures = dict[str, float | None]
"""None: it never came to that."""


def report(
    name: str,
    title: str,
    conditions: Mapping[str, Any],
    found: Mapping[str, float | None],
    bars: Mapping[str, float],
    at_least: Mapping[str, float] | None = None,
) -> int:
    """Print and write the figures; 1 if one of them exceeds its bar, is below what it must be `at_least`, else 0."""
    rows, console = Table("figure", "measured", "bar", "", title=title), Console()
    missed = False
    for figure, value in found.items():
        text, met = _judged(value, bars.get(figure), (at_least or {}).get(figure))
        missed = missed or met is False
        verdict = "" if met is None else "[green]met[/]" if met else "[bold red]missed[/]"
        rows.add_row(figure, "never" if value is None else f"{value:.3g}", text, verdict)
    console.print(rows)
    out = REPOSITORY / "build" / "bench" / f"{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**conditions, **found}, indent=1) + "\n")
    console.print(out.relative_to(REPOSITORY))
    return int(missed)


def _judged(value: float | None, most: float | None, least: float | None) -> tuple[str, bool | None]:
    """The bar as a text, and whether it is met; None: there is none."""
    if most is not None:
        return f"<= {most:g}", value is not None and value <= most
    if least is not None:
        return f">= {least:g}", value is not None and value >= least
    return "", None
