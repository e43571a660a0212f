"""`dlrover-hooks brain`, the same as `python -m dlrover_hooks.master.brain`: serves, upgrades, replays."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from typing import Any

import click
import msgspec
import uvicorn
import uvloop

from dlrover_hooks import config as settings
from dlrover_hooks.config.duration import seconds
from dlrover_hooks.config.token_file import read_token
from dlrover_hooks.errors import HooksError, MissingExtra, UsageError
from dlrover_hooks.kubernetes.api_server import ApiServer
from dlrover_hooks.master.http_answers import BODY_LIMIT_BYTES
from dlrover_hooks.master.listening import Listening, check_tls, listening, uvicorn_config

try:
    from dlrover_hooks.master.brain import replay
    from dlrover_hooks.master.brain.algorithm_executor import AlgorithmExecutor, check_name
    from dlrover_hooks.master.brain.algorithms.registry import PlanProblem
    from dlrover_hooks.master.brain.app import BrainApp, BrainService
    from dlrover_hooks.master.brain.cluster_monitor import ClusterMonitor, ClusterSampler, ProcessClusterMonitor
    from dlrover_hooks.master.brain.database.database import Database
    from dlrover_hooks.master.brain.kubernetes_monitor import KubernetesClusterMonitor
    from dlrover_hooks.master.brain.optimize_processor import OptimizeProcessor
    from dlrover_hooks.master.brain.ray_monitor import RayClusterMonitor
except ImportError as error:
    if isinstance(error, MissingExtra):
        raise
    raise MissingExtra(f"the Brain needs {error.name}", hint="pip install 'dlrover-hooks[brain]'") from error

USAGE, FAILED = 78, 70
PORT = 8781
log = logging.getLogger("dlrover_hooks.brain")
_DATABASE = "SQLite file, or postgresql://USER:PASSWORD@HOST/NAME."
_SAME = click.option("--database", metavar="TEXT", help=f"{_DATABASE} Also before the command's name.")


class BrainServer(uvicorn.Server):
    """A uvicorn server that answers requests that wait before it ends."""

    def __init__(self, config: uvicorn.Config, service: BrainService) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Stop on a signal, with exit code 0."""
        del frame
        log.info("ending on %s", signal.Signals(sig).name)
        self._service.ending.set()
        self.should_exit = True


class BrainCommands(click.Group):
    """Exits with 78, not with click's 2, for an invalid command line, and for an error that the caller can correct."""

    def main(self, *args: Any, **more: Any) -> Any:
        """See click."""
        more["standalone_mode"] = False
        try:
            return super().main(*args, **more)
        except click.exceptions.Exit as ended:
            sys.exit(ended.exit_code)
        except click.ClickException as error:
            error.show()
            sys.exit(USAGE)
        except click.Abort:
            sys.exit(130)
        except HooksError as error:
            click.echo(f"dlrover-hooks brain: {error}", err=True)
            sys.exit(USAGE if isinstance(error, UsageError) else FAILED)


@click.group(cls=BrainCommands, invoke_without_command=True,
             context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})  # fmt: skip
@click.option("--database", default="brain.db", envvar="DLROVER_HOOKS_BRAIN_DATABASE", show_envvar=True, help=_DATABASE)
@click.option("--host", default="127.0.0.1", help="Address to listen on. Any but loopback needs a token.")
@click.option("--port", default=PORT, type=click.IntRange(0, 65535), help="0 picks a free one and prints it.")
@click.option("--fd", type=int, help="Listen on this inherited socket.")
@click.option("--token", envvar="DLROVER_HOOKS_TOKEN", show_envvar=True, help="Bearer token of every request.")
@click.option("--token-file", type=click.Path(exists=True, dir_okay=False), help="Read the token from this file.")
@click.option("--ssl-certfile", type=click.Path(exists=True, dir_okay=False), help="Serve HTTPS with this certificate.")
@click.option("--ssl-keyfile", type=click.Path(exists=True, dir_okay=False), help="Its key, if that is not in it.")
@click.option("--ssl-client-ca", type=click.Path(exists=True, dir_okay=False),
              help="Refuse clients without a certificate that this CA has signed.")  # fmt: skip
