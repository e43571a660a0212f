"""`python -m dlrover_hooks.launcher.elastic_job`: what runs in the master Pod of an `ElasticJob`.

It serves the job's master, restarts it when it dies, and has the operator create and delete Pods for the nodes that
the master lists. When it ends before the job does, the Pods go on; the next one in its place finds them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import sys
import uuid
from types import FrameType

import click
import msgspec

from dlrover_hooks import config as settings, protocol as p
from dlrover_hooks.client import MasterClient
from dlrover_hooks.errors import HooksError, MasterAway, MasterError
from dlrover_hooks.host.ports import listen
from dlrover_hooks.kubernetes import custom_resources, names
from dlrover_hooks.kubernetes.api_server import ApiServer, Manifest
from dlrover_hooks.kubernetes.elastic_job_spec import CERTIFICATE, ElasticJobSpec, job_spec
from dlrover_hooks.kubernetes.list_watch import ListWatch
from dlrover_hooks.kubernetes.object_cache import ObjectChange
from dlrover_hooks.launcher.departure_notices import DepartureNotices
from dlrover_hooks.launcher.failures.restart_budget import Over
from dlrover_hooks.launcher.failures.verdict import GAVE_UP, USAGE, USER_ERROR
from dlrover_hooks.launcher.master_endpoint import Endpoint
from dlrover_hooks.launcher.nodes.node_host import NodeHost
from dlrover_hooks.launcher.processes.services import Served, Services, temporary_journal
from dlrover_hooks.launcher.running_jobs import listed
from dlrover_hooks.launcher.tasks.task_pods import TaskPods
from dlrover_hooks.launcher.tasks.task_supervisor import TaskSupervisor
from dlrover_hooks.scalers.elastic_job_scaler import ElasticJobScaler

FAILED, ENDED = 70, 143
"""Exit codes: this process cannot go on, another one may; it was ended by SIGTERM. Every other one is the job's."""
LIST_S = 60.0
_LEAST_CODE, _MOST_CODE = 1, 127
_TASK_GRACE_S = 1.0
"""Of tasks that are stopped: a server has nothing to save, and a chief is stopped only if it does not answer."""
KEY = "DLROVER_HOOKS_MASTER_SSL_KEYFILE"
log = logging.getLogger("dlrover_hooks.run")


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--job", required=True, help="Name of the ElasticJob.")
@click.option("--namespace", required=True, help="Its namespace.")
@click.option("--port", default=8780, type=click.IntRange(0, 65535), help="Port of the master, on all addresses.")
@click.option("--host-ip", default="127.0.0.1", envvar="DLROVER_HOOKS_POD_IP", show_envvar=True, metavar="ADDRESS",
              help="Of this Pod: with a journal in etcd, where clients find the master that leads.")  # fmt: skip
@click.option("--journal", envvar="DLROVER_HOOKS_RUN_JOURNAL", show_envvar=True, metavar="FILE|etcd://HOST:2379/NAME",
              help="The master's journal: a file on a volume that outlives the Pod, or etcd, where NAME is of this job "
              "alone. Without it a master that lost its Pod knows neither progress nor plans: the workers go on from "
              "their newest checkpoint.")  # fmt: skip
@click.option("--ssl-certfile", default="", envvar=CERTIFICATE, show_envvar=True, metavar="FILE",
              help="The master serves HTTPS with this certificate, of 127.0.0.1 and its Service.")  # fmt: skip
@click.option("--ssl-keyfile", default="", envvar=KEY, show_envvar=True, metavar="FILE",
              help="Its key, if that is not in it.")  # fmt: skip
