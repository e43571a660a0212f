"""Starts and ends the nodes of a job as actors of Ray."""

from __future__ import annotations

import enum
import logging
import math
import signal
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
import ray
from ray.exceptions import ActorUnavailableError, RayError

from dlrover_hooks.errors import LaunchError, UsageError
from dlrover_hooks.host.child_process import described
from dlrover_hooks.integrations.ray.cluster_state import NAMESPACE, actor_name, end_of_actor
from dlrover_hooks.integrations.ray.node_actor import CONCURRENCY_GROUPS, NodeActor
from dlrover_hooks.protocol import Node, NodeExit
from dlrover_hooks.scalers.node_reconciler import StartRetries
from dlrover_hooks.scalers.process_scaler import GRACE_S
from dlrover_hooks.scalers.reconciling_scaler import ReconcilingScaler

log = logging.getLogger("dlrover_hooks.scaler")

_TURN_S, _AGAIN_S, _GET_S = 0.2, 0.5, 5.0
_ANSWER_S = 10.0
"""An actor is killed if its command has not ended this many seconds after the grace period."""


class _Question(enum.IntEnum):
    """The kinds of pending calls to an actor. Answers that arrive together are handled in this order."""

    READY = 1
    BEGUN = 2
    OVER = 3
    HELD = 4


class _FollowedActor(msgspec.Struct):
    """`handle`: Ray keeps the actor while a handle exists. `kill_at`: on the clock of `time.monotonic`."""

    handle: Any
    placed: bool = False
    """It was asked to start its command."""
    dropped: bool = False
    """It was killed before that request."""
    kill_at: float = math.inf
    outcome: tuple[int | None, str] | None = None


