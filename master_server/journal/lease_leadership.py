"""Which of several processes leads: the one that holds a `Lease` of Kubernetes and renews it.

A candidate takes a Lease that was not renewed for its duration, by its own clock since it saw the last renewal: the
clocks of machines need not agree. Every write names the version that was read, so of two candidates one is refused.
The leader stops by its own clock before another one may take the Lease.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import threading
import time
from collections.abc import Callable

from dlrover_hooks.errors import KubernetesFailed
from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.kubernetes.api_server import ApiServer, Manifest
from dlrover_hooks.kubernetes.node_pods import CONFLICT, NOT_FOUND

log = logging.getLogger("dlrover_hooks.operator")
TTL_S = 15
"""Duration of the Lease in seconds, as controllers of Kubernetes have it."""
_RENEWALS, _MARGIN = 6, 0.9
"""Renewals within a duration; the share of it after which the leader stops to act."""


class LeaseElection:
    """One candidate's view of the Lease. Pure: `now` is given, in seconds of a clock that never goes back.

    Args:
        me: identity of the candidate, unique for each process.
        ttl_s: duration of the Lease while this candidate holds it, in seconds.
    """

    def __init__(self, me: str, ttl_s: int) -> None:
        self._me, self._ttl_s = me, ttl_s
        self._version, self._since = "", 0.0
        """The version of the Lease that was seen last, and when it was seen first."""

    def claim(self, lease: Manifest | None, now: float, utc: str) -> Manifest | None:
        """The `spec` to write, which makes or keeps this candidate the leader; None: another one leads.

        `lease`: as it was read at `now`; None: there is none. `utc`: now, RFC 3339 with microseconds.
        """
        spec = lease["spec"] if lease is not None else {}
        holder, took = spec.get("holderIdentity") or "", spec.get("acquireTime")
        transitions = int(spec.get("leaseTransitions") or 0)
        if holder != self._me:
            version = lease["metadata"]["resourceVersion"] if lease is not None else ""
            if version != self._version:
                self._version, self._since = version, now
            if holder and now - self._since < float(spec.get("leaseDurationSeconds") or self._ttl_s):
                return None
            took, transitions = utc, transitions + 1
        return {
            "holderIdentity": self._me, "leaseDurationSeconds": self._ttl_s, "acquireTime": took, "renewTime": utc,
            "leaseTransitions": transitions,
        }  # fmt: skip


class LeaseLeadership:
    """A `Leadership`: this process's candidacy for the Lease `name`.

    Args:
        api: the cluster.
        namespace: of the Lease.
        name: of the Lease; it is created if there is none.
        me: identity of this process, such as the name of its Pod and a random number.
        lost: called on another thread, perhaps several times, when the leadership is lost; not after `resign`.
    """

    def __init__(
        self, api: ApiServer, namespace: str, name: str, me: str, lost: Callable[[], None], *, ttl_s: int = TTL_S
    ) -> None:
        self.leader, self._number = "", 0
        self._api, self._me, self._lost, self._ttl_s = api, me, lost, ttl_s
        self._leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name, self._election = name, LeaseElection(me, ttl_s)
        self._until = 0.0
        self._thread = BackgroundThread(
            "dlrover-hooks-lease", self._keep, where=f"lease {namespace}/{name}", on_error="warn", again_s=0.0,
            failed=lambda error: self._give_up(),
        )  # fmt: skip

    @property
    def epoch(self) -> int:
        """See `Leadership`: how often the Lease has changed hands."""
        return self._number

    def holds(self) -> bool:
        """See `Leadership`: no other candidate can have taken the Lease."""
        return _now() < self._until

    def campaign(self, stop: threading.Event, meanwhile: Callable[[], None]) -> bool:
        """See `Leadership`. Errors of the API server are logged once and tried again.

        Raises `KubernetesFailed` if this account may not use the Lease.
        """
        said = False
        while not stop.is_set():
            try:
                if self._claimed():
                    self._thread.start()
                    return True
                said = False
            except KubernetesFailed as error:
                if error.code in (401, 403, 422):
                    raise
                if not said:
                    log.warning("this standby cannot follow: %s Trying on", error)
                said = True
            meanwhile()
            stop.wait(self._ttl_s / _RENEWALS)
        return False

    def resign(self) -> None:
        """See `Leadership`."""
        held, self._until = self.holds(), 0.0
        self._thread.stop()
        if held:
            with contextlib.suppress(KubernetesFailed):  # it expires
                lease = self._api.get(f"{self._leases}/{self._name}")
                if lease["spec"].get("holderIdentity") == self._me:
                    lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                    self._api.replace(f"{self._leases}/{self._name}", lease)

    def _claimed(self) -> bool:
        """Make or keep this process the leader. Raises KubernetesFailed."""
        sent = _now()
        try:
            lease = self._api.get(f"{self._leases}/{self._name}")
        except KubernetesFailed as error:
            if error.code != NOT_FOUND:
                raise
            lease = None
        utc = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = self._election.claim(lease, _now(), utc)
        if spec is None:
            self.leader = lease["spec"]["holderIdentity"] if lease is not None else ""
            return False
        try:
            if lease is None:
                self._api.create(self._leases, {"metadata": {"name": self._name}, "spec": spec})
            else:
                self._api.replace(f"{self._leases}/{self._name}", lease | {"spec": spec})
        except KubernetesFailed as error:
            if error.code != CONFLICT:
                raise
            return False
        self.leader, self._number, self._until = self._me, spec["leaseTransitions"], sent + _MARGIN * self._ttl_s
        return True

    def _keep(self) -> None:
        while not self._thread.stopping.wait(self._ttl_s / _RENEWALS):
            if not self.holds():
                return self._give_up()
            try:
                if not self._claimed() and self.leader != self._me:
                    return self._give_up()
            except KubernetesFailed as error:
                log.warning("the Lease was not renewed: %s", error)

    def _give_up(self) -> None:
        self._until = 0.0
        if not self._thread.stopping.is_set():
            self._lost()


def _now() -> float:
    """Seconds that go on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
