"""`python -m dlrover_hooks.master.operator`: keeps the masters and the Pods of all `ElasticJob`s as they are to be."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Sequence

import click

from dlrover_hooks.config.duration import seconds
from dlrover_hooks.errors import HooksError, KubernetesFailed, UsageError
from dlrover_hooks.kubernetes.api_server import ApiServer
from dlrover_hooks.master.di_orchestrator.allocator import Allocator, Policy
from dlrover_hooks.master.di_orchestrator.controller import DIJobController
from dlrover_hooks.master.di_orchestrator.policies import FitPolicy, GoodputPolicy, Placement
from dlrover_hooks.master.journal.lease_leadership import TTL_S, LeaseLeadership
from dlrover_hooks.master.operator import manifests
from dlrover_hooks.master.operator.health_endpoint import HealthEndpoint
from dlrover_hooks.master.operator.job_objects import ACCOUNT, PORT, MasterOptions
from dlrover_hooks.master.operator.operator import Operator

USAGE, FAILED = 78, 70
DI_POLICIES: dict[str, Callable[[], Policy]] = {
    "pack": lambda: FitPolicy(Placement.PACK), "spread": lambda: FitPolicy(Placement.SPREAD), "goodput": GoodputPolicy,
}  # fmt: skip
_CHECK_S = 1.0
log = logging.getLogger("dlrover_hooks.operator")


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--namespace", help="Only the jobs of this namespace. Default: those of the whole cluster.")
@click.option("--lease", metavar="NAMESPACE",
              help=f"Of several operators one works: the one that holds the Lease {manifests.NAME} in this namespace. "
              "Without it: this one works, and there must be no other one.")  # fmt: skip
@click.option("--lease-duration", "lease_s", default=TTL_S, type=click.IntRange(2, 300), metavar="SECONDS",
              help="An operator that did not renew the Lease for so long is replaced.")  # fmt: skip
@click.option("--health-port", type=click.IntRange(0, 65535),
              help="Answer GET /healthz and /readyz here. Default: not at all.")  # fmt: skip
@click.option("--master-image", default="", help="Of the Pods of masters. Default: that of the workers of the job.")
@click.option("--master-account", default=ACCOUNT, help="Their service account, in the namespace of the job.")
@click.option("--master-port", default=PORT, type=click.IntRange(1, 65535), help="The port of masters.")
@click.option("--di-policy", type=click.Choice(list(DI_POLICIES)),
              help="Also run the DIJobs of DI-engine. The policy places the replicas of preemptible ones: on few "
              "nodes, on many, or by the speeds that jobs report. Default: not at all.")  # fmt: skip
@click.option("--di-server", default="", metavar="URL",
              help="Of the di-server (python -m dlrover_hooks.master.di_orchestrator serve): for the Pods of "
              "DIJobs.")  # fmt: skip
@click.option("--di-period", default="60s", metavar="DURATION", help="Preemptible DIJobs are scheduled so often.")
@click.option("--context", help="Of the kubeconfig file. Default: its current one, or the account of this Pod.")
@click.option(
    "--kubeconfig", type=click.Path(exists=True, dir_okay=False), help="Default: $KUBECONFIG, ~/.kube/config."
)
@click.option("--log-level", default="warning", type=click.Choice(["debug", "info", "warning", "error"]))
def command(
    namespace: str | None, lease: str | None, lease_s: int, health_port: int | None, master_image: str,
    master_account: str, master_port: int, di_policy: str | None, di_server: str, di_period: str, context: str | None,
    kubeconfig: str | None, log_level: str,
) -> None:  # fmt: skip
    """Run a master for every ElasticJob, and create and delete Pods for its nodes as the master's ScalePlan says.

    It has no state of its own: it may be killed and started again at any time, also as another Pod.

    \b
    In a cluster:   dlrover-hooks manifest --image IMAGE | kubectl apply -f -
    From outside:   python -m dlrover_hooks.master.operator --context my-cluster --namespace training

    Exit codes: 0 ended by a signal, 70 the cluster is away or refuses, or another operator has taken over (start it
    again), 78 bad option.
    """
    logging.basicConfig(
        level=log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    ending, lost = threading.Event(), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    try:
        with contextlib.ExitStack() as owned:
            api = ApiServer(context, kubeconfig=kubeconfig)
            owned.callback(api.close)
            leader = None if lease is None else LeaseLeadership(
                api, lease, manifests.NAME, _identity(), lost.set, ttl_s=lease_s
            )  # fmt: skip
            if health_port is not None:
                owned.callback(_answer_probes(health_port, leader, lost))
            if leader is not None:
                owned.callback(leader.resign)
                if not leader.campaign(ending, _Told(leader)):
                    return
            masters = MasterOptions(master_port, master_image, master_account)
            parts: list[Operator | DIJobController] = [Operator(api, namespace, masters, nodes=namespace is None)]
            if di_policy is not None:
                allocator, period_s = Allocator(DI_POLICIES[di_policy]()), seconds(di_period, name="--di-period")
                parts.append(DIJobController(api, allocator, namespace, server_url=di_server, period_s=period_s))
            for part in parts:
                part.start()
                owned.callback(part.stop)
            click.echo(f"dlrover-hooks operator: follows {api.url}, {namespace or 'all namespaces'}", err=True)
            _watch(parts, ending, lost)
    except HooksError as error:
        click.echo(f"dlrover-hooks operator: {error}", err=True)
        sys.exit(USAGE if isinstance(error, UsageError) else FAILED)


def _watch(parts: Sequence[Operator | DIJobController], ending: threading.Event, lost: threading.Event) -> None:
    """Until a signal comes. Raises what a thread met, and `KubernetesFailed` if the Lease is lost."""
    while not ending.wait(_CHECK_S):
        for part in parts:
            part.check()
        if lost.is_set():
            raise KubernetesFailed("the Lease was lost: another operator may work now", hint="start it again")


def _answer_probes(port: int, leader: LeaseLeadership | None, lost: threading.Event) -> Callable[[], None]:
    """Begin to; what is returned ends it."""
    health = HealthEndpoint(port, lambda: not lost.is_set(), lambda: _ready(leader))
    health.start()
    click.echo(f"dlrover-hooks operator: /healthz on port {health.port}", err=True)
    return health.stop


def _identity() -> str:
    """Of this process, for the Lease."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _ready(leader: LeaseLeadership | None) -> tuple[bool, str]:
    if leader is None or leader.holds():
        return True, "leads"
    return True, f"stands by; the leader is {leader.leader or 'not known'}"


class _Told:
    """Says once which operator leads."""

    def __init__(self, leader: LeaseLeadership) -> None:
        self._leader, self._said = leader, ""

    def __call__(self) -> None:
        if self._leader.leader != self._said:
            self._said = self._leader.leader
            click.echo(f"dlrover-hooks operator: stands by, {self._said} leads", err=True)


if __name__ == "__main__":
    command(prog_name="python -m dlrover_hooks.master.operator")
