"""`make requirements`: which rows the tests have proven, system by system (build/requirements.json)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests import requirements

TARGET = requirements.TESTS.parent / "build" / "requirements.json"


def summary(rows: dict[str, dict[str, str]], results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What is proven of all rows and of each system's, and the IDs that no passing test proves."""
    done = requirements.proven(results)
    systems: dict[str, dict[str, int]] = {}
    for name, row in rows.items():
        system = systems.setdefault(row["system"], {"proven": 0, "total": 0})
        system["total"] += 1
        system["proven"] += name in done
    return {
        "proven": sum(system["proven"] for system in systems.values()),
        "total": len(rows),
        "by_system": systems,
        "open": [name for name in rows if name not in done],
    }


def main(file: Path) -> None:
    """Print the table of what `pytest --requirements FILE` has written, and write build/requirements.json."""
    rows = requirements.read()
    found = summary(rows, json.loads(file.read_text()))
    print(f"{'system':16} {'rows':>5} {'proven':>7}  without a passing test")
    for system, count in found["by_system"].items():
        left = [name for name in found["open"] if rows[name]["system"] == system]
        print(f"{system:16} {count['total']:5} {count['proven']:7}  {' '.join(left) or '-'}")
    print(f"{'all':16} {found['total']:5} {found['proven']:7}")
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
