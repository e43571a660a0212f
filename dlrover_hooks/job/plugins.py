"""Plug-ins of jobs of several roles: functions of other packages that the masters of a job call.

A package offers a plug-in by an entry point of the group `dlrover_hooks.plugins`. It names a module or an object with
some of the functions of `JobPlugin`. All that are installed are used, unless DLROVER_HOOKS_PLUGINS says otherwise.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple, Protocol

import msgspec

from dlrover_hooks.errors import HooksError, UsageError
from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.job.platform import EndedWorker
from dlrover_hooks.job.spec import JobSpec
from dlrover_hooks.protocol import FailurePolicy, RoleEvent, RolePlugin

log = logging.getLogger("dlrover_hooks.job")

GROUP = "dlrover_hooks.plugins"
CALL_S = 10.0
"""A function must return within so many seconds; `relaunch_nodes` within `RELAUNCH_S`."""
RELAUNCH_S = 900.0
_IMPORT = "import"
_NONE = "none"


class JobPlugin(Protocol):
    """The functions that a plug-in may have. Each of them may be missing.

    A function that raises, does not return in time, or returns something else than it must, is logged, counted in the
    status of the job, and ignored. After one that did not return in time, the process that called it calls no function
    of that plug-in any more. Plug-ins are called in the order of their names.
    """

    def prepare_job(self, spec: JobSpec) -> JobSpec:
        """Change a job before it is submitted: resources, environment, placement. In the process that submits it.

        The result has the same name, and passes `JobSpec.checked`. The next plug-in gets it.
        """
        ...

    def worker_env(self, spec: JobSpec, role: str, rank: int) -> Mapping[str, str]:
        """Variables of a worker that is about to be started. In the SubMaster of its role. Those of `spec` win."""
        ...

    def on_worker_ended(self, job: str, role: str, end: EndedWorker) -> FailurePolicy | None:
        """What is to follow when a worker ended before it was done; None: what its role says. In its SubMaster.

        The first answer that is not None counts. Budgets apply to it as to that of the role. It is not asked about a
        worker that the master declared dead for want of heartbeats: that follows what the role says.
        """
        ...

    def on_event(self, job: str, event: RoleEvent) -> None:
        """Each event of the job, in order, on one thread of the PrimeMaster. What happened while that was away, and
        what is about plug-ins themselves, is left out."""
        ...

    def relaunch_nodes(self, job: str, nodes: tuple[str, ...]) -> Collection[str]:
        """Replace or restart nodes on which too many workers failed; returns those for which that was done. On another
        thread of the PrimeMaster. Their failures do not count any more, and workers may be started on them again."""
        ...


FUNCTIONS = tuple(name for name, value in vars(JobPlugin).items() if inspect.isfunction(value) and name[0] != "_")


class PluginFailure(NamedTuple):
    """How a function of a plug-in failed; `function` is "import" for the plug-in itself."""

    plugin: str
    function: str
    detail: str


def select(selection: str | None) -> list[str]:
    """Names of the installed plug-ins that are to be used, in order.

    Args:
        selection: names that are separated by commas. With a `-` before each, all others are used; "none": none is.
            None or empty: all.

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
    """The plug-ins of a job, as one process of it has loaded them.

    Its methods never raise what a plug-in raises. Each may take `CALL_S` for each plug-in.

    Args:
        job: its name.
        names: of the plug-ins.
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
        """All of them, also those that could not be imported."""
        return tuple(RolePlugin(name, tuple(functions)) for name, functions in self._functions.items())

    def have(self, function: str) -> bool:
        """One of them has this function."""
        return any(function in one for one in self._functions.values())

    def prepared(self, spec: JobSpec) -> JobSpec:
        """The job as the plug-ins want it."""
        for plugin in self._with("prepare_job"):
            spec = self._call(plugin, "prepare_job", partial(self._changed, plugin, spec)) or spec
        return spec

    def environment(self, spec: JobSpec, role: str, rank: int) -> dict[str, str]:
        """Variables of a worker. Of two plug-ins that set the same one, the later wins."""
        found = dict[str, str]()
        for plugin in self._with("worker_env"):
            found |= self._call(plugin, "worker_env", partial(self._variables, plugin, spec, role, rank)) or {}
        return found

    def policy(self, role: str, end: EndedWorker) -> FailurePolicy | None:
        """What is to follow the end of a worker; None: no plug-in says so."""
        for plugin in self._with("on_worker_ended"):
            found = self._call(plugin, "on_worker_ended", partial(self._chosen, plugin, role, end))
            if found is not None:
                return found
        return None

    def tell(self, event: RoleEvent) -> None:
        """Give an event to all that want it."""
        for plugin in self._with("on_event"):
            self._call(plugin, "on_event", partial(self._functions[plugin]["on_event"], self._job, event))

    def relaunched(self, nodes: tuple[str, ...]) -> tuple[str, ...]:
        """Have nodes relaunched: those for which that was done. May take `RELAUNCH_S` for each plug-in."""
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
        found = self._functions[plugin]["prepare_job"](spec)
        if not isinstance(found, JobSpec) or found.name != spec.name:
            raise TypeError(f"it returned {found!r:.200}, not a JobSpec with the name {spec.name!r}")
        return found.checked()

    def _variables(self, plugin: str, spec: JobSpec, role: str, rank: int) -> dict[str, str]:
        return msgspec.convert(dict(self._functions[plugin]["worker_env"](spec, role, rank)), dict[str, str])

    def _chosen(self, plugin: str, role: str, end: EndedWorker) -> FailurePolicy | None:
        found = self._functions[plugin]["on_worker_ended"](self._job, role, end)
        if found is not None and not isinstance(found, FailurePolicy):
            raise TypeError(f"it returned {found!r:.200}, not a FailurePolicy or None")
        return found

    def _replaced(self, plugin: str, nodes: tuple[str, ...]) -> set[str]:
        return set(self._functions[plugin]["relaunch_nodes"](self._job, nodes)) & set(nodes)

    def _call(self, plugin: str, function: str, call: Callable[[], Any], timeout_s: float | None = None) -> Any:
        """What `call` returns; None if it failed. It runs on a thread of its own: a call that hangs is abandoned."""
        answers, raised = list[Any](), list[BaseException]()

        def run() -> None:
            try:
                answers.append(call())
            except (Exception, SystemExit) as error:
                raised.append(error)

        thread = BackgroundThread(f"dlrover-hooks-plugin-{plugin}", run, where=f"job {self._job}", on_error="warn")
        thread.start()
        limit_s = self._call_s if timeout_s is None else timeout_s
        if thread.join(limit_s) and answers:
            return answers[0]
        problem, trace = f"it did not return within {limit_s:g} s; this process calls this plug-in no more", None
        if raised:
            known = isinstance(raised[0], HooksError)
            problem = str(raised[0]) if known else f"{type(raised[0]).__name__}: {raised[0]}"
            trace = None if known else raised[0]
        else:
            self._functions[plugin] = {}
        log.warning("job %s: %s of plug-in %s failed: %s", self._job, function, plugin, problem, exc_info=trace)
        self._failed(PluginFailure(plugin, function, problem))
        return None


def _loaded(name: str) -> dict[str, Callable[..., Any]]:
    """The functions of a plug-in. Raises UsageError: it is not installed here, or has no usable function."""
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