@click.option("--context", help="Of the kubeconfig file. Default: its current one, or the account of this Pod.")
@click.option(
    "--kubeconfig", type=click.Path(exists=True, dir_okay=False), help="Default: $KUBECONFIG, ~/.kube/config."
)
@click.option("--hang-timeout", default=60.0, metavar="SECONDS", help="A worker that is silent for so long hangs.")
def command(
    job: str, namespace: str, port: int, host_ip: str, journal: str | None, ssl_certfile: str, ssl_keyfile: str,
    context: str | None, kubeconfig: str | None, hang_timeout: float,
) -> None:  # fmt: skip
    """Serve the master of an ElasticJob and have its nodes started. Run by the operator, in the job's master Pod.

    Exit codes: 0 the job has succeeded, 70 it goes on under another master, 143 the same after SIGTERM; every other
    one is that of the job.
    """
    logging.basicConfig(format="[dlrover-hooks] %(message)s", level=logging.INFO, stream=sys.stderr)
    try:
        with contextlib.ExitStack() as owned:
            api = ApiServer(context, kubeconfig=kubeconfig)
            owned.callback(api.close)
            path = f"{custom_resources.path(namespace, custom_resources.ELASTIC_JOBS)}/{job}"
            host = ElasticJobHost(api, api.get(path), settings.load().token)
            listener = listen(port, "0.0.0.0")
            owned.callback(listener.close)
            scheme, known_as = "http", host_ip
            if ssl_certfile:  # it is for this name
                scheme, known_as = "https", names.service_host(names.master_name(job), namespace)
            advertise = Endpoint(known_as, listener.getsockname()[1], scheme).url
            found = journal or owned.enter_context(temporary_journal())
            code = host.run(Served(
                listener, found, journal is None, hang_timeout, host.brain, ssl_certfile, ssl_keyfile,
                advertise=advertise if "://" in found else "",
            ))  # fmt: skip
    except (HooksError, msgspec.ValidationError) as error:
        log.error("job %s/%s: %s", namespace, job, error)
        code = FAILED
    sys.exit(code)


def scaling_request(job: str, incarnation: str, spec: ElasticJobSpec) -> p.StartScaling:
    """How the master plans the nodes of this job. Raises `UsageError`."""
    return p.StartScaling(
        job, incarnation, spec.mode, spec.limits, ps=spec.has_ps, sizes=spec.sizes, keep_nodes=True,
        relaunches=spec.relaunches,
    )  # fmt: skip


