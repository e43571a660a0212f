"""Processes below another one, found by their command lines."""

from __future__ import annotations

import contextlib

import psutil


def descendants(pid: int, *words: str, children_only: bool = False) -> list[psutil.Process]:
    """Those below `pid` that have each of `words` as a part of an argument. `children_only`: not their children.

    A process that ends meanwhile, or has ended and is not reaped, has no command line and is not among them.
    """
    found: list[psutil.Process] = []
    for one in psutil.Process(pid).children(recursive=not children_only):
        with contextlib.suppress(psutil.Error):
            command = one.cmdline()
            if all(any(word in part for part in command) for word in words):
                found.append(one)
    return found
