"""`python -m dlrover_hooks.master.operator`: keeps the Pods of all `ElasticJob`s as their plans say."""

from __future__ import annotations

import logging
import signal
import sys
import threading

import click

from dlrover_hooks.errors import HooksError, UsageError
from dlrover_hooks.kubernetes.api_server import ApiServer
from dlrover_hooks.master.operator.operator import Operator

USAGE, FAILED = 78, 70
_CHECK_S = 1.0
log = logging.getLogger("dlrover_hooks.operator")


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--namespace", help="Only the jobs of this namespace. Default: those of the whole cluster.")
@click.option("--context", help="Of the kubeconfig file. Default: its current one, or the account of this Pod.")
@click.option(
    "--kubeconfig", type=click.Path(exists=True, dir_okay=False), help="Default: $KUBECONFIG, ~/.kube/config."
)
@click.option("--log-level", default="warning", type=click.Choice(["debug", "info", "warning", "error"]))
def command(namespace: str | None, context: str | None, kubeconfig: str | None, log_level: str) -> None:
    """Create and delete the Pods of every ElasticJob, as the ScalePlan that its master keeps says.

    It has no state of its own: it may be killed and started again at any time, also as another Pod.

    \b
    In a cluster:   python -m dlrover_hooks.master.operator
    From outside:   python -m dlrover_hooks.master.operator --context my-cluster --namespace training

    Exit codes: 0 ended by a signal, 70 the cluster is away or refuses, 78 bad option.
    """
    logging.basicConfig(
        level=log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    try:
        api = ApiServer(context, kubeconfig=kubeconfig)
        operator = Operator(api, namespace)
        operator.start()
    except HooksError as error:
        click.echo(f"dlrover-hooks operator: {error}", err=True)
        sys.exit(USAGE if isinstance(error, UsageError) else FAILED)
    click.echo(f"dlrover-hooks operator: follows {api.url}, {namespace or 'all namespaces'}", err=True)
    try:
        while not ending.wait(_CHECK_S):
            operator.check()
    except HooksError as error:
        click.echo(f"dlrover-hooks operator: {error}", err=True)
        sys.exit(FAILED)
    finally:
        operator.stop()
        api.close()


if __name__ == "__main__":
    command(prog_name="python -m dlrover_hooks.master.operator")
