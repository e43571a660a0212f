"""`make structure`: how the product is built, read from its sources, as figures in build/structure.json."""

from __future__ import annotations

import ast
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {
    "dlrover_hooks": "dlrover_hooks",
    "integrations": "dlrover_hooks.integrations",
    "master_server": "dlrover_hooks.master",
}
"""The top-level folders of the product, and the packages as which they are imported."""


def modules() -> dict[str, Path]:
    """The product's modules by dotted name; a package by its own name. rglob does not follow the two links."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *(parts[:-1] if parts[-1] == "__init__" else parts)])] = path
    return found


@cache
def parsed_tests() -> dict[str, ast.Module]:
    """The modules under tests/, by path. To parse them takes six seconds."""
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text())
        for path in sorted((ROOT / "tests").rglob("*.py"))
    }


def imports(tree: ast.Module, known: dict[str, Path]) -> set[str]:
    """Modules of `known` that are imported when this one is: neither in functions nor for type checkers only."""
    return {name for node in _at_import(tree) for name in _names(node, known)}


def _at_import(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _at_import(child)


def _names(node: ast.Import | ast.ImportFrom, known: dict[str, Path]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in known)
    elif node.module in known:
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            yield inner if inner in known else str(node.module)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other: the strongly connected components of more than one (Tarjan, 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in graph[name]:
            if other not in order:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == order[name]:
            at = stack.index(name)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for name in graph:
        if name not in order:
            visit(name)
    return sorted(found)


def measure() -> dict[str, Any]:
    """The figures."""
    known = modules()
    trees = {name: ast.parse(path.read_text()) for name, path in known.items()}
    classes: dict[str, list[str]] = defaultdict(list)
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(name)
    lines = {name: path.read_text().count("\n") for name, path in known.items()}
    packages: dict[str, int] = defaultdict(int)
    for name, path in known.items():
        packages[name if path.name == "__init__.py" else name.rpartition(".")[0]] += path.name != "__init__.py"
    found = circles({name: imports(tree, known) - {name} for name, tree in trees.items()})
    twice = {name: places for name, places in sorted(classes.items()) if len(places) > 1}
    return {
        "duplicate_class_names": len(twice),
        "import_circles": len(found),
        "largest_package_modules": max(packages.values()),
        "product_lines": sum(lines.values()),
        "median_module_lines": statistics.median(n for name, n in lines.items() if known[name].name != "__init__.py"),
        "modules_per_package": dict(sorted(packages.items())),
        "circles": found,
        "duplicates": twice,
    }


def main() -> None:
    """Print the figures, and write all of it to build/structure.json."""
    found = measure()
    target = ROOT / "build" / "structure.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(found, indent=2) + "\n")
    for name in ("duplicate_class_names", "import_circles", "largest_package_modules"):
        print(f"{name:26} {found[name]}")
    print(f"{'product_lines':26} {found['product_lines']}, median {found['median_module_lines']:g} per module")
    for name, places in found["duplicates"].items():
        print(f"  {name}: {', '.join(places)}")
    for circle in found["circles"]:
        print(f"  circle: {', '.join(circle)}")


if __name__ == "__main__":
    main()
