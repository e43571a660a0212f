"""`DLJobBuilder` describes a job of several roles by a chain of calls.

    job = (DLJobBuilder("ppo").nodes(2, devices_per_node=8)
           .role("actor").train("ppo.roles:actor").workers(8).resource(device=1).restarts(on_failure="rejoin").end()
           .role("reward").run("ppo.roles:reward").workers(2).not_driver().end()
           .build())
    job.submit(backend="ray")

The spellings of DLRover's `DLJobBuilder` are aliases: `node_num`, `device_per_node`, `device_type`, `global_env`,
`workload`, `total`, `resource(accelerator=)`, `with_collocation`, `with_collocation_all`, `nnodes`, `nproc_per_node`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from dlrover_hooks.config.duration import seconds
from dlrover_hooks.errors import UsageError
from dlrover_hooks.job.spec import JobSpec, Policy, checked_job, config_problem

_MB_PER_GB = 1000.0


class DLJobBuilder:
    """Describes a job of several roles.

    The methods do not check values: `build` reports all wrong values in one `JobSpecError`.

    Args:
        name: name of the job; `submit(job_name=)` overrides it.
    """

    def __init__(self, name: str = "job") -> None:
        self._name = name
        self._fields: dict[str, Any] = {}
        self._roles: list[RoleBuilder] = []
        self._collocations: list[dict[str, Any]] = []
        self._apart: list[tuple[str, ...]] = []
        self._problems: list[str] = []

    def nodes(self, count: int, *, devices_per_node: int = 0, device: str | None = None) -> DLJobBuilder:
        """The size of the cluster: `build` checks that the workers fit. `device`: CPU, GPU (the default) or TPU."""
        self._fields |= {"nodes": count, "devices_per_node": devices_per_node}
        return self if device is None else self.device_type(device)

    def config(self, config: Any = None, /, **more: Any) -> DLJobBuilder:
        """Add settings that workers read from `current_worker().config`.

        Args:
            config: a mapping, or an object whose attributes are the settings.
            more: further settings. All values must be representable as JSON.
        """
        if not isinstance(config, Mapping) and not hasattr(config, "__dict__") and config is not None:
            self._problems.append(f"config(): {config!r:.200} is neither a mapping nor an object with attributes")
            return self
        given = _as_dict(config) | more
        if problem := config_problem(given):
            self._problems.append(problem)
            return self
        self._fields["config"] = self._fields.get("config", {}) | given
        return self

    def env(self, variables: Mapping[str, str] | None = None, /, **more: str) -> DLJobBuilder:
        """Add environment variables of all workers."""
        _add_variables(self._fields, self._problems, variables, more)
        return self

    def state(self, url: str) -> DLJobBuilder:
        """Set where the PrimeMaster keeps its journal, see `JobSpec.state`."""
        self._fields["state"] = url
        return self

    def role(self, name: str) -> RoleBuilder:
        """Add a role. The methods of this class can also be called on the returned builder."""
        role = RoleBuilder(self, name)
        self._roles.append(role)
        return role

    def restarts(
        self, *, job: int | None = None, preemption: int | None = None, node: int | None = None, window: Any = None
    ) -> DLJobBuilder:
        """Set the budgets of the entire job, see `RoleBudgets`.

        Args:
            job: how often all workers may be started again; -1: no limit.
            preemption: how many workers may be preempted; -1: no limit.
            node: how many workers may fail on a node before it is avoided; -1: no limit.
            window: failures older than this do not count: a duration such as "1h", or seconds.
        """
        given = {"job_restarts": job, "preemptions": preemption, "node_failures": node}
        self._fields |= {name: value for name, value in given.items() if value is not None}
        if window is not None:
            self._duration("window_s", window, "restarts(window=)")
        return self

    def ready_within(self, duration: Any) -> DLJobBuilder:
        """Set how long a worker may take to register, including the wait for its resources: "5m", or seconds."""
        self._duration("ready_s", duration, "ready_within()")
        return self

    def silent_after(self, duration: Any) -> DLJobBuilder:
        """Set after how long without a heartbeat a worker is declared dead: "10s", or seconds, at least 6.

        The end of a process is detected without this timeout.
        """
        self._duration("silent_s", duration, "silent_after()")
        return self

    def _duration(self, field: str, value: Any, name: str) -> None:
        try:
            self._fields[field] = seconds(value, name=name)
        except UsageError as error:
            self._problems.append(error.message)

    def collocate(self, *roles: str, share: Mapping[str, float] | None = None) -> DLJobBuilder:
        """Place workers of these roles that have the same rank on one node.

        Args:
            roles: names of the roles.
            share: by role, which part of one device its worker uses. The workers then share this device.
        """
        self._collocations.append({"roles": roles, "share": {} if share is None else share})
        return self

    def affinity(self, *roles: str) -> DLJobBuilder:
        """Place workers of these roles that have the same rank on one node, each with its own devices."""
        return self.collocate(*roles)

    def anti_affinity(self, *roles: str) -> DLJobBuilder:
        """Place all workers of these roles on different nodes."""
        self._apart.append(roles)
        return self

    def spread(self, role: str) -> DLJobBuilder:
        """Place all workers of this role on different nodes."""
        return self.anti_affinity(role)

    def build(self) -> JobSpec:
        """Return the checked job.

        Raises:
            JobSpecError: lists all wrong values.
        """
        problems = list(self._problems)
        for role in self._roles:
            problems += [f"role {role.name!r:.200}: {problem}" for problem in role.problems]
        fields = self._fields | {
            "name": self._name,
            "roles": [role.fields() for role in self._roles],
            "collocations": self._collocations,
            "apart": self._apart,
        }
        return checked_job(fields, problems)

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
        """Like `collocate` with an equal `share` of one device for each role."""
        part = int(10_000 / max(1, len(roles))) / 10_000
        return self.collocate(*roles, share={one: part for one in roles if isinstance(one, str)})

    def with_collocation_all(self, *exclude: str) -> DLJobBuilder:
        """Like `with_collocation` of all roles except `exclude`. Call it after all roles were added."""
        return self.with_collocation(*(role.name for role in self._roles if role.name not in exclude))


class RoleBuilder:
    """One role of a job, made by `DLJobBuilder.role`. The methods of `DLJobBuilder` can be called on it, too."""

    def __init__(self, job: DLJobBuilder, name: str) -> None:
        self.name, self.problems = name, list[str]()
        self._job, self._fields = job, dict[str, Any]()
        self._resources = dict[str, Any]()
        self._groups: Any = None
        """How many groups of `per_group` workers `nnodes` was given; None: as many as the workers fill."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(DLJobBuilder, name):
            raise AttributeError(f"neither a role nor a job has {name!r}")
        return getattr(self._job, name)

    def fields(self) -> dict[str, Any]:
        """The fields of the `RoleSpec` that were set."""
        resources = {"resources": self._resources} if self._resources else {}
        return {"name": self.name, "entry": ""} | self._fields | resources

    def run(self, entry: str) -> RoleBuilder:
        """Set what each worker calls independently of the others. `entry`: see `RoleSpec.entry`."""
        self._fields |= {"entry": entry, "trains": False}
        return self

    def train(self, entry: str) -> RoleBuilder:
        """Set what each worker calls as a member of one process group. `entry`: see `RoleSpec.entry`.

        RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set before the call.
        """
        self._fields |= {"entry": entry, "trains": True}
        return self

    def workers(self, count: int, *, min: int = 0) -> RoleBuilder:
        """Set the number of workers. `min`: see `RoleSpec.min_workers`."""
        self._fields |= {"workers": count, "min_workers": min}
        self._groups = None
        return self

    def per_group(self, count: int) -> RoleBuilder:
        """Set how many workers are placed on one node together, see `RoleSpec.per_group`."""
        self._fields["per_group"] = count
        self._groups = None
        return self

    def env(self, variables: Mapping[str, str] | None = None, /, **more: str) -> RoleBuilder:
        """Add environment variables of the workers of this role. They take precedence over those of the job."""
        _add_variables(self._fields, self.problems, variables, more)
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
        """Set the resources of each worker, see `RoleResources`.

        DLRover's spellings: `memory` and `disk` (10^6 bytes), `accelerator` (like `device`).
        """
        memory_gb = _gb(memory) if memory is not None else memory_gb
        disk_gb = _gb(disk) if disk is not None else disk_gb
        device = accelerator if accelerator is not None else device
        given = {"cpu": cpu, "device": device, "memory_gb": memory_gb, "disk_gb": disk_gb}
        self._resources |= {name: value for name, value in given.items() if value is not None}
        if custom:
            self._resources["custom"] = self._resources.get("custom", {}) | custom
        return self

    def restarts(
        self, worker: int | None = None, *, role: int | None = None, on_failure: Policy | None = None
    ) -> RoleBuilder:
        """Set what happens when a worker ends before it is done.

        Args:
            worker: how many workers of the role may end early, see `RoleRules`; -1: no limit.
            role: how often all workers of the role may be started again; -1: no limit.
            on_failure: see `FailurePolicy`.
        """
        given = {"worker_restarts": worker, "role_restarts": role, "on_failure": on_failure}
        self._fields |= {name: value for name, value in given.items() if value is not None}
        return self

    def not_driver(self) -> RoleBuilder:
        """Do not let the job wait for this role: its workers are terminated when the job is over."""
        self._fields["driver"] = False
        return self

    def end(self) -> DLJobBuilder:
        """Return the builder of the job."""
        return self._job

    # ---- DLRover's spellings ----------------------------------------------------------------------------------------

    def total(self, count: int) -> RoleBuilder:
        """Like `workers`."""
        return self.workers(count)

    def nnodes(self, count: int) -> RoleBuilder:
        """Like `workers(count * nproc_per_node)`."""
        self._groups = count
        self._fields["workers"] = _times(count, self._fields.get("per_group", 1))
        return self

    def nproc_per_node(self, count: int) -> RoleBuilder:
        """Like `per_group(count)`, but keeps the number of groups, so the number of workers changes."""
        workers, size = self._fields.get("workers", 1), self._fields.get("per_group", 1)
        if self._groups is None:
            self._groups = workers // max(1, size) if _is_count(workers) and _is_count(size) else workers
        self._fields |= {"workers": _times(self._groups, count), "per_group": count}
        return self


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _times(one: Any, other: Any) -> Any:
    """The product of two numbers; of other values the first that is no number, which `build` then refuses."""
    wrong = [value for value in (one, other) if not _is_count(value)]
    return wrong[0] if wrong else one * other


def _gb(megabytes: Any) -> Any:
    """The same size in GB; a value that is no number remains, and `build` refuses it."""
    return megabytes / _MB_PER_GB if _is_count(megabytes) or isinstance(megabytes, float) else megabytes


def _as_dict(config: Any) -> dict[Any, Any]:
    if config is None:
        return {}
    return dict(cast("Mapping[Any, Any]", config)) if isinstance(config, Mapping) else dict(vars(config))


def _add_variables(fields: dict[str, Any], problems: list[str], variables: Any, more: Mapping[str, Any]) -> None:
    if variables is not None and not isinstance(variables, Mapping):
        problems.append(f"env(): {variables!r:.200} is not a mapping")
        return
    given = {**cast("Mapping[Any, Any]", variables or {}), **more}
    fields["env"] = fields.get("env", {}) | {name: str(value) for name, value in given.items()}
