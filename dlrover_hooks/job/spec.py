"""The description of a job of several roles, and its checks.

Needs neither torch nor Ray nor a master: a job can be described, checked, planned and written to a file anywhere.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, cast, get_args, get_origin

import msgspec

from dlrover_hooks.errors import JobSpecError
from dlrover_hooks.job import placement
from dlrover_hooks.job.entry_point import entry_problem
from dlrover_hooks.protocol import (
    MOST_BUDGET,
    MOST_ROLE_WORKERS,
    UNLIMITED,
    FailurePolicy,
    RoleBudgets,
    RoleRules,
    Seconds,
)

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,62}[A-Za-z0-9])?")
_NAME_RULE = "letters, digits, '-', '_' and '.', at most 64, a letter or digit first and last"
Policy = Literal["replace", "rejoin", "role", "job", "fail"]
Device = Literal["CPU", "GPU", "TPU"]
_ADVICE = {
    "on_failure": f": give one of {', '.join(get_args(Policy))}",
    "device": f": give one of {', '.join(get_args(Device))}",
    "entry": ": give it as 'package.module:function'",
}
"""By name of a field: what to give instead of a value that has a wrong type."""
_MOST_NODES = 1 << 31
_MOST_AMOUNT = 1e12
"""The largest amount of a resource."""


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
        """As JSON, for `from_json`. Raises JobSpecError if JSON cannot represent a value."""
        try:
            return msgspec.json.format(msgspec.json.encode(self)).decode()
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise JobSpecError(_shown_name(self.name), find_problems(self) or [printable(str(error))]) from None

    @classmethod
    def from_json(cls, text: str | bytes) -> JobSpec:
        """The job that is described by `text`, which `to_json` wrote or a user did.

        Raises:
            JobSpecError: the text is not valid, or the job cannot run as described.
        """
        try:
            fields = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise JobSpecError("job", [printable(str(error))]) from None
        return checked_job(fields)

    def checked(self) -> JobSpec:
        """This job, with its values converted to the types of their fields.

        Raises:
            JobSpecError: lists all problems: values of a wrong type, and why the job cannot run as described.
        """
        return checked_job(self)

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


def checked_job(given: Any, known: Iterable[str] = ()) -> JobSpec:
    """The job that `given` (a `JobSpec`, or the values of its fields by name) describes.

    Args:
        given: values may have wrong types.
        known: problems that were found before.

    Raises:
        JobSpecError: lists all problems.
    """
    spec, problems = _examined(given)
    if problems := [*known, *problems]:
        raise JobSpecError(spec.name, [printable(one) for one in problems])
    return spec


def find_problems(spec: JobSpec) -> list[str]:
    """All problems of a job, as sentences. Whether the workers fit the nodes is only checked if there are no others."""
    return [printable(one) for one in _examined(spec)[1]]


def variable_problems(variables: Mapping[str, str]) -> list[str]:
    """Why a process cannot be started with these environment variables, as sentences."""
    found = list[str]()
    for name, value in variables.items():
        if not name or "=" in name or _unusable(name):
            found.append(f"env(): {name!r} is no name of a variable: it must not be empty or contain '=' or NUL")
        if problem := _unusable(value):
            found.append(f"env(): the value of {name!r} {problem}")
    return found


def config_problem(config: Mapping[str, Any]) -> str:
    """Why JSON cannot represent this configuration; empty: it can."""
    try:
        json.dumps(msgspec.to_builtins(config), allow_nan=False)  # msgspec would write inf and nan as null
        msgspec.json.encode(config)
    except UnicodeEncodeError as error:
        return f"config(): a text {_unusable(error.object)}: {error.object!r:.200}"
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return f"config(): {error}: use finite numbers, text, lists and dicts"
    return ""


def printable(text: str) -> str:
    """`text` with escapes instead of lone surrogates, so that it can be encoded."""
    return text.encode("utf-8", "backslashreplace").decode()


def _unusable(text: str) -> str:
    """Why neither JSON nor a process can be given `text`; empty: they can."""
    if "\0" in text:
        return "contains NUL"
    return "contains a lone surrogate, which UTF-8 cannot represent" if printable(text) != text else ""


def _shown_name(name: Any) -> str:
    return name if isinstance(name, str) else "job"


# ---- types -----------------------------------------------------------------------------------------------------------

_Path = tuple[str, ...]
"""Where a value is in a job: `.FIELD`, `[INDEX]` and `['KEY']` from the outermost to the innermost."""
_WRONG = object()
"""In place of a value of a wrong type."""


@functools.cache
def _fields(kind: type[SpecPart]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(kind)


class _TypeErrors:
    """Converts values to the types of their fields, and lists those that have another type."""

    def __init__(self) -> None:
        self.found: list[tuple[_Path, str]] = []

    def wrong(self, kind: type[SpecPart], *start: str) -> set[str]:
        """The fields of the part at `start` that are or contain a value of a wrong type."""
        inner = [path[len(start) :] for path, _ in self.found if path[: len(start)] == start]
        return {f".{name}" for name in kind.__struct_fields__} if () in inner else {path[0] for path in inner}

    def converted(self, value: Any, kind: Any, path: _Path = ()) -> Any:
        """`value` as `kind`. Values of a wrong type in it are replaced by defaults, or left out; `_WRONG`: it is one
        itself."""
        kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
        if kind is Any:
            return value
        part = kind if isinstance(kind, type) and issubclass(kind, SpecPart) else None
        if part is not None:
            fields = msgspec.structs.asdict(value) if isinstance(value, part) else value
            if isinstance(fields, Mapping):
                return self._part(cast("Mapping[Any, Any]", fields), part, path)
        elif get_origin(kind) is dict and isinstance(value, Mapping):
            return self._mapping(cast("Mapping[Any, Any]", value), get_args(kind)[1], path)
        elif get_origin(kind) is tuple and isinstance(value, (list, tuple)):
            items = enumerate(cast("list[Any]", value))
            made = [self.converted(one, get_args(kind)[0], (*path, f"[{at}]")) for at, one in items]
            return tuple(one for one in made if one is not _WRONG)
        try:
            return msgspec.convert(value, kind)
        except (msgspec.ValidationError, TypeError, ValueError, OverflowError) as error:
            self.found.append((path, str(error)))
            return _WRONG if part is None else _TypeErrors()._part({}, part, path)

    def _part(self, given: Mapping[Any, Any], kind: type[SpecPart], path: _Path) -> SpecPart:
        made, known = dict[str, Any](), _fields(kind)
        for name in [name for name in given if name not in kind.__struct_fields__]:
            self.found.append(((*path, f".{name}"), f"there is no field {name!r}"))
        for field in known:
            inner, value = (*path, f".{field.name}"), _WRONG
            if field.name in given:
                value = self.converted(given[field.name], field.type, inner)
            elif field.required:
                self.found.append((inner, "it is missing"))
            if value is not _WRONG:
                made[field.name] = value
            elif field.required:
                made[field.name] = () if get_origin(field.type) is tuple else "?"
        return kind(**made)

    def _mapping(self, given: Mapping[Any, Any], kind: Any, path: _Path) -> dict[str, Any]:
        made = dict[str, Any]()
        for name, value in given.items():
            if not isinstance(name, str):
                self.found.append((path, f"its name {name!r:.200} is not text"))
            elif (one := self.converted(value, kind, (*path, f"[{name!r}]"))) is not _WRONG:
                made[name] = one
        return made

    def sentences(self, given: Any) -> Iterator[str]:
        """The problems. `given`: the values of the job."""
        roles: Any = given.roles if isinstance(given, JobSpec) else given.get("roles") if _mapped(given) else ()
        for path, problem in self.found:
            where, rest = "", "".join(path)
            if len(path) > 2 and path[0] == ".roles":
                role = roles[int(path[1].strip("[]"))]
                name = role.name if isinstance(role, RoleSpec) else role.get("name", "")
                where, rest = f"role {name!r:.200}: ", "".join(path[2:])
            where += rest.removeprefix(".")
            advice = _ADVICE.get(path[-1].removeprefix("."), "") if path else ""
            yield f"{where}: {problem}{advice}" if where else problem


def _mapped(value: Any) -> bool:
    return isinstance(value, Mapping)


# ---- checks ----------------------------------------------------------------------------------------------------------

_Rule = tuple[str, bool, str]
"""The fields that it is about, whether they have a problem, and the problem. Fields of a wrong type have no other."""


def _examined(given: Any) -> tuple[JobSpec, list[str]]:
    """The job that `given` describes, with defaults instead of values of a wrong type, and all problems."""
    errors = _TypeErrors()
    spec: JobSpec = errors.converted(given, JobSpec)
    found = [*errors.sentences(given), *_violated(_job_rules(spec), errors.wrong(JobSpec))]
    found += variable_problems(spec.env)
    if problem := config_problem(spec.config):
        found.append(problem)
    unknown = set[str]()
    for at, one in enumerate(spec.roles):
        problems = _violated(_role_rules(one), wrong := errors.wrong(RoleSpec, ".roles", f"[{at}]"))
        problems += variable_problems(one.env) + _resource_problems(one, spec)
        found += [f"role {one.name!r}: {problem}" for problem in problems]
        unknown |= wrong
    unknown |= errors.wrong(JobSpec)
    found += _collocation_problems(spec, unknown) + _apart_problems(spec, unknown)
    return spec, found or placement.find_misfits(spec)


def _violated(rules: list[_Rule], wrong: set[str]) -> list[str]:
    return [problem for fields, bad, problem in rules if bad and wrong.isdisjoint(f".{one}" for one in fields.split())]


def _job_rules(spec: JobSpec) -> list[_Rule]:
    size = f"{spec.nodes} nodes with {spec.devices_per_node} devices each"
    drivers, total = [one.driver for one in spec.roles], sum(max(0, one.workers) for one in spec.roles)
    twice = [name for name, count in Counter(one.name for one in spec.roles).items() if count > 1]
    budgets = {"job": spec.job_restarts, "preemption": spec.preemptions, "node": spec.node_failures}
    names = {"job": "job_restarts", "preemption": "preemptions", "node": "node_failures"}
    return [
        ("name", not _NAME.fullmatch(spec.name), f"the job's name is {spec.name!r}: use {_NAME_RULE}"),
        ("roles", not spec.roles, "it has no role: add one with role(NAME).run(ENTRY) or role(NAME).train(ENTRY)"),
        (
            "roles",
            bool(drivers) and not any(drivers),
            "no role is a driver, so the job would never end: leave out not_driver() for one of them",
        ),
        (
            "",
            total > MOST_ROLE_WORKERS,
            f"its roles have {total} workers together: give at most {MOST_ROLE_WORKERS}",
        ),
        (
            "nodes devices_per_node",
            spec.nodes < 1 or spec.devices_per_node < 0,
            f"{size}: give at least 1 node and 0 devices or more",
        ),
        (
            "nodes devices_per_node",
            max(spec.nodes, spec.devices_per_node) > _MOST_NODES,
            f"{size}: give at most {_MOST_NODES} of both",
        ),
        *[(names[one], *_budget(f"restarts({one}={count})", count)) for one, count in budgets.items()],
        (
            "silent_s",
            not (spec.silent_s >= 6 and _is_time(spec.silent_s)),
            f"silent_after({spec.silent_s:g} s): give at least 6 s, three heartbeats, and at most 10^9 s",
        ),
        (
            "window_s ready_s",
            not (_is_time(spec.window_s) and _is_time(spec.ready_s)),
            f"window ({spec.window_s:g} s) and ready ({spec.ready_s:g} s) must be above 0 and at most 10^9 s",
        ),
        ("state", bool(problem := _state_problem(spec.state)), f"state({spec.state!r}): {problem}"),
        *[("", True, f"role {name!r} is defined twice") for name in twice if name != "?"],
    ]


def _is_time(value: float) -> bool:
    """Whether messages can carry so many seconds."""
    try:
        return msgspec.convert(value, Seconds) > 0
    except msgspec.ValidationError:
        return False


def _budget(call: str, count: int) -> tuple[bool, str]:
    if count > MOST_BUDGET:
        return True, f"{call}: give at most {MOST_BUDGET}, or -1 for no limit"
    return count < UNLIMITED, f"{call}: give 0 or more, or -1 for no limit"


def _state_problem(state: str) -> str:
    """Why the PrimeMaster cannot keep its journal there; empty: it may be able to."""
    scheme, separator, rest = state.partition("://")
    if problem := _unusable(state):
        return f"it {problem}"
    if not separator:
        return ""
    if scheme in ("etcd", "etcds"):
        user, _, hosts = rest.partition("/")[0].rpartition("@")
        if not hosts.strip(",") or "?" in state or ":" in user:
            return "write etcd://HOST:2379,HOST:2379/NAME, without a password"
    elif scheme != "file" or not rest:
        return "give a folder, file://FOLDER, or etcd://HOST:2379,HOST:2379/NAME"
    return ""


def _role_rules(role: RoleSpec) -> list[_Rule]:
    budgets = {"worker": role.worker_restarts, "role": role.role_restarts}
    return [
        ("name", not _NAME.fullmatch(role.name), f"its name: use {_NAME_RULE}"),
        ("entry", bool(problem := _entry_problem(role.entry)), problem),
        ("workers", role.workers < 1, f"workers({role.workers}): give 1 or more"),
        (
            "workers min_workers",
            not 0 <= role.min_workers <= max(role.workers, 1),
            f"workers({role.workers}, min={role.min_workers}): min is between 1 and the number of workers",
        ),
        (
            "min_workers trains on_failure",
            bool(role.min_workers) and not (role.trains and role.on_failure == "rejoin"),
            "workers(min=): only a role with train() and on_failure='rejoin' can shrink",
        ),
        (
            "workers per_group",
            role.per_group < 1 or bool(role.workers % role.per_group),
            f"per_group({role.per_group}) does not divide {role.workers} workers",
        ),
        (
            "trains on_failure",
            role.on_failure == "rejoin" and not role.trains,
            "on_failure='rejoin' is for roles with train(): only these have a process group to join",
        ),
        *[(f"{one}_restarts", *_budget(f"restarts(): {one}={count}", count)) for one, count in budgets.items()],
    ]


def _entry_problem(entry: str) -> str:
    if not entry:
        return "it has no function: call run(ENTRY) or train(ENTRY)"
    problem = _unusable(entry)
    return f"its entry point {entry!r} {problem}" if problem else entry_problem(entry)


def _resource_problems(role: RoleSpec, spec: JobSpec) -> list[str]:
    need, found = role.resources, list[str]()
    bytes_ = {"memory_gb": need.memory_gb, "disk_gb": need.disk_gb}
    counted = {"cpu": need.cpu, "device": need.device} | need.custom
    for name, amount in (bytes_ | counted).items():
        if not 0 <= amount <= _MOST_AMOUNT:
            limit = f"at most {_MOST_AMOUNT:g}" if amount > 0 else "0 or more"
            found.append(f"resource({name}={amount:g}): give {limit}")
        elif 0 < amount < placement.RESOLUTION and name in counted:
            found.append(f"resource({name}={amount:g}): the smallest part is {placement.RESOLUTION:g}")
    found += [f"resource(): the name {name!r} {problem}" for name in need.custom if (problem := _unusable(name))]
    if "" in need.custom:
        found.append("resource(): a name is empty")
    if 1 < need.device <= _MOST_AMOUNT and need.device != int(need.device):
        found.append(f"resource(device={need.device:g}): a part of one device (below 1), or whole devices")
    if need.device and spec.device == "CPU":
        found.append(f"resource(device={need.device:g}), but device_type is CPU: use resource(cpu=)")
    return found


def _collocation_problems(spec: JobSpec, wrong: set[str]) -> list[str]:
    """`wrong`: fields of the job and of its roles that have a wrong type."""
    roles, found, seen = {one.name: one for one in spec.roles}, list[str](), set[str]()
    for one in spec.collocations if wrong.isdisjoint((".name", ".collocations")) else ():
        unknown = [name for name in one.roles if name not in roles]
        found += [f"collocate(): there is no role {name!r}" for name in unknown]
        found += [f"collocate(): role {name!r} is in two collocations" for name in one.roles if name in seen]
        seen |= set(one.roles)
        twice = sorted(name for name, count in Counter(one.roles).items() if count > 1)
        found += [f"collocate(): role {name!r} is named twice" for name in twice]
        if unknown:
            continue
        groups = {name: roles[name].workers // max(1, roles[name].per_group) for name in one.roles}
        if len(set(groups.values())) > 1 and wrong.isdisjoint((".workers", ".per_group")):
            found.append(f"collocate(): each of the roles needs as many groups of workers as the others, not {groups}")
        if one.share and set(one.share) != set(one.roles):
            found.append(f"collocate(share=): name each of the roles {list(one.roles)}, not {list(one.share)}")
        total = sum(one.share.values())
        if one.share and not (all(part > 0 for part in one.share.values()) and total <= 1 + 1e-9):
            found.append(f"collocate(share=): give parts above 0 of one device, together at most 1, not {total:g}")
        elif any(part < placement.RESOLUTION for part in one.share.values()):
            found.append(f"collocate(share=): the smallest part is {placement.RESOLUTION:g}")
    return found


def _apart_problems(spec: JobSpec, wrong: set[str]) -> list[str]:
    """Problems of roles whose workers must not share a node. `wrong`: as in `_collocation_problems`."""
    roles, found = {one.name: one for one in spec.roles}, list[str]()
    if not wrong.isdisjoint((".name", ".apart")):
        return found
    collocated = {name for one in spec.collocations for name in one.roles}
    for group in spec.apart:
        found += [f"spread(): there is no role {name!r}" for name in group if name not in roles]
        found += [f"spread(): role {name!r} is collocated" for name in group if name in collocated]
        wide = [name for name in group if name in roles and roles[name].per_group > 1]
        found += [f"spread(): role {name!r} has per_group() above 1" for name in wide]
    counts = Counter(name for group in spec.apart for name in group)
    return found + [f"spread(): role {name!r} is in two sets" for name in sorted(counts) if counts[name] > 1]
