"""What the launcher of a planned job tells the agents of its nodes, and its user."""

from __future__ import annotations

import getpass
import hashlib
import os
from collections.abc import Sequence

import msgspec

from dlrover_hooks.launcher.options import Bounds, LaunchOptions
from dlrover_hooks.protocol import ScalingMode

AGENT = "dlrover_hooks.launcher.nodes.agent_process"
"""The module that a node's process runs."""


def agent_options(options: LaunchOptions, endpoint: str, *, job: str, fresh: bool, preload: str) -> LaunchOptions:
    """Those of the agent of one node of a job that was started with `options`, under the master at `endpoint`."""
    assert options.scaling is not None
    limits = options.scaling.limits
    return msgspec.structs.replace(
        options, scaling=None, nodes=Bounds(limits.min_workers, limits.max_workers), endpoint=endpoint, token=None,
        journal=None, port=0, temporary=(), job=job, fresh=fresh, preload=preload,
    )  # fmt: skip


def lost_with_the_master(mode: ScalingMode, journal: str | None) -> str:
    """What of the plans and measurements is lost, and when: for the user, at the start."""
    if mode is ScalingMode.MANUAL:
        return "the number of nodes changes only by dlrover-hooks scale"
    if mode is ScalingMode.CLUSTER:
        return "what is measured is kept by the Brain; while it is away, the master plans by itself"
    if journal is None:
        return (
            "what is measured is kept while this launcher runs, and lost when it ends (--journal FILE keeps it for the "
            "next launch)"
        )
    return f"what is measured is kept in {journal}"


def user_name() -> str:
    """Of this process; empty if the system has none, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def script_hash(command: Sequence[str]) -> str:
    """SHA-256 of the first file of the command line after the interpreter; empty: there is none, as for a module."""
    path = next((word for word in command[1:] if os.path.isfile(word)), "")
    if not path:
        return ""
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()
