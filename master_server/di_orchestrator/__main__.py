"""`python -m dlrover_hooks.master.di_orchestrator`: the di-server, and a command for users."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, NoReturn

import click
import uvicorn
import uvloop

from dlrover_hooks.config.token_file import read_token
from dlrover_hooks.errors import HooksError, MasterError, UsageError
from dlrover_hooks.kubernetes.api_server import ApiServer
from dlrover_hooks.master.di_orchestrator.di_server import DIServer
from dlrover_hooks.master.di_orchestrator.job_requests import JobRequests
from dlrover_hooks.master.listening import Listening, check_tls, listening, uvicorn_config

USAGE, FAILED, REFUSED = 78, 70, 1
PORT = 8080
"""Where DI-engine looks for its server."""
_CLUSTER = (
    click.option("--context", help="Of the kubeconfig file. Default: its current one, or the account of this Pod."),
    click.option(
        "--kubeconfig", type=click.Path(exists=True, dir_okay=False), help="Default: $KUBECONFIG, ~/.kube/config."
    ),
)


def _cluster(command: Any) -> Any:
    for option in reversed(_CLUSTER):
        command = option(command)
    return command


@click.group(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
def command() -> None:
    """Serve DI-engine's jobs, or change one. The controller of DIJobs is a part of the operator:
    python -m dlrover_hooks.master.operator --di-policy pack.

    Exit codes: 0 done, 1 refused, 70 the cluster is away, 78 bad option or address.
    """


@command.command(short_help="Serve HTTP for jobs of DI-engine.")
@click.option("--host", default="127.0.0.1", help="Address to listen on. Any but loopback needs a token.")
@click.option("--port", default=PORT, type=click.IntRange(0, 65535), help="0 picks a free one and prints it.")
@click.option("--token", envvar="DLROVER_HOOKS_TOKEN", show_envvar=True, help="Bearer token of every request.")
@click.option("--token-file", type=click.Path(exists=True, dir_okay=False), help="Read the token from this file.")
@click.option("--no-token", is_flag=True,
              help="Answer all requests: the client of DI-engine sends no token. Let a NetworkPolicy limit what "
              "reaches the address, as dlrover-hooks manifest does.")  # fmt: skip
@click.option("--ssl-certfile", type=click.Path(exists=True, dir_okay=False), help="Serve HTTPS with this certificate.")
@click.option("--ssl-keyfile", type=click.Path(exists=True, dir_okay=False), help="Its key, if that is not in it.")
@_cluster
def serve(
    host: str, port: int, token: str | None, token_file: str | None, no_token: bool, ssl_certfile: str | None,
    ssl_keyfile: str | None, context: str | None, kubeconfig: str | None,
) -> None:  # fmt: skip
    """Answer GET, POST and DELETE /v2alpha1/NAMESPACE.NAME.GENERATION/replicas, and POST .../profilings.

    The paths /v2alpha1/job/NAMESPACE.NAME.GENERATION/... are the same. GET /healthz reports that the process runs.
    """
    logging.basicConfig(level="WARNING", stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        token = read_token(token_file) if token_file is not None else token
        if no_token and token is not None:
            raise UsageError("--no-token, and a token", hint="give one of them; DLROVER_HOOKS_TOKEN is a token, too")
        where = Listening(
            host, port, None, token, ssl_certfile, ssl_keyfile, server="di-server", clients="the jobs of DI-engine",
            open=no_token,
        )  # fmt: skip
        check_tls(where)
        api = ApiServer(context, kubeconfig=kubeconfig)
        listener = listening(where)
    except HooksError as error:
        _end(error)
    server = DIServer(JobRequests(api), token=token)
    address, number = listener.getsockname()[:2]
    scheme = "https" if ssl_certfile else "http"
    click.echo(f"dlrover-hooks di-server: {scheme}://{address}:{number} pid {os.getpid()}", err=True)
    try:
        uvloop.run(uvicorn.Server(uvicorn_config(where, server.asgi)).serve(sockets=[listener]))
    except KeyboardInterrupt:  # uvicorn raises the signal that ended it again
        sys.exit(0)
    finally:
        server.close()
        api.close()


@command.command("update-replicas", short_help="Change the number of replicas of a job.")
@click.option("--ns", "namespace", default="default", help="Namespace of the job.")
@click.option("--n", "name", required=True, help="Its name.")
@click.option("--r", "count", required=True, type=click.IntRange(min=1), help="So many replicas it shall have.")
@_cluster
def update_replicas(namespace: str, name: str, count: int, context: str | None, kubeconfig: str | None) -> None:
    """Set the replicas that a DIJob shall have, preemptible or not. The controller creates and deletes its Pods."""
    try:
        api = ApiServer(context, kubeconfig=kubeconfig)
        try:
            JobRequests(api).set_replicas(namespace, name, count)
        finally:
            api.close()
    except HooksError as error:
        _end(error)
    click.echo(f"dijob {namespace}/{name}: {count} replicas")


def _end(error: HooksError) -> NoReturn:
    click.echo(f"dlrover-hooks di-server: {error}", err=True)
    sys.exit(USAGE if isinstance(error, UsageError) else REFUSED if isinstance(error, MasterError) else FAILED)


if __name__ == "__main__":
    command(prog_name="python -m dlrover_hooks.master.di_orchestrator")
