"""The description of a job of several roles, and its checks.

Needs neither torch nor Ray nor a master: a job can be described, checked, planned and written to a file anywhere.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

import msgspec

from dlrover_hooks.errors import JobSpecError
from dlrover_hooks.job import placement
from dlrover_hooks.job.entry_point import entry_problem
from dlrover_hooks.protocol import UNLIMITED, FailurePolicy, RoleBudgets, RoleRules

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,62}[A-Za-z0-9])?")
_NAME_RULE = "letters, digits, '-', '_' and '.', at most 64, a letter or digit first and last"
Policy = Literal["replace", "rejoin", "role", "job", "fail"]
Device = Literal["CPU", "GPU", "TPU"]


class SpecPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all parts of a job's JSON. An unknown field is an error, because it may be a mistyped one."""


class RoleResources(SpecPart, frozen=True):
    """The resources of one worker.

    `cpu`: cores. `device`: how many devices of the kind `JobSpec.device`: a part of one (below 1), or whole devices.
    `memory_gb`, `disk_gb`: 10^9 bytes. `custom`: amounts of the platform's other resources by name.
    """

    cpu: float = 1.0
    device: float = 0.0
    memory_gb: float = 0.0
    disk_gb: float = 0.0
    custom: dict[str, float] = {}


class RoleSpec(SpecPart, frozen=True):
    """One role.

    `entry`: `package.module:function`, `package.module.function`, or `script.py ARGUMENTS`. `trains`: its workers form
    one process group, and RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set. `min_workers`: with `on_failure`
    "rejoin" the group may shrink to this many workers; 0: it does not shrink. `per_group`: this many workers of
    consecutive ranks are placed on one node. `driver`: the job waits for this role. `worker_restarts`,
    `role_restarts`: see `RoleRules`.
    """

    name: str
    entry: str
    trains: bool = False
    workers: int = 1
    min_workers: int = 0
    per_group: int = 1
    resources: RoleResources = RoleResources()
    env: dict[str, str] = {}
    driver: bool = True
    on_failure: Policy = "replace"
    worker_restarts: int = 10
    role_restarts: int = 3


class Collocation(SpecPart, frozen=True):
    """Roles whose workers of the same rank share a node. `share`: the part of one device that each role uses; empty:
    each worker has its own devices."""

    roles: tuple[str, ...]
    share: dict[str, float] = {}


class JobSpec(SpecPart, frozen=True):
    """A job of several roles.

    `nodes`, `devices_per_node`: the size of the cluster, for the checks; 0 devices: not checked. `device`: the kind of
    its devices. `collocations`: see `Collocation`. `apart`: sets of roles; no two workers of a set share a node.
    `job_restarts`, `preemptions`, `node_failures`, `window_s`, `ready_s`: see `RoleBudgets`. `silent_s`: a worker
    without a heartbeat for this many seconds is declared dead; its process ends at its next request. `state`: where
    the PrimeMaster keeps its journal: a folder, a `file://` URL, or `etcd://...`; empty: a folder of the backend.
    """

    name: str
    roles: tuple[RoleSpec, ...] = ()
    nodes: int = 1
    devices_per_node: int = 0
    device: Device = "GPU"
    config: Annotated[dict[str, Any], msgspec.Meta(description="For the workers: current_worker().config.")] = {}
    env: dict[str, str] = {}
    collocations: tuple[Collocation, ...] = ()
    apart: tuple[tuple[str, ...], ...] = ()
    job_restarts: int = 3
    preemptions: int = UNLIMITED
    node_failures: int = 3
    window_s: float = 3600.0
    ready_s: float = 300.0
    silent_s: float = 10.0
    state: str = ""

    def to_json(self) -> str:
        """As JSON, for `from_json`."""
        return msgspec.json.format(msgspec.json.encode(self)).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> JobSpec:
        """The job that is described by `text`, which `to_json` wrote or a user did.

        Raises:
            JobSpecError: the text is not valid, or the job cannot run as described.
        """
        try:
            spec = msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise JobSpecError("job", [str(error)]) from None
        return spec.checked()

    def checked(self) -> JobSpec:
        """This job itself. Raises JobSpecError, which lists all problems, if it cannot run as described."""
        if problems := find_problems(self):
            raise JobSpecError(self.name, problems)
        return self

    def role(self, name: str) -> RoleSpec:
        """The role `name`. Raises JobSpecError if there is none."""
        for one in self.roles:
            if one.name == name:
                return one
        raise JobSpecError(self.name, [f"there is no role {name!r}: it has {[one.name for one in self.roles]}"])

    def plan(self) -> placement.PlacementPlan:
        """Which workers share a node. Raises JobSpecError, as `checked` does."""
        return placement.planned(self.checked())

    def rules(self) -> tuple[RoleRules, ...]:
        """The part of the roles that is sent to the master."""
        return tuple(
            RoleRules(
                one.name,
                one.workers,
                FailurePolicy(one.on_failure),
                one.driver,
                one.worker_restarts,
                one.role_restarts,
            )
            for one in self.roles
        )

    def budgets(self) -> RoleBudgets:
        """The budgets of the whole job."""
        return RoleBudgets(self.job_restarts, self.preemptions, self.node_failures, self.window_s, self.ready_s)

    def submit(self, job_name: str = "", *, backend: str = "local", wait: bool = True, **options: Any) -> Any:
        """Run the job. See `dlrover_hooks.job.submission.submit`."""
        from dlrover_hooks.job.submission import submit

        return submit(self, job_name, backend=backend, wait=wait, **options)


