"""`DLJobBuilder`: describes a job of several roles by a chain of calls.

    job = (DLJobBuilder("ppo").nodes(2, devices_per_node=8)
           .role("actor").train("ppo.roles:actor").workers(8).resource(device=1).restarts(on_failure="rejoin").end()
           .role("reward").run("ppo.roles:reward").workers(2).not_driver().end()
           .build())
    job.submit(backend="ray")

The spellings of DLRover's `DLJobBuilder` are aliases: `node_num`, `device_per_node`, `device_type`, `global_env`,
`workload`, `total`, `resource(accelerator=)`, `with_collocation`, `with_collocation_all`, `nnodes`, `nproc_per_node`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from dlrover_hooks.config.duration import seconds
from dlrover_hooks.errors import JobSpecError, UsageError
from dlrover_hooks.job.spec import Collocation, JobSpec, Policy, find_problems

_MB_PER_GB = 1000.0


class DLJobBuilder:
    """`build` checks everything at once: methods raise for wrong types only.

    Args:
        name: of the job; `submit(job_name=)` gives another one.
    """

    def __init__(self, name: str = "job") -> None:
        self._name = name
        self._fields: dict[str, Any] = {}
        self._roles: list[RoleBuilder] = []
        self._collocations: list[Collocation] = []
        self._apart: list[tuple[str, ...]] = []
        self._problems: list[str] = []

    def nodes(self, count: int, *, devices_per_node: int = 0, device: str | None = None) -> DLJobBuilder:
        """The cluster that the job is for, against which `build` checks the roles. `device`: CPU, GPU or TPU."""
        self._fields |= {"nodes": count, "devices_per_node": devices_per_node}
        return self if device is None else self.device_type(device)

    def config(self, config: Any = None, /, **more: Any) -> DLJobBuilder:
        """Settings for the workers: a mapping or an object with attributes, all of it JSON."""
        given = _as_dict(config)
        try:
            json.dumps(msgspec.to_builtins(given | more), allow_nan=False)  # msgspec would write inf and nan as null
        except (TypeError, ValueError) as error:
            self._problems.append(f"config(): {error}: use finite numbers, text, lists and dicts")
            return self
        self._fields["config"] = self._fields.get("config", {}) | given | more
        return self

    def env(self, variables: Mapping[str, str] | None = None, /, **more: str) -> DLJobBuilder:
        """Environment variables of all workers."""
        self._fields["env"] = self._fields.get("env", {}) | _texts(variables, more)
        return self

    def state(self, url: str) -> DLJobBuilder:
        """Where the PrimeMaster keeps its journal, see `JobSpec.state`."""
        self._fields["state"] = url
        return self

    def role(self, name: str) -> RoleBuilder:
        """Begin a role; its builder's methods also lead back to those of the job."""
        role = RoleBuilder(self, name)
        self._roles.append(role)
        return role

    def restarts(
        self, *, job: int | None = None, preemption: int | None = None, node: int | None = None, window: Any = None
    ) -> DLJobBuilder:
        """The budgets of the whole job, -1 for no limit: see `RoleBudgets`. `window`: a duration or seconds."""
        given = {"job_restarts": job, "preemptions": preemption, "node_failures": node}
        self._fields |= {name: value for name, value in given.items() if value is not None}
        if window is not None:
            self._duration("window_s", window, "restarts(window=)")
        return self

    def ready_within(self, duration: Any) -> DLJobBuilder:
        """How long a worker may take to start, waiting for its resources included."""
        self._duration("ready_s", duration, "ready_within()")
        return self

    def silent_after(self, duration: Any) -> DLJobBuilder:
        """A worker without a heartbeat for so long is declared dead; a crash is noticed at once."""
        self._duration("silent_s", duration, "silent_after()")
        return self

    def _duration(self, field: str, value: Any, name: str) -> None:
        try:
            self._fields[field] = seconds(value, name=name)
        except UsageError as error:
            self._problems.append(error.message)

    def collocate(self, *roles: str, share: Mapping[str, float] | None = None) -> DLJobBuilder:
        """Workers of these roles with one rank share a node. `share`: and one device, of which each has its part."""
        self._collocations.append(Collocation(roles=roles, share=dict(share or {})))
        return self

    def affinity(self, *roles: str) -> DLJobBuilder:
        """Workers of these roles with one rank share a node, each with its own devices."""
        return self.collocate(*roles)

    def anti_affinity(self, *roles: str) -> DLJobBuilder:
        """No two workers of these roles share a node."""
        self._apart.append(roles)
        return self

    def spread(self, role: str) -> DLJobBuilder:
        """No two workers of this role share a node."""
        return self.anti_affinity(role)

    def build(self) -> JobSpec:
        """The job. Raises JobSpecError with all that is wrong with it."""
        problems = list(self._problems)
        for role in self._roles:
            problems += [f"role {role.name!r}: {problem}" for problem in role.problems]
        fields = self._fields | {
            "name": self._name,
            "roles": [role.fields() for role in self._roles],
            "collocations": msgspec.to_builtins(self._collocations),
            "apart": self._apart,
        }
        try:
            spec = msgspec.convert(fields, JobSpec)
        except msgspec.ValidationError as error:
            raise JobSpecError(self._name, [*problems, str(error)]) from None
        if problems:
            raise JobSpecError(self._name, [*problems, *find_problems(spec)])
        return spec.checked()

    # ---- DLRover's spellings ----------------------------------------------------------------------------------------

    def node_num(self, count: int) -> DLJobBuilder:
        """Like `nodes`."""
        self._fields["nodes"] = count
        return self

    def device_per_node(self, count: int) -> DLJobBuilder:
        """Like `nodes(devices_per_node=)`."""
        self._fields["devices_per_node"] = count
        return self

    def device_type(self, device: str) -> DLJobBuilder:
        """CPU, GPU or TPU."""
        self._fields["device"] = device
        return self

    def global_env(self, variables: Mapping[str, str]) -> DLJobBuilder:
        """Like `env`."""
        return self.env(variables)

    def workload(self, role: str, entry: str) -> RoleBuilder:
        """Like `role(role).run(entry)`."""
        return self.role(role).run(entry)

    def with_collocation(self, *roles: str) -> DLJobBuilder:
        """Like `collocate`; workers with one rank share a device, too: each gets an equal part of it."""
        part = int(10_000 / max(1, len(roles))) / 10_000
        return self.collocate(*roles, share=dict.fromkeys(roles, part))

    def with_collocation_all(self, *exclude: str) -> DLJobBuilder:
        """Like `with_collocation` of all roles but `exclude`. Call it after the roles."""
        return self.with_collocation(*(role.name for role in self._roles if role.name not in exclude))