class ActorScaler(ReconcilingScaler):
    """Runs each node as an actor of Ray, which runs the command of the node as a process in its own session.

    An actor reserves `config_resource` of its node: cores, memory and GPUs. Ray reserves these amounts when it places
    the actor, does not enforce cores and memory, and cannot change them: a running node keeps its reservation,
    whatever a plan says, until another node of its name is started. A node without room stays STARTING until there is
    room. If the command cannot be run, for example because there is no such program, it is not tried again
    (`NodeExit.NEVER_STARTED`).

    A node is removed by SIGTERM to its process. After `grace_s` its entire session is killed, and its actor too if it
    does not answer. A node whose actor has died is `NodeExit.KILLED`. If Ray has lost the machine, `detail` says so;
    Ray declares this after about 18 s. If the machine only hangs, processes there may run longer.

    `start` raises `UsageError` if this process is not connected to a Ray cluster.

    No actor outlives this process: when it ends, Ray kills the actors, and the kernel kills the processes that the
    actors have started. Children of these processes must end by themselves, as workers of `dlrover-hooks run` do.

    Args:
        job: name of the job. The actors are named `JOB/node/...`, in the namespace `dlrover_hooks`.
        command_of: returns the command of a node. Called on several threads; an exception is a failed start.
        environment_of: returns variables of a node in addition to those of its actor's process. Called on several
            threads.
        user_errors: exit codes that mean that the user's program or a setting is wrong (`NodeExit.USER_ERROR`).
        grace_s: seconds between SIGTERM and SIGKILL for a node that a plan removes.
        starts_at_once: how many nodes are started at the same time.
        retries: when failed starts are tried again.
    """

    killed_s = 2 * _ANSWER_S

    def __init__(
        self,
        job: str,
        command_of: Callable[[Node], Sequence[str]],
        environment_of: Callable[[Node], Mapping[str, str]],
        *,
        user_errors: Collection[int] = (),
        grace_s: float = GRACE_S,
        starts_at_once: int = 8,
        retries: StartRetries | None = None,
    ) -> None:
        super().__init__(job, starts_at_once=starts_at_once, retries=retries)
        self._command_of, self._environment_of = command_of, environment_of
        self._user_errors, self._usual_grace_s = frozenset(user_errors), grace_s
        self._life = uuid.uuid4().hex[:8]
        """Part of the names of the actors, because actors of an earlier scaler of the job may still be ending."""
        self._actors: dict[int, _FollowedActor] = {}
        """By launch. Guarded by `_changed`, like `_asked` and `_closed`."""
        self._asked: dict[Any, tuple[int, _Question]] = {}
        self._closed = False
        self._threads.append(self._thread("watch", self._watch))

    # ---- of ReconcilingScaler ---------------------------------------------------------------------------------------

    def _open(self) -> None:
        if not ray.is_initialized():
            raise UsageError(
                f"job {self._job}: nodes cannot be started as actors, because this process is not connected to Ray",
                hint="call ray.init(address=...) before the scaler is started",
            )

    def _create(self, launch: int, node: Node) -> bool:
        command = [str(word) for word in self._command_of(node)]
        environment = dict(self._environment_of(node))
        if not ray.is_initialized():
            raise LaunchError(f"{node.name}: this process is no longer connected to Ray")
        actors: Any = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(NodeActor)  # pyright: ignore[reportCallIssue]
        handle = actors.options(**self._options(launch, node)).remote(node.name, command, environment)
        try:
            self._follow(launch, node, handle)
        except BaseException:
            ray.kill(handle)
            raise
        return False

    def _follow(self, launch: int, node: Node, handle: Any) -> None:
        with self._changed:
            if self._closed:
                raise LaunchError(f"{node.name}: the scaler was stopped while the node was being started")
            held, ready = handle.hold.remote(), handle.ready.remote()
            self._actors[launch] = _FollowedActor(handle)
            self._asked |= {held: (launch, _Question.HELD), ready: (launch, _Question.READY)}
            self._changed.notify_all()

    def _options(self, launch: int, node: Node) -> dict[str, Any]:
        """Options of an actor that is not detached: Ray kills it when this process ends.

        A detached actor would continue after a crash of this process, and would have to be found and killed later.
        """
        has = node.config_resource
        name = actor_name(self._job, "node", node.name, f"{self._life}-{launch}")
        options: dict[str, Any] = {"name": name, "namespace": NAMESPACE, "max_restarts": 0, "num_cpus": has.cpu}
        if has.memory:
            options["memory"] = has.memory << 20
        if has.gpu_num:
            options["num_gpus"] = has.gpu_num
        return options

    def _remove(self, launch: int, node: Node, grace_s: float | None) -> None:
        grace = self._usual_grace_s if grace_s is None else grace_s
        with self._changed:
            actor = self._actors.get(launch)
            if actor is None or not ray.is_initialized():
                return  # the watch thread reports its end
            if actor.placed:
                actor.kill_at = min(actor.kill_at, time.monotonic() + grace + _ANSWER_S)
                actor.handle.end.remote(grace)
            else:  # it may never have room
                actor.dropped = True
                ray.kill(actor.handle)

    def _resize(self, launch: int, node: Node) -> None:
        """Does nothing: Ray cannot change the reservation of an actor."""

    def _close(self) -> None:
        with self._changed:
            self._closed = True
            left, self._actors, self._asked = list(self._actors.values()), {}, {}
        if ray.is_initialized():
            for actor in left:
                ray.kill(actor.handle)

    # ---- the watch thread -------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._over:
            with self._changed:
                if not self._asked:
                    self._changed.wait(_TURN_S)
                asked = list(self._asked)
            if not ray.is_initialized():  # in this state most functions of Ray would start a new cluster
                self._all_gone()
            elif asked:
                for reference in self._answered(asked):
                    self._take(reference)
                self._kill_late()

    def _answered(self, asked: list[Any]) -> list[Any]:
        """The calls that have an answer. Waits at most `_TURN_S` for the first, because more may be added meanwhile."""
        if not ray.wait(asked, timeout=_TURN_S, fetch_local=False)[0]:
            return []
        found = ray.wait(asked, num_returns=len(asked), timeout=0, fetch_local=False)[0]
        with self._changed:
            known = [(self._asked[one][1], one) for one in found if one in self._asked]
        return [one for _, one in sorted(known, key=lambda pair: pair[0])]

    def _take(self, reference: Any) -> None:
        with self._changed:
            launch, question = self._asked.pop(reference, (0, _Question.READY))
            actor = self._actors.get(launch)
        if actor is None:
            return
        answer, error = _result(reference)
        if isinstance(error, ActorUnavailableError):
            self._ask_later(launch, question)
        elif error is None:
            self._answer(launch, actor, question, answer)
        elif question is _Question.HELD:
            self._gone(launch, actor, error)
        elif question is _Question.OVER:
            log.debug("job %s: an actor did not report how its command ended: %s", self._job, error)
            ray.kill(actor.handle)

    def _answer(self, launch: int, actor: _FollowedActor, question: _Question, answer: Any) -> None:
        if question is _Question.READY:  # the command is requested only now: an actor killed earlier has not started it
            with self._changed:
                if not actor.dropped:
                    actor.placed = True
                    self._ask(launch, _Question.BEGUN)
                    self._ask(launch, _Question.OVER)
        elif question is _Question.BEGUN and answer:
            self._runs(launch)
        elif question is _Question.OVER:
            actor.outcome = answer
            ray.kill(actor.handle)

    def _ask(self, launch: int, question: _Question) -> None:
        """The caller holds `_changed`."""
        handle = self._actors[launch].handle
        method = {_Question.READY: handle.ready, _Question.BEGUN: handle.begun, _Question.OVER: handle.run,
                  _Question.HELD: handle.hold}[question]  # fmt: skip
        self._asked[method.remote()] = (launch, question)

    def _ask_later(self, launch: int, question: _Question) -> None:
        """Repeat a call after a pause, when Ray could not tell whether the actor has ended or its network is down."""
        with self._changed:
            self._changed.wait_for(lambda: self._over, _AGAIN_S)
            if launch in self._actors:
                self._ask(launch, question)

    def _kill_late(self) -> None:
        now = time.monotonic()
        with self._changed:
            late = [actor for actor in self._actors.values() if actor.kill_at <= now]
            for actor in late:
                actor.kill_at = math.inf
        for actor in late:
            log.warning("job %s: killing an actor that has not ended its command in time", self._job)
            ray.kill(actor.handle)

    def _gone(self, launch: int, actor: _FollowedActor, error: RayError) -> None:
        """The actor has ended, and so has its command."""
        with self._changed:
            self._actors.pop(launch, None)
            self._asked = {one: of for one, of in self._asked.items() if of[0] != launch}
        if actor.outcome is None:
            self._ended(launch, NodeExit.KILLED, -signal.SIGKILL, end_of_actor(str(error)))
            return
        code, problem = actor.outcome
        if code is None:
            self._ended(launch, NodeExit.NEVER_STARTED, 0, problem)
        else:
            self._ended(launch, self._cause(code), code, "" if code == 0 else described(code))

    def _all_gone(self) -> None:
        """Report all nodes as killed: this process has disconnected from the cluster, and Ray has killed its actors."""
        with self._changed:
            left, self._actors, self._asked = list(self._actors), {}, {}
        for launch in left:
            self._ended(launch, NodeExit.KILLED, -signal.SIGKILL, "this process has disconnected from Ray")

    def _cause(self, code: int) -> NodeExit:
        if code == 0:
            return NodeExit.SUCCEEDED
        if code < 0:
            return NodeExit.KILLED
        return NodeExit.USER_ERROR if code in self._user_errors else NodeExit.ERROR


def _result(reference: Any) -> tuple[Any, RayError | None]:
    """The answer of a call, or its error.

    The traceback of the error is removed, because its frames would keep a handle of the actor until they are
    collected. If this process has connected to another cluster by then, Ray may mistake it for the handle of an actor
    there, and kill that actor.
    """
    try:
        return ray.get(reference, timeout=_GET_S), None
    except RayError as error:
        return None, error.with_traceback(None)
