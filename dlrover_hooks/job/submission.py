"""Submits a job to a backend."""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any

import msgspec

from dlrover_hooks import config as settings
from dlrover_hooks.errors import UsageError
from dlrover_hooks.job.job_handle import EXIT_CODES, JobHandle
from dlrover_hooks.job.plugins import JobPlugins, PluginFailure, select
from dlrover_hooks.job.spec import JobSpec
from dlrover_hooks.protocol import JobPhase, RolePlugin

_BACKENDS = {"local": "dlrover_hooks.job.local.local_job", "ray": "dlrover_hooks.integrations.ray"}


def submit(
    spec: JobSpec, job_name: str = "", *, backend: str = "local", wait: bool = True, **options: Any
) -> JobHandle | int:
    """Run a job.

    Args:
        spec: the job.
        job_name: replaces the name in `spec`.
        backend: "local" (processes on this machine) or "ray" (actors).
        wait: True: write to stderr that the job runs, wait for its end, write how it ended, and return the exit code
            (0 done, 1 failed, 130 stopped). Ctrl-C then stops the job, also while it is being started. False: return a
            `JobHandle` once the job has begun.
        options: options of the backend. Only "ray" has one: `address` of the cluster.

    Raises:
        JobSpecError: the job cannot run as described.
        UsageError: there is no such backend, or DLROVER_HOOKS_PLUGINS names a plug-in that is not installed.
        TypeError: the backend has no such option.
        MissingExtra: Ray is not installed.
        Conflict: a job of this name already runs.
        LaunchError: the job could not be started.
    """
    if backend not in _BACKENDS:
        raise UsageError(f"backend={backend!r}: there are {' and '.join(repr(one) for one in _BACKENDS)}")
    spec = (msgspec.structs.replace(spec, name=job_name) if job_name else spec).checked()
    failures = list[PluginFailure]()
    plugins = JobPlugins(spec.name, select(settings.plugins()), failures.append)
    spec = plugins.prepared(spec)
    used = tuple(_with_failures(one, failures) for one in plugins.listed())
    try:
        handle: JobHandle = importlib.import_module(_BACKENDS[backend]).submit(spec, plugins=used, **options)
    except KeyboardInterrupt:
        if not wait:
            raise
        _tell(f"job {spec.name}: stopped while it was being started")
        return EXIT_CODES[JobPhase.STOPPED]
    return _finished(handle, spec) if wait else handle


def _finished(handle: JobHandle, spec: JobSpec) -> int:
    """Wait for the end of a job; the exit code."""
    began = time.monotonic()
    roles = ", ".join(f"{one.workers} {one.name}" for one in spec.roles)
    try:
        _tell(f"job {handle.name} runs: {roles}. Its master is at {handle.url}. Ctrl-C stops it")
        code = handle.wait()
    except KeyboardInterrupt:
        _tell(f"job {handle.name}: stopping it")
        code = handle.stop("Ctrl-C")
    ended = handle.status()
    phase, why = ended.phase.value if ended.phase else "over", f": {ended.reason}" if code else ""
    _tell(f"job {handle.name} is {phase} after {time.monotonic() - began:.1f} s{why}")
    return code


def _tell(text: str) -> None:
    sys.stderr.write(f"[dlrover-hooks] {text}\n")


def _with_failures(plugin: RolePlugin, failures: list[PluginFailure]) -> RolePlugin:
    own = [one for one in failures if one.plugin == plugin.name]
    problem = f"{own[-1].function}: {own[-1].detail}" if own else ""
    return msgspec.structs.replace(plugin, failures=len(own), problem=problem)