class RoleBuilder:
    """One role of a job. Methods of `DLJobBuilder` may follow directly, or after `end`."""

    def __init__(self, job: DLJobBuilder, name: str) -> None:
        self.name, self.problems = name, list[str]()
        self._job, self._fields = job, dict[str, Any]()
        self._resources = dict[str, Any]()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(DLJobBuilder, name):
            raise AttributeError(f"neither a role nor a job has {name!r}")
        return getattr(self._job, name)

    def fields(self) -> dict[str, Any]:
        """Of its `RoleSpec`."""
        resources = {"resources": self._resources} if self._resources else {}
        return {"name": self.name, "entry": ""} | self._fields | resources

    def run(self, entry: str) -> RoleBuilder:
        """Each worker calls `entry` by itself, see `RoleSpec.entry`."""
        self._fields |= {"entry": entry, "trains": False}
        return self

    def train(self, entry: str) -> RoleBuilder:
        """The workers form a process group: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set for `entry`."""
        self._fields |= {"entry": entry, "trains": True}
        return self

    def workers(self, count: int, *, min: int = 0) -> RoleBuilder:
        """How many; see `RoleSpec.min_workers`."""
        self._fields |= {"workers": count, "min_workers": min}
        return self

    def per_group(self, count: int) -> RoleBuilder:
        """See `RoleSpec.per_group`."""
        self._fields["per_group"] = count
        return self

    def env(self, variables: Mapping[str, str] | None = None, /, **more: str) -> RoleBuilder:
        """Environment variables of its workers, over those of the job."""
        self._fields["env"] = self._fields.get("env", {}) | _texts(variables, more)
        return self

    def resource(
        self,
        *,
        cpu: float | None = None,
        device: float | None = None,
        memory_gb: float | None = None,
        disk_gb: float | None = None,
        memory: float | None = None,
        disk: float | None = None,
        accelerator: float | None = None,
        **custom: float,
    ) -> RoleBuilder:
        """Of one worker, see `RoleResources`. DLRover's spellings: `memory`, `disk` (MB), `accelerator`."""
        memory_gb = memory / _MB_PER_GB if memory is not None else memory_gb
        disk_gb = disk / _MB_PER_GB if disk is not None else disk_gb
        device = accelerator if accelerator is not None else device
        given = {"cpu": cpu, "device": device, "memory_gb": memory_gb, "disk_gb": disk_gb}
        self._resources |= {name: value for name, value in given.items() if value is not None}
        if custom:
            self._resources["custom"] = self._resources.get("custom", {}) | custom
        return self

    def restarts(
        self, worker: int | None = None, *, role: int | None = None, on_failure: Policy | None = None
    ) -> RoleBuilder:
        """What follows when a worker ends early, and how often: see `FailurePolicy` and `RoleRules`."""
        given = {"worker_restarts": worker, "role_restarts": role, "on_failure": on_failure}
        self._fields |= {name: value for name, value in given.items() if value is not None}
        return self

    def not_driver(self) -> RoleBuilder:
        """The job does not wait for this role: its workers are ended with the job."""
        self._fields["driver"] = False
        return self

    def end(self) -> DLJobBuilder:
        """Back to the job."""
        return self._job

    # ---- DLRover's spellings ----------------------------------------------------------------------------------------

    def total(self, count: int) -> RoleBuilder:
        """Like `workers`."""
        return self.workers(count)

    def nnodes(self, count: int) -> RoleBuilder:
        """Like `workers(count * nproc_per_node)`."""
        self._fields["workers"] = count * self._fields.get("per_group", 1)
        return self

    def nproc_per_node(self, count: int) -> RoleBuilder:
        """Like `per_group(count)`, with as many groups as before."""
        groups = self._fields.get("workers", 1) // self._fields.get("per_group", 1)
        self._fields |= {"workers": groups * count, "per_group": count}
        return self


def _as_dict(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    return dict(config) if isinstance(config, Mapping) else dict(vars(config))


def _texts(variables: Mapping[str, str] | None, more: Mapping[str, str]) -> dict[str, str]:
    return {name: str(value) for name, value in {**(variables or {}), **more}.items()}
