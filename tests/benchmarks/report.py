"""How a bench tells what it found: a table with the bars, and JSON under build/bench."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).parents[2]


def report(
    name: str, title: str, conditions: Mapping[str, Any], found: Mapping[str, float], bars: Mapping[str, float]
) -> int:
    """Print and write the figures; 1 if one of them exceeds its bar, else 0."""
    rows, console = Table("figure", "measured", "at most", "", title=title), Console()
    for figure, value in found.items():
        bar = bars.get(figure)
        verdict = "" if bar is None else "[green]met[/]" if value <= bar else "[bold red]missed[/]"
        rows.add_row(figure, f"{value:.3g}", "" if bar is None else f"{bar:g}", verdict)
    console.print(rows)
    out = REPOSITORY / "build" / "bench" / f"{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**conditions, **found}, indent=1) + "\n")
    console.print(out.relative_to(REPOSITORY))
    return int(any(found[figure] > bar for figure, bar in bars.items() if figure in found))