def find_problems(spec: JobSpec) -> list[str]:
    """All problems of a job, as sentences. Whether the workers fit the nodes is only checked if there are no others."""
    found = list[str]()
    if not _NAME.fullmatch(spec.name):
        found.append(f"the job's name is {spec.name!r}: use {_NAME_RULE}")
    if not spec.roles:
        found.append("it has no role: add one with role(NAME).run(ENTRY) or role(NAME).train(ENTRY)")
    elif not any(one.driver for one in spec.roles):
        found.append("no role is a driver, so the job would never end: leave out not_driver() for one of them")
    if spec.nodes < 1 or spec.devices_per_node < 0:
        found.append(
            f"{spec.nodes} nodes with {spec.devices_per_node} devices each: give at least 1 node and 0 devices or more"
        )
    budgets = {"job": spec.job_restarts, "preemption": spec.preemptions, "node": spec.node_failures}
    found += [f"restarts({name}={count}): give 0 or more, or -1" for name, count in budgets.items() if count < -1]
    if not 6 <= spec.silent_s < math.inf:
        found.append(f"silent_after({spec.silent_s:g} s): give at least 6 s, three heartbeats")
    if not (0 < spec.window_s < math.inf and 0 < spec.ready_s < math.inf):
        found.append(f"window ({spec.window_s:g} s) and ready ({spec.ready_s:g} s) must be above 0 and finite")
    seen = set[str]()
    for one in spec.roles:
        if one.name in seen:
            found.append(f"role {one.name!r} is defined twice")
        seen.add(one.name)
        found += [f"role {one.name!r}: {problem}" for problem in _role_problems(one, spec)]
    found += _places(spec)
    return found or placement.find_misfits(spec)


def _role_problems(role: RoleSpec, spec: JobSpec) -> list[str]:
    found = list[str]()
    if not _NAME.fullmatch(role.name):
        found.append(f"its name: use {_NAME_RULE}")
    if not role.entry:
        found.append("it has no function: call run(ENTRY) or train(ENTRY)")
    elif problem := entry_problem(role.entry):
        found.append(problem)
    if role.workers < 1:
        found.append(f"workers({role.workers}): give 1 or more")
    if not 0 <= role.min_workers <= max(role.workers, 1):
        found.append(f"workers({role.workers}, min={role.min_workers}): min is between 1 and the number of workers")
    if role.min_workers and not (role.trains and role.on_failure == "rejoin"):
        found.append("workers(min=): only a role with train() and on_failure='rejoin' can shrink")
    if role.per_group < 1 or role.workers % role.per_group:
        found.append(f"per_group({role.per_group}) does not divide {role.workers} workers")
    if role.on_failure == "rejoin" and not role.trains:
        found.append("on_failure='rejoin' is for roles with train(): only these have a process group to join")
    if min(role.worker_restarts, role.role_restarts) < UNLIMITED:
        found.append("restarts(): give 0 or more, or -1 for no limit")
    return found + _resource_problems(role, spec)


def _resource_problems(role: RoleSpec, spec: JobSpec) -> list[str]:
    need, found = role.resources, list[str]()
    amounts = {"cpu": need.cpu, "device": need.device, "memory_gb": need.memory_gb, "disk_gb": need.disk_gb}
    for name, amount in (amounts | need.custom).items():
        if not 0 <= amount < math.inf:
            found.append(f"resource({name}={amount:g}): give 0 or more")
    if 1 < need.device < math.inf and need.device != int(need.device):
        found.append(f"resource(device={need.device:g}): a part of one device (below 1), or whole devices")
    if need.device and spec.device == "CPU":
        found.append(f"resource(device={need.device:g}), but device_type is CPU: use resource(cpu=)")
    return found


def _places(spec: JobSpec) -> list[str]:
    """Problems of collocations, and of roles whose workers must not share a node."""
    roles, found, seen = {one.name: one for one in spec.roles}, list[str](), set[str]()
    for one in spec.collocations:
        unknown = [name for name in one.roles if name not in roles]
        found += [f"collocate(): there is no role {name!r}" for name in unknown]
        found += [f"collocate(): role {name!r} is in two collocations" for name in one.roles if name in seen]
        seen |= set(one.roles)
        twice = sorted({name for name in one.roles if one.roles.count(name) > 1})
        found += [f"collocate(): role {name!r} is named twice" for name in twice]
        if unknown:
            continue
        groups = {name: roles[name].workers // max(1, roles[name].per_group) for name in one.roles}
        if len(set(groups.values())) > 1:
            found.append(f"collocate(): each of the roles needs as many groups of workers as the others, not {groups}")
        if one.share and set(one.share) != set(one.roles):
            found.append(f"collocate(share=): name each of the roles {list(one.roles)}, not {list(one.share)}")
        total = sum(one.share.values())
        if one.share and (min(one.share.values()) <= 0 or total > 1 + 1e-9):
            found.append(f"collocate(share=): give parts above 0 of one device, together at most 1, not {total:g}")
    for group in spec.apart:
        found += [f"spread(): there is no role {name!r}" for name in group if name not in roles]
        found += [f"spread(): role {name!r} is collocated" for name in group if name in seen]
        wide = [name for name in group if name in roles and roles[name].per_group > 1]
        found += [f"spread(): role {name!r} has per_group() above 1" for name in wide]
    names = [name for group in spec.apart for name in group]
    found += [
        f"spread(): role {name!r} is in two sets" for name in sorted({one for one in names if names.count(one) > 1})
    ]
    return found
