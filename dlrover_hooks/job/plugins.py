"""Plug-ins of jobs of several roles: functions of other packages, called when a job is submitted and by its masters.

A package provides a plug-in by an entry point of the group `dlrover_hooks.plugins`, which names a module or an object
with one or more functions of `JobPlugin`. All installed plug-ins are used, unless DLROVER_HOOKS_PLUGINS selects some.
"""

from __future__ import annotations

import copy
import inspect
import logging
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple, Protocol

import msgspec

from dlrover_hooks.errors import HooksError, UsageError
from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.job.platform import EndedWorker
from dlrover_hooks.job.spec import JobSpec, printable, variable_problems
from dlrover_hooks.protocol import FailurePolicy, RoleEvent, RolePlugin

log = logging.getLogger("dlrover_hooks.job")

GROUP = "dlrover_hooks.plugins"
CALL_S = 10.0
"""Timeout of each call in seconds, except of `relaunch_nodes`, which has `RELAUNCH_S`."""
RELAUNCH_S = 900.0
_IMPORT = "import"
_NONE = "none"
_MOST_TEXT = 4000
"""Longer texts of failures are cut."""


class JobPlugin(Protocol):
    """The functions that a plug-in may have. A plug-in needs at least one of them.

    If a call raises, exceeds its timeout (10 s; `relaunch_nodes`: 15 min) or returns an invalid value, the failure is
    logged and counted in the status of the job, and the call has no effect. After a timeout that process calls no
    function of the plug-in again. Plug-ins are called in the order of their names. Each call runs on a thread of its
    own, while its caller waits.
    """

    def prepare_job(self, spec: JobSpec) -> JobSpec:
        """Return a changed job: resources, environment, placement. Called in the process that submits the job.

        The result must have the same name and pass `JobSpec.checked`. It is the argument of the next plug-in.
        """
        ...

    def worker_env(self, spec: JobSpec, role: str, rank: int) -> Mapping[str, str]:
        """Return variables of a worker. Called in the SubMaster of its role, once for each life, before it is started.

        Variables in `spec` take precedence over these.
        """
        ...

    def on_worker_ended(self, job: str, role: str, end: EndedWorker) -> FailurePolicy | None:
        """Choose the policy for a worker that ended before it was done; None: that of its role.

        Called in the SubMaster of the role. The first result that is not None is used, within the same budgets. Not
        called for a worker that missed its heartbeats or did not register in time: there the role's policy applies.
        """
        ...

    def on_event(self, job: str, event: RoleEvent) -> None:
        """Observe an event of the job. Called in the PrimeMaster, in the order of the events.

        Not called for failures of plug-ins, nor for events that happened while no PrimeMaster was running.
        """
        ...

    def relaunch_nodes(self, job: str, nodes: tuple[str, ...]) -> Collection[str]:
        """Replace or restart nodes on which too many workers failed, and return those that were. Called in the
        PrimeMaster.

        The failures of the returned nodes no longer count, and workers may be started on them again.
        """
        ...


FUNCTIONS = tuple(name for name, value in vars(JobPlugin).items() if inspect.isfunction(value) and name[0] != "_")


class PluginFailure(NamedTuple):
    """A failed call of a plug-in. `function` is "import" if the plug-in could not be imported."""

    plugin: str
    function: str
    detail: str


def select(selection: str | None) -> list[str]:
    """Names of the installed plug-ins to use, sorted.

    Args:
        selection: names separated by commas. A `-` before a name excludes that plug-in. "none": no plug-in. None or
            empty: all.

    Raises:
        UsageError: it names a plug-in that is not installed.
    """
    found = {one.name for one in entry_points(group=GROUP)}
    given = [one.strip() for one in (selection or "").split(",") if one.strip()]
    if given == [_NONE]:
        return []
    wanted = {one for one in given if not one.startswith("-")}
    if missing := sorted(wanted - found):
        raise UsageError(
            f"DLROVER_HOOKS_PLUGINS names {', '.join(map(repr, missing))}: no plug-in of that name is installed here",
            hint=f"installed are {', '.join(sorted(found)) or 'none'}",
        )
    return sorted((wanted or found) - {one.removeprefix("-") for one in given if one.startswith("-")})