class ElasticJobHost:
    """Main thread only: it handles SIGTERM.

    Args:
        api: the cluster.
        manifest: the `ElasticJob`. Raises `UsageError` if its spec makes no sense.
        token: of the master; None: it needs none.
    """

    def __init__(self, api: ApiServer, manifest: Manifest, token: str | None) -> None:
        meta = manifest["metadata"]
        self._api, self._manifest, self._token = api, manifest, token
        self._job, self._namespace, self._uid = str(meta["name"]), str(meta["namespace"]), str(meta["uid"])
        self._spec = job_spec(manifest)
        self._spec.check()
        self._incarnation = uuid.uuid4().hex
        self._request = scaling_request(self._job, self._incarnation, self._spec)
        self._wanted: dict[str, p.NodeGroupResource] | None = None
        """The user's numbers and sizes of nodes that the master was told last."""
        self._refused = ""
        """Why the newest spec is not carried out; used by the thread of the watch alone."""
        self._notices: DepartureNotices | None = None
        self._signal: int | None = None
        self._selector = selectors.DefaultSelector()

    @property
    def brain(self) -> str:
        """The address of the Brain; empty: there is none."""
        return self._spec.brain_service

    def run(self, served: Served) -> int:
        """Run until the job is over; the exit code. `served`: the master."""
        with contextlib.ExitStack() as owned:
            self._take_signals(owned)
            port = served.listener.getsockname()[1]
            url = f"{'https' if served.certificate else 'http'}://127.0.0.1:{port}"
            owned.enter_context(listed(self._job, url, self._token, tasks=self._spec.has_ps, planned=True))
            self._services = Services(self._job, "", self._token, served, (), self._selector, keeper=False)
            owned.callback(self._services.end)
            self._client = MasterClient(url, self._token, incarnation=self._incarnation)
            owned.callback(self._client.close)
            jobs = custom_resources.path(self._namespace, custom_resources.ELASTIC_JOBS)
            watch = ListWatch(self._api, jobs, self._changed, field_selector=f"metadata.name={self._job}")
            owned.callback(watch.stop)
            watch.start(LIST_S)
            scaler = ElasticJobScaler(self._manifest, self._api, grace_s=_TASK_GRACE_S if self._spec.has_ps else None,
                                      user_errors=(USER_ERROR, USAGE, GAVE_UP))  # fmt: skip
            log.info("job %s/%s: mode %s, %s, master at port %d", self._namespace, self._job, self._request.mode.value,
                     self._size(), port)  # fmt: skip
            self._notices = DepartureNotices(self._job, self._client, scaler, tasks=self._spec.has_ps)
            run = self._run_tasks if self._spec.has_ps else self._run_nodes
            code = run(scaler)
        if self._signal is not None or code in (0, ENDED):
            return code
        return code if _LEAST_CODE <= code <= _MOST_CODE and code != FAILED else USER_ERROR

    def _size(self) -> str:
        limits = self._request.limits
        workers = f"{limits.min_workers} to {limits.max_workers} workers"
        return (
            f"chief, {limits.min_ps} to {limits.max_ps} parameter servers, {workers}" if self._spec.has_ps else workers
        )

    def _run_nodes(self, scaler: ElasticJobScaler) -> int:
        """Of a job with launchers as nodes."""
        host = NodeHost(self._request, self._client, scaler, self._selector, self._look, leave=scaler.leave)
        return host.run()

    def _run_tasks(self, scaler: ElasticJobScaler) -> int:
        """Of a parameter server job."""
        code = ENDED
        scaler.start()
        try:
            pods = TaskPods(self._job, scaler, scaler.pod_name, self._selector)
            try:
                supervisor = TaskSupervisor(
                    self._job, self._request, self._client, pods, self._selector, self._look, lambda _: None,
                    max_restarts=self._spec.relaunches, restart_window_s=self._request.relaunch_window_s,
                )  # fmt: skip
                code = supervisor.run()
            finally:
                pods.close()
            return code
        finally:
            if code != ENDED:
                scaler.stop(_TASK_GRACE_S)
            scaler.leave()

    def _changed(self, change: ObjectChange) -> None:
        """On the thread of the watch."""
        if change.deleted or change.uid != self._uid:
            return
        try:
            spec = job_spec(change.manifest)
            spec.check()
        except (HooksError, msgspec.ValidationError) as error:
            if str(error) != self._refused:
                log.error("job %s: this change of its spec is not carried out: %s", self._job, error)
            self._refused = str(error)
            return
        self._spec, self._refused = spec, ""

    def _look(self) -> None:
        """At every turn of the host."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake, 1024):
                pass
        if self._signal is not None:
            log.info("job %s: ended by %s; its nodes go on", self._job, signal.Signals(self._signal).name)
            raise Over(ENDED)
        self._services.revive()
        try:
            self._tell(self._spec)
            if self._notices is not None:
                self._notices.look()
        except MasterAway as away:  # told at the next turn
            log.warning("job %s: %s", self._job, away.message)

    def _tell(self, spec: ElasticJobSpec) -> None:
        """Have the master follow the spec."""
        request = scaling_request(self._job, self._incarnation, spec)
        groups = spec.groups
        if request != self._request:
            self._client.call(request)
            self._request = request
        if groups == self._wanted:
            return
        plan = p.ScaleNodes(self._job, self._incarnation, p.ResourcePlan(groups), release=not groups)
        try:
            self._client.call(plan)
        except MasterAway:
            raise
        except MasterError as error:  # the job is over, or its limits have changed just now
            log.error("job %s: it does not get the nodes of its spec: %s", self._job, error)
        self._wanted = groups

    def _take_signals(self, owned: contextlib.ExitStack) -> None:
        self._wake, wake_end = os.pipe()
        for end in (self._wake, wake_end):
            os.set_blocking(end, False)
            owned.callback(os.close, end)
        owned.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(wake_end))
        self._selector.register(self._wake, selectors.EVENT_READ)
        for number in (signal.SIGINT, signal.SIGTERM):
            owned.callback(signal.signal, number, signal.signal(number, self._signalled))

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self._signal = number


if __name__ == "__main__":
    command(prog_name="python -m dlrover_hooks.launcher.elastic_job")
