"""What a worker of a role runs: a function of a module, or a script with arguments."""

from __future__ import annotations

import importlib
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
    """It is `script.py ARGUMENTS`."""
    return entry.split(maxsplit=1)[0].endswith(".py") if entry.strip() else False


def entry_problem(entry: str) -> str:
    """What is wrong with the form of `entry`; empty: nothing. Whether it exists is known where it is to run."""
    if is_script(entry) or _FUNCTION.fullmatch(entry):
        return ""
    return f"{entry!r} is no entry point: write package.module:function, or 'script.py ARGUMENTS'"


def load(entry: str, role: str) -> Callable[[], Any]:
    """What a worker calls, without arguments. A script runs as `__main__`.

    Raises:
        UsageError: there is no such module, function or script.
    """
    if is_script(entry):
        return _script(entry, role)
    module, function = entry.split(":") if ":" in entry else entry.rsplit(".", 1)
    try:
        found = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(error.name + ".")):
            raise  # the module is there, and imports another one that is not
        raise UsageError(f"role {role!r}: there is no module {error.name!r} for {entry!r}", hint=_PATH) from None
    except AttributeError:
        raise UsageError(f"role {role!r}: module {module!r} has no function {function!r}") from None
    if not callable(found):
        raise UsageError(f"role {role!r}: {entry!r} is a {type(found).__name__}, not a function")
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
