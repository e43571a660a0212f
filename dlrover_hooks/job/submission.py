"""Submits a job to a backend."""

from __future__ import annotations

import importlib
from typing import Any

import msgspec

from dlrover_hooks import config as settings
from dlrover_hooks.errors import UsageError
from dlrover_hooks.job.job_handle import JobHandle
from dlrover_hooks.job.plugins import JobPlugins, PluginFailure, select
from dlrover_hooks.job.spec import JobSpec
from dlrover_hooks.protocol import RolePlugin

_BACKENDS = {"local": "dlrover_hooks.job.local.local_job", "ray": "dlrover_hooks.integrations.ray"}


def submit(
    spec: JobSpec, job_name: str = "", *, backend: str = "local", wait: bool = True, **options: Any
) -> JobHandle | int:
    """Run a job.

    Args:
        spec: the job.
        job_name: replaces the name in `spec`.
        backend: "local" (processes on this machine) or "ray" (actors).
        wait: True: wait for the end and return the exit code (0 done, 1 failed, 130 stopped). Ctrl-C then stops the
            job, and KeyboardInterrupt is raised. False: return a `JobHandle` once the job has begun.
        options: options of the backend. Only "ray" has one: `address` of the cluster.

    Raises:
        JobSpecError: the job cannot run as described.
        UsageError: there is no such backend, or DLROVER_HOOKS_PLUGINS names a plug-in that is not installed.
        TypeError: the backend has no such option.
        MissingExtra: Ray is not installed.
        Conflict: a job of this name already runs on the Ray cluster.
        LaunchError: the job could not be started, or a job of this name already runs on this machine.
    """
    if backend not in _BACKENDS:
        raise UsageError(f"backend={backend!r}: there are {' and '.join(repr(one) for one in _BACKENDS)}")
    spec = (msgspec.structs.replace(spec, name=job_name) if job_name else spec).checked()
    failures = list[PluginFailure]()
    plugins = JobPlugins(spec.name, select(settings.plugins()), failures.append)
    spec = plugins.prepared(spec)
    used = tuple(_with_failures(one, failures) for one in plugins.listed())
    handle: JobHandle = importlib.import_module(_BACKENDS[backend]).submit(spec, plugins=used, **options)
    if not wait:
        return handle
    try:
        return handle.wait()
    except KeyboardInterrupt:
        handle.stop("Ctrl-C")
        raise


def _with_failures(plugin: RolePlugin, failures: list[PluginFailure]) -> RolePlugin:
    own = [one for one in failures if one.plugin == plugin.name]
    problem = f"{own[-1].function}: {own[-1].detail}" if own else ""
    return msgspec.structs.replace(plugin, failures=len(own), problem=problem)
