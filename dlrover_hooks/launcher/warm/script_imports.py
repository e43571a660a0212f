"""The well-known packages that a script imports, read from its source without running it.

For a script that has not listed its imports (`preimport_list.tell`): one without hooks, or one that has not made its
first step. The script's own modules are followed, wherever in a file they are imported.
"""

from __future__ import annotations

import ast
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from dlrover_hooks import config as settings
from dlrover_hooks.errors import UsageError
from dlrover_hooks.launcher.warm import worker_bootstrap
from dlrover_hooks.worker import preimport_list

_FILES = 500
"""Limit of the script's own modules to read."""
_WITH_TORCH = ("torch._dynamo", "torch.distributed", "torch.nn.parallel", "torch.utils.data")
"""torch imports them on first use, the first one with the first optimizer."""


def read(arguments: Sequence[str]) -> preimport_list.Imported:
    """The imports of `[-m] script args`; empty if the script does not import torch: little would be gained."""
    try:
        what = worker_bootstrap.program(arguments)
    except UsageError:
        return preimport_list.Imported({}, [])
    own = os.getcwd() if what.module else os.path.dirname(os.path.realpath(what.target))
    if os.path.isdir(what.target) and not what.module:
        own = os.path.realpath(what.target)
    names, environment = dict[str, None](), dict[str, str]()
    for node, folder in _statements(_entry(what, own), own):
        environment |= _variable(node, environment)
        for name, base in _imported(node, folder, own):
            package = name.partition(".")[0]
            if base == own and package in preimport_list.WELL_KNOWN and not _in(own, package):
                names[name] = None
    if "torch" not in {name.partition(".")[0] for name in names}:
        return preimport_list.Imported({}, [])
    packages = {name.partition(".")[0] for name in names}
    origins = {
        package: origin for package in sorted(packages) if (origin := preimport_list.origin(package)) is not None
    }
    return preimport_list.Imported(origins, [*names, *_WITH_TORCH], environment)


def _entry(what: worker_bootstrap.Program, own: str) -> str | None:
    if not what.module:
        main = os.path.join(own, "__main__.py")
        return main if os.path.isdir(what.target) else os.path.realpath(what.target)
    folder = os.path.join(own, *what.target.split("."))
    return os.path.join(folder, "__main__.py") if os.path.isdir(folder) else f"{folder}.py"


def _statements(entry: str | None, own: str) -> Iterator[tuple[ast.AST, str]]:
    """All statements of the script and of its own modules, each with the folder of its file."""
    waiting, seen = deque([entry]), set[str]()
    while waiting and len(seen) < _FILES:
        path = waiting.popleft()
        if path is None or path in seen:
            continue
        seen.add(path)
        folder = os.path.dirname(path)
        for node in ast.walk(_parsed(path)):
            yield node, folder
            waiting.extend(_in(base, name) for name, base in _imported(node, folder, own))


def _parsed(path: str) -> ast.AST:
    try:
        with open(path, "rb") as file:
            return ast.parse(file.read(), path)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def _imported(node: ast.AST, folder: str, own: str) -> Iterator[tuple[str, str]]:
    """Names that may be modules, each with the folder in which its search starts."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name, own
    elif isinstance(node, ast.ImportFrom):
        base = os.path.normpath(os.path.join(folder, *[".."] * (node.level - 1))) if node.level else own
        if node.module:
            yield node.module, base
        prefix = f"{node.module}." if node.module else ""
        for alias in node.names:
            yield prefix + alias.name, base


def _in(base: str, name: str) -> str | None:
    """The file of the script's own module `name`, if it has one."""
    stem = os.path.join(base, *name.split("."))
    return next((path for path in (f"{stem}.py", os.path.join(stem, "__init__.py")) if os.path.isfile(path)), None)


def _variable(node: ast.AST, known: Mapping[str, str]) -> dict[str, str]:
    """`os.environ["NAME"] = "text"`, or by `setdefault`: packages read such variables when they are imported."""
    match node:
        case ast.Assign(
            targets=[ast.Subscript(value=ast.Attribute(attr="environ"), slice=ast.Constant(value=str(name)))],
            value=ast.Constant(value=str(text)),
        ):
            return {name: text}
        case ast.Call(
            func=ast.Attribute(value=ast.Attribute(attr="environ"), attr="setdefault"),
            args=[ast.Constant(value=str(name)), ast.Constant(value=str(text))],
        ) if name not in known and name not in settings.environment():
            return {name: text}
    return {}