@click.option("--body-limit-bytes", default=BODY_LIMIT_BYTES, type=click.IntRange(min=1024),
              help="Larger requests get 413.")  # fmt: skip
@click.option("--use", multiple=True, metavar="PROBLEM=ALGORITHM",
              help="Ask this algorithm first for such a problem.")  # fmt: skip
@click.option("--quota", multiple=True, metavar="TENANT=UNITS",
              help="Most cores (GPUs) of a tenant's jobs, where jobs want more than the cluster has.")  # fmt: skip
@click.option("--monitor", default="none", type=click.Choice(["none", "process", "kubernetes", "ray"]),
              help="What is divided among jobs. process: this machine, as (a part of) the cluster; kubernetes: the "
              "cluster of $KUBECONFIG, of ~/.kube/config, or of this Pod; ray: that of --ray-address.")  # fmt: skip
@click.option("--ray-address", metavar="HOST:PORT",
              help="The Ray cluster of --monitor ray.  [default: that of $RAY_ADDRESS]")  # fmt: skip
@click.option("--claim", default="60s", metavar="DURATION",
              help="Another process takes over an event that one has for longer.")  # fmt: skip
@click.option("--forget-after", default="365d", metavar="DURATION", help="Finished jobs are deleted after it.")
@click.option("--log-level", default="warning", type=click.Choice(["debug", "info", "warning", "error"]))
@click.pass_context
def command(context: click.Context, database: str, log_level: str, **flags: Any) -> None:
    """Serve the Brain: it plans the resources of all jobs from what was measured of them.

    \b
    dlrover-hooks brain --database brain.db
    dlrover-hooks brain upgrade --database brain.db
    dlrover-hooks brain replay --database brain.db --algorithm running

    Several processes may serve one database. GET /healthz and /readyz report their state.
    Exit codes: 0 ended by a signal, 70 the database failed, 78 bad option, file or address.
    """
    logging.basicConfig(
        level=log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("alembic").setLevel(logging.WARNING)
    if context.invoked_subcommand is None:
        serve(Database(database), **flags)


def serve(
    database: Database, *, host: str, port: int, fd: int | None, token: str | None, token_file: str | None,
    ssl_certfile: str | None, ssl_keyfile: str | None, ssl_client_ca: str | None, body_limit_bytes: int,
    use: tuple[str, ...], quota: tuple[str, ...], monitor: str, ray_address: str | None, claim: str,
    forget_after: str,
) -> None:  # fmt: skip
    """Serve until a signal arrives. Raises `HooksError` for errors that the caller can correct."""
    token = read_token(token_file) if token_file is not None else token
    where = Listening(
        host, port, fd, token, ssl_certfile, ssl_keyfile, ssl_client_ca, server="Brain", clients="the masters"
    )
    check_tls(where)
    processor = OptimizeProcessor(
        database, use=_uses(use), quotas=_quotas(quota), claim_s=seconds(claim, name="--claim"),
        forget_s=seconds(forget_after, name="--forget-after"),
    )  # fmt: skip
    database.prepare()
    listener = listening(where)
    service = BrainService(database, processor)
    app = BrainApp(service, token=token, body_limit_bytes=body_limit_bytes)
    address, number = listener.getsockname()[:2]
    processor.start()
    sampling = contextlib.ExitStack()
    try:
        _sample(sampling, _monitor(sampling, monitor, ray_address), database)
        scheme = "https" if ssl_certfile else "http"
        click.echo(f"dlrover-hooks brain: {scheme}://{address}:{number} pid {os.getpid()}", err=True)
        uvloop.run(BrainServer(uvicorn_config(where, app.asgi), service).serve(sockets=[listener]))
    finally:
        app.close()
        processor.stop()
        sampling.close()
        listener.close()
        database.close()


def _monitor(owned: contextlib.ExitStack, name: str, ray_address: str | None) -> ClusterMonitor | None:
    """Started. Raises `KubernetesFailed`, `UsageError`, or `HooksError` if a Ray cluster does not answer."""
    if name == "process":
        return ProcessClusterMonitor()
    if name == "kubernetes":
        api = ApiServer()
        owned.callback(api.close)
        found = KubernetesClusterMonitor(api)
    elif name == "ray":
        address = ray_address or settings.ray_address()
        if address is None:
            raise UsageError("--monitor ray needs the address of the cluster", hint="give --ray-address HOST:PORT")
        found = RayClusterMonitor(address)
    else:
        return None
    owned.callback(found.stop)
    found.start()
    return found


def _sample(owned: contextlib.ExitStack, monitor: ClusterMonitor | None, database: Database) -> None:
    """Begin to write what the platform has."""
    if monitor is not None:
        sampler = ClusterSampler(monitor, database)
        owned.callback(sampler.stop)
        sampler.start()


def _uses(given: tuple[str, ...]) -> dict[PlanProblem, str]:
    found = {}
    for text in given:
        what, _, name = text.partition("=")
        if what not in {one.value for one in PlanProblem} or not name:
            raise UsageError(
                f"--use {text!r} is no PROBLEM=ALGORITHM",
                hint=f"problems: {', '.join(one.value for one in PlanProblem)}",
            )
        found[PlanProblem(what)] = name
    return found


def _quotas(given: tuple[str, ...]) -> dict[str, int]:
    found = {}
    for text in given:
        tenant, _, units = text.rpartition("=")
        if not tenant or not units.isdigit():
            raise UsageError(f"--quota {text!r} is no TENANT=UNITS", hint="such as --quota research=64")
        found[tenant] = int(units)
    return found


def _opened(context: click.Context, database: str | None) -> Database:
    """That of the command, otherwise that of the group."""
    assert context.parent is not None
    return Database(database or context.parent.params["database"])


@command.command(short_help="Bring the database to the revision of this version.")
@_SAME
@click.pass_context
def upgrade(context: click.Context, database: str | None) -> None:
    """Bring the tables of the database to the revision that this version needs; make them if there are none."""
    opened = _opened(context, database)
    try:
        before, after = opened.upgrade()
        click.echo(f"{opened.name}: revision {before or 'none'} -> {after}")
    finally:
        opened.close()


@command.command("replay", short_help="Evaluate an algorithm on recorded jobs.")
@_SAME
@click.option("--algorithm", default="running", help="One of the Brain's, or a plug-in.")
@click.option("--job", "names", multiple=True, help="Only this job; may be repeated.  [default: all]")
@click.option("--config", default="{}", help="JSON object for the algorithm.")
@click.option("--limit", default="60s", metavar="DURATION", help="Of one decision of a plug-in.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each decision, instead of a table.")
@click.pass_context
def replay_jobs(
    context: click.Context, database: str | None, algorithm: str, names: tuple[str, ...], config: str, limit: str,
    as_json: bool,
) -> None:  # fmt: skip
    """Print what ALGORITHM would have planned for recorded jobs, against what really happened.

    At each change of a job's nodes and at its end: the nodes and their speed in steps per second, those that followed,
    those that are planned, the speed that was measured of them at another time, and the predicted one.
    """
    try:
        chosen = msgspec.json.decode(config, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise UsageError(f"--config is no JSON object: {error}", hint="such as '{}'") from error
    check_name(algorithm)
    opened, executor = _opened(context, database), AlgorithmExecutor(seconds(limit, name="--limit"))
    try:
        opened.prepare()
        plans = [
            plan
            for recording in replay.recorded(opened, names)
            for plan in replay.replay(recording, algorithm, chosen, executor)
        ]
    finally:
        opened.close()
    if as_json:
        for plan in plans:
            click.echo(msgspec.json.encode(msgspec.to_builtins(plan)))
    else:
        click.echo(replay.table(plans))
        click.echo(replay.summary(plans))


def main() -> None:
    """Entry point of the module."""
    command.main(prog_name="python -m dlrover_hooks.master.brain")


if __name__ == "__main__":
    main()
