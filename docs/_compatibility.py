"""The tables of compatibility.md, made from tests/compat.toml and pyproject.toml.

`tables` returns them by the name under which `compatibility.md` includes them.
"""

from __future__ import annotations

from tests import compatibility

SHOWN = {
    "python": "Python", "torch": "torch", "lightning": "Lightning, and Fabric in it", "accelerate": "Accelerate",
    "transformers": "Transformers", "trl": "TRL", "peft": "PEFT", "keras": "Keras", "jax": "Keras on JAX: JAX",
    "tensorflow-cpu": "TensorFlow (`tensorflow-cpu`)", "tf-keras": "tf-keras", "ray": "Ray",
}  # fmt: skip
"""What each distribution of compat.toml is called on the page."""


def tables() -> dict[str, str]:
    """Every table of the page, in Markdown."""
    return {"versions_table": versions_table(), "environments_table": environments_table()}


def versions_table() -> str:
    """One row for each framework: oldest and newest version proven, what pip accepts, and what is not proven."""
    bounds, unproven = compatibility.bounds(), compatibility.unproven()
    rows = []
    for name in compatibility.names():
        found = compatibility.proven(name)
        bound = bounds.get(compatibility.ASKED_AS.get(name, name))
        accepted = f"`>={bound}`" if bound else "any: no extra asks for it"
        rows.append((SHOWN[name], str(min(found)), str(max(found)), accepted, unproven.get(name, "")))
    return _table(("", "oldest proven", "newest proven", "accepted", "accepted and not proven"), rows)


def environments_table() -> str:
    """One row for each environment: what is in it, and when its tests ran last."""
    rows = [
        (f"`{name}`", one.holds, f"`{one.command}`", one.on.isoformat())
        for name, one in compatibility.environments().items()
    ]
    return _table(("environment", "holds", "command", "last run"), rows)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ("---",) * len(head), *rows))