class JobPlugins:
    """The plug-ins of a job, imported in one of its processes.

    The methods log what a plug-in raises and do not raise it. A method takes at most `call_s` for each plug-in.

    Args:
        job: name of the job.
        names: names of the plug-ins.
        failed: called with each failure, on the thread that called the method.
        call_s: timeout of each call in seconds.
    """

    def __init__(
        self,
        job: str,
        names: Iterable[str],
        failed: Callable[[PluginFailure], object],
        *,
        call_s: float = CALL_S,
    ) -> None:
        self._job, self._failed, self._call_s = job, failed, call_s
        self._functions = dict[str, dict[str, Callable[..., Any]]]()
        for name in names:
            self._functions[name] = {}
            self._functions[name] = self._call(name, _IMPORT, partial(_loaded, name)) or {}

    def listed(self) -> tuple[RolePlugin, ...]:
        """All plug-ins, including those that could not be imported."""
        return tuple(RolePlugin(name, tuple(functions)) for name, functions in self._functions.items())

    def have(self, function: str) -> bool:
        """Whether one of the plug-ins has this function."""
        return any(function in one for one in self._functions.values())

    def prepared(self, spec: JobSpec) -> JobSpec:
        """The job after all `prepare_job` functions."""
        for plugin in self._with("prepare_job"):
            spec = self._call(plugin, "prepare_job", partial(self._changed, plugin, spec)) or spec
        return spec

    def environment(self, spec: JobSpec, role: str, rank: int) -> dict[str, str]:
        """Variables of a worker. If two plug-ins set the same variable, the later plug-in takes precedence."""
        found = dict[str, str]()
        for plugin in self._with("worker_env"):
            found |= self._call(plugin, "worker_env", partial(self._variables, plugin, spec, role, rank)) or {}
        return found

    def policy(self, role: str, end: EndedWorker) -> FailurePolicy | None:
        """The policy for the end of a worker; None: no plug-in chooses one."""
        for plugin in self._with("on_worker_ended"):
            found = self._call(plugin, "on_worker_ended", partial(self._chosen, plugin, role, end))
            if found is not None:
                return found
        return None

    def tell(self, event: RoleEvent) -> None:
        """Pass an event to all `on_event` functions."""
        for plugin in self._with("on_event"):
            self._call(plugin, "on_event", partial(self._functions[plugin]["on_event"], self._job, event))

    def relaunched(self, nodes: tuple[str, ...]) -> tuple[str, ...]:
        """Have nodes relaunched; returns those that were. Takes at most `RELAUNCH_S` for each plug-in."""
        done = set[str]()
        for plugin in self._with("relaunch_nodes"):
            left = tuple(one for one in nodes if one not in done)
            if left:
                call = partial(self._replaced, plugin, left)
                done |= self._call(plugin, "relaunch_nodes", call, RELAUNCH_S) or set()
        return tuple(one for one in nodes if one in done)

    # ---- one call ----------------------------------------------------------------------------------------------------

    def _with(self, function: str) -> Iterator[str]:
        yield from [name for name, functions in self._functions.items() if function in functions]

    def _changed(self, plugin: str, spec: JobSpec) -> JobSpec:
        # a copy: a call that fails has no effect, even if it changed dicts of the job
        found = self._functions[plugin]["prepare_job"](copy.deepcopy(spec))
        if not isinstance(found, JobSpec) or found.name != spec.name:
            raise TypeError(f"it returned {found!r:.200}, not a JobSpec with the name {spec.name!r}")
        return copy.deepcopy(found.checked())

    def _variables(self, plugin: str, spec: JobSpec, role: str, rank: int) -> dict[str, str]:
        given = self._functions[plugin]["worker_env"](copy.deepcopy(spec), role, rank)
        found = msgspec.convert(dict(given), dict[str, str])
        if problems := variable_problems(found):
            raise ValueError("; ".join(problems))
        return found

    def _chosen(self, plugin: str, role: str, end: EndedWorker) -> FailurePolicy | None:
        found = self._functions[plugin]["on_worker_ended"](self._job, role, end)
        if found is not None and not isinstance(found, FailurePolicy):
            raise TypeError(f"it returned {found!r:.200}, not a FailurePolicy or None")
        return found

    def _replaced(self, plugin: str, nodes: tuple[str, ...]) -> set[str]:
        found = set(self._functions[plugin]["relaunch_nodes"](self._job, nodes))
        return {one for one in nodes if one in found}

    def _call(self, plugin: str, function: str, call: Callable[[], Any], timeout_s: float | None = None) -> Any:
        """What `call` returns; None if it failed. It runs on a thread of its own, so that a timeout can abandon it."""
        answers, raised = list[Any](), list[tuple[str, str]]()

        def run() -> None:
            try:
                answers.append(call())
            except BaseException as error:  # KeyboardInterrupt and SystemExit, too: a plug-in does not end a process
                raised.append(_failure_texts(error))

        thread = BackgroundThread(f"dlrover-hooks-plugin-{plugin}", run, where=f"job {self._job}", on_error="warn")
        thread.start()
        limit_s = self._call_s if timeout_s is None else timeout_s
        if thread.join(limit_s) and answers:
            return answers[0]
        problem, trace = f"it did not return within {limit_s:g} s; this process does not call the plug-in again", ""
        if raised:
            problem, trace = raised[0]
        else:
            self._functions[plugin] = {}
        log.warning("job %s: %s of plug-in %s failed: %s%s", self._job, function, plugin, problem, trace)
        self._failed(PluginFailure(plugin, function, problem))
        return None


def _failure_texts(error: BaseException) -> tuple[str, str]:
    """What a plug-in raised, and the traceback for the log. The text of an exception of a plug-in may raise, too.

    Called on the thread of the call, so that its timeout applies.
    """
    try:
        said = str(error)
    except BaseException as second:
        said = f"its text could not be made: {type(second).__name__}"
    known = isinstance(error, HooksError)
    kind = type(error).__name__
    problem = printable(said if known else f"{kind}: {said}" if said else kind)[:_MOST_TEXT]
    try:
        trace = "" if known else printable("\n" + "".join(traceback.format_exception(error)).rstrip())
    except BaseException:  # attributes of the exception, such as its notes
        trace = ""
    return problem, trace


def _loaded(name: str) -> dict[str, Callable[..., Any]]:
    """The functions of a plug-in. Raises UsageError if it is not installed here or has no usable function."""
    points: list[EntryPoint] = list(entry_points(group=GROUP, name=name))
    if not points:
        raise UsageError(f"the plug-in {name!r} is not installed in this process", hint="install it on every node")
    plugin = points[0].load()
    found = {one: getattr(plugin, one) for one in FUNCTIONS if hasattr(plugin, one)}
    if not found:
        raise UsageError(f"{points[0].value} has none of the functions {', '.join(FUNCTIONS)}")
    for function, value in found.items():
        _check(points[0].value, function, value)
    return found


def _check(where: str, function: str, value: Any) -> None:
    wanted = list(inspect.signature(getattr(JobPlugin, function)).parameters)[1:]
    if not callable(value):
        raise UsageError(f"{where}: {function} is not a function")
    try:
        inspect.signature(value).bind(*wanted)
    except TypeError:
        raise UsageError(f"{where}: {function} must take ({', '.join(wanted)})") from None
