"""Passes new events and failed nodes to plug-ins, in the PrimeMaster."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable

from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.job.plugins import CALL_S, JobPlugins, PluginFailure
from dlrover_hooks.protocol import Message, NodesRelaunched, PluginFailed, RoleEvent, Roles

_FAILED = "plugin"
"""The kind of event that a failed plug-in causes. Plug-ins do not get such events: a plug-in that fails for each event
would cause events endlessly."""


class PluginEvents:
    """Calls plug-ins on two threads of its own, so that a slow plug-in does not delay the PrimeMaster.

    Call `follow` and `finish` on one thread.

    Args:
        job: name of the job.
        incarnation: incarnation of the PrimeMaster.
        names: names of the plug-ins.
        note: sends an event to the master; called on any thread.
    """

    def __init__(self, job: str, incarnation: str, names: Iterable[str], note: Callable[[Message], object]) -> None:
        self._job, self._incarnation, self._note = job, incarnation, note
        self._plugins = JobPlugins(job, names, self._failed)
        self._events: queue.SimpleQueue[RoleEvent | None] = queue.SimpleQueue()
        self._nodes: queue.SimpleQueue[tuple[str, ...] | None] = queue.SimpleQueue()
        self._seen, self._asked = 0, set[str]()
        where = f"job {job}"
        self._threads = {
            "on_event": BackgroundThread(
                "dlrover-hooks-plugin-events", self._tell, where=where, wake=lambda: self._events.put(None)
            ),
            "relaunch_nodes": BackgroundThread(
                "dlrover-hooks-plugin-nodes", self._relaunch, where=where, wake=lambda: self._nodes.put(None)
            ),
        }

    def begin(self, roles: Roles, *, again: bool) -> None:
        """Start the threads that are needed. `again`: skip the events so far, which an earlier PrimeMaster handled."""
        if again:
            self._seen = roles.dropped + len(roles.events)
        for function, thread in self._threads.items():
            if self._plugins.have(function):
                thread.start()

    def follow(self, roles: Roles) -> None:
        """Pass on the events and failed nodes in `roles` that are new since the last call."""
        if self._threads["on_event"].started:
            for event in roles.events[max(0, self._seen - roles.dropped) :]:
                if event.kind != _FAILED:
                    self._events.put(event)
            self._seen = roles.dropped + len(roles.events)
        if self._threads["relaunch_nodes"].started:
            bad = tuple(one for one in roles.avoid if one not in self._asked)
            self._asked = set(roles.avoid)
            if bad:
                self._nodes.put(bad)

    def finish(self, roles: Roles) -> None:
        """Pass on the last events, and wait until plug-ins have handled them, at most `CALL_S` seconds."""
        self.follow(roles)
        deadline = time.monotonic() + CALL_S
        self._threads["relaunch_nodes"].stop(0.0)
        self._threads["on_event"].stop(max(0.0, deadline - time.monotonic()))

    def _failed(self, failure: PluginFailure) -> None:
        self._note(PluginFailed(self._job, self._incarnation, *failure))

    def _tell(self) -> None:
        while (event := self._events.get()) is not None:
            self._plugins.tell(event)

    def _relaunch(self) -> None:
        while (nodes := self._nodes.get()) is not None:
            done = self._plugins.relaunched(nodes)
            if done:
                self._note(NodesRelaunched(self._job, self._incarnation, done))
