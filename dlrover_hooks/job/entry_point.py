"""What a worker of a role runs: a function of a module, or a script with arguments."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from typing import Any

from dlrover_hooks.errors import UsageError

_FUNCTION = re.compile(r"[A-Za-z_][\w]*(\.[A-Za-z_]\w*)*[.:][A-Za-z_]\w*")


def is_script(entry: str) -> bool:
    """Whether `entry` has the form `script.py ARGUMENTS`."""
    words = _words(entry)
    return bool(words) and words[0].endswith(".py")


def _words(entry: str) -> list[str]:
    try:
        return shlex.split(entry)
    except ValueError:  # a quote that is not closed
        return []


def entry_problem(entry: str) -> str:
    """What is wrong with the form of `entry`; empty: nothing. Only a worker can check whether it exists."""
    if is_script(entry) or _FUNCTION.fullmatch(entry):
        return ""
    return f"{entry!r} is no entry point: write package.module:function, or 'script.py ARGUMENTS'"


def load(entry: str, role: str) -> Callable[[], Any]:
    """The function that a worker calls, without arguments. For a script it runs the script as `__main__`.

    Raises:
        UsageError: there is no such module, function or script, the module cannot be imported, or the function is a
            coroutine or a generator.
        Exception: what the module raises while it is imported, except for ImportError and SyntaxError.
    """
    if is_script(entry):
        return _script(entry, role)
    module, function = entry.split(":") if ":" in entry else entry.rsplit(".", 1)
    try:
        imported = importlib.import_module(module)
    except (ImportError, SyntaxError) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module}.".startswith(f"{missing}."):
            raise UsageError(f"role {role!r}: there is no module {missing!r} for {entry!r}", hint=_PATH) from None
        what = f"{type(error).__name__}: {error}"
        raise UsageError(f"role {role!r}: module {module!r} cannot be imported: {what}") from error
    if not hasattr(imported, function):
        raise UsageError(f"role {role!r}: module {module!r} has no function {function!r}")
    found = getattr(imported, function)
    if not callable(found):
        raise UsageError(f"role {role!r}: {entry!r} is a {type(found).__name__}, not a function")
    if inspect.iscoroutinefunction(found) or inspect.isgeneratorfunction(found) or inspect.isasyncgenfunction(found):
        raise UsageError(
            f"role {role!r}: a call of {entry!r} runs nothing, because it is a coroutine or a generator",
            hint="Give a function that runs it: def main(): asyncio.run(...)",
        )
    return found


_PATH = "The workers import it: install it there, or set PYTHONPATH with env(PYTHONPATH=...)."


def _script(entry: str, role: str) -> Callable[[], Any]:
    path, *arguments = shlex.split(entry)
    if not os.path.exists(path):
        raise UsageError(f"role {role!r}: there is no script {path!r} in {os.getcwd()}", hint="Give an absolute path.")

    def run() -> None:
        sys.argv = [path, *arguments]
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
        runpy.run_path(path, run_name="__main__")

    return run
