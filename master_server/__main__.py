"""`python -m dlrover_hooks.master`: one master, one process, one address."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import resource
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

import click
import msgspec
import uvicorn
import uvloop

from dlrover_hooks.checkpoint.storage.master_storage import CommittedStorage
from dlrover_hooks.config.duration import seconds
from dlrover_hooks.config.token_file import read_token
from dlrover_hooks.errors import HooksError, UsageError
from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.master.app import App
from dlrover_hooks.master.http_answers import BODY_LIMIT_BYTES
from dlrover_hooks.master.journal.etcd_leadership import TTL_S
from dlrover_hooks.master.journal.journal_protocol import Journal, LeadershipLost
from dlrover_hooks.master.journal.leadership import Leadership
from dlrover_hooks.master.journal.sqlite_journal import SqliteJournal
from dlrover_hooks.master.listening import Listening, check_tls, listening, uvicorn_config
from dlrover_hooks.master.metrics import Metrics
from dlrover_hooks.master.runtime import Runtime
from dlrover_hooks.master.standby import (
    EtcdCandidate,
    FileCandidate,
    LeaderCandidate,
    LeaderStorage,
    StandbyMaster,
    advertised,
    is_etcd,
)

if TYPE_CHECKING:
    from dlrover_hooks.master.brain.client.brain_jobs import BrainJobs

SHORTEST_LEASE_S = 0.1
USAGE = 78
"""Exit code (EX_CONFIG) for errors that the caller can correct."""
FAILED = 70
"""Exit code (EX_SOFTWARE): this process failed; a restarted one may take over."""
_COLLECT_AT = (100_000, 20, 100)
"""Garbage collector thresholds. Thousands of open long-polls make a large heap, and searching it for cycles costs more
than the requests. With Python's default (700, 10, 10), a rendezvous of 1000 nodes took six times the CPU time."""
log = logging.getLogger("dlrover_hooks.master")


class ServeOptions(msgspec.Struct, frozen=True):
    """The parsed command line."""

    host: str = "127.0.0.1"
    port: int = 8780
    fd: int | None = None
    journal: str | None = None
    standby: bool = False
    token: str | None = None
    lease_s: float = 10.0
    open_lease_s: float = 60.0
    forget_after_s: float = 7 * 86400.0
    synchronous: str = "full"
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_client_ca: str | None = None
    body_limit_bytes: int = BODY_LIMIT_BYTES
    life_fd: int | None = None
    ephemeral: bool = False
    log_level: str = "warning"
    advertise: str | None = None
    leader_lease_s: int | None = None
    etcd_password: str | None = None
    brain: str | None = None
    brain_token: str | None = None


def _seconds(_: click.Context, param: click.Parameter, text: str) -> float:
    try:
        return seconds(text, name=param.opts[0])
    except UsageError as error:
        raise click.BadParameter(str(error)) from None


def _lease(ctx: click.Context, param: click.Parameter, text: str) -> float:
    if (found := _seconds(ctx, param, text)) < SHORTEST_LEASE_S:
        raise click.BadParameter(f"{text!r} is less than {SHORTEST_LEASE_S:g}s")
    return found


def _forget_after(ctx: click.Context, param: click.Parameter, text: str) -> float:
    found = math.inf if text == "never" else _seconds(ctx, param, text)
    if not found:
        raise click.BadParameter("0 would delete a job at its end; give a duration such as 12h, or never")
    return found


class Command(click.Command):
    """Exits with 78, not with click's 2, for an invalid command line."""

    def make_context(self, *args: Any, **more: Any) -> click.Context:
        try:
            return super().make_context(*args, **more)
        except click.UsageError as error:
            error.exit_code = USAGE  # pyright: ignore[reportAttributeAccessIssue]  # click reads the instance
            raise


@click.command(cls=Command, context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--host", default="127.0.0.1", help="Address to listen on. Any but loopback needs a token.")
@click.option("--port", default=8780, type=click.IntRange(0, 65535), help="0 picks a free one and prints it.")
@click.option("--fd", type=int, help="Listen on this inherited socket: its owner may restart the master unseen.")
@click.option("--journal", help="SQLite file that outlives this process, or etcd://HOST:2379,HOST:2379/NAME for "
              "several masters. Without it a restarted master has lost all jobs.")  # fmt: skip
@click.option("--standby", is_flag=True, help="For several masters with one SQLite file: wait while another one has "
              "it open, and take over when that one ends.")  # fmt: skip
@click.option("--advertise", metavar="URL", help="This one's address for clients, if there are several masters. By "
              "default that of --host and --port.")  # fmt: skip
@click.option("--leader-lease", "leader_lease_s", type=click.IntRange(2, 60), metavar="SECONDS",
              help=f"With etcd: a leader that cannot reach it for so long is replaced. Default: {TTL_S}.")  # fmt: skip
@click.option("--etcd-password-file", "etcd_password", type=click.Path(exists=True, dir_okay=False),
              help="With etcd://USER@HOST: that user's password.")  # fmt: skip
@click.option("--token", envvar="DLROVER_HOOKS_TOKEN", show_envvar=True, help="Bearer token of every request.")
@click.option("--token-file", type=click.Path(exists=True, dir_okay=False), help="Read the token from this file.")
@click.option("--lease", "lease_s", default="10s", callback=_lease, metavar="DURATION",
              help="A worker without a heartbeat for this long is dead.")  # fmt: skip
@click.option("--open-lease", "open_lease_s", default="60s", callback=_lease, metavar="DURATION",
              help="The same while its connection is open: then only a hang sends nothing.")  # fmt: skip
@click.option("--forget-after", "forget_after_s", default="7d", callback=_forget_after, metavar="DURATION",
              help="So long after their last request finished jobs are deleted: 12h, or never.")  # fmt: skip
@click.option("--synchronous", default="full", type=click.Choice(["full", "normal"]),
              help="full: answers survive a power cut; normal: a killed process only.")  # fmt: skip
@click.option("--ssl-certfile", type=click.Path(exists=True, dir_okay=False), help="Serve HTTPS with this certificate.")
@click.option(
    "--ssl-keyfile",
    type=click.Path(exists=True, dir_okay=False),
    help="Its key, if that is not in it; without a passphrase.",
)
@click.option("--ssl-client-ca", type=click.Path(exists=True, dir_okay=False),
              help="Refuse clients without a certificate that this CA has signed.")  # fmt: skip
@click.option("--body-limit-bytes", default=BODY_LIMIT_BYTES, type=click.IntRange(min=1024),
              help="Larger requests get 413.")  # fmt: skip
@click.option("--brain", metavar="URL", help="A Brain (dlrover-hooks brain) that makes the plans of jobs in "
              "--mode cluster.")  # fmt: skip
@click.option("--brain-token", envvar="DLROVER_HOOKS_BRAIN_TOKEN", show_envvar=True, help="Its bearer token.")
@click.option("--life-fd", type=int, help="End when this pipe's other end is closed.")
@click.option("--ephemeral", is_flag=True, help="Delete the journal when that pipe ends: its owner needs it no more.")
@click.option("--log-level", default="warning", type=click.Choice(["debug", "info", "warning", "error"]))
def command(token_file: str | None, **flags: Any) -> None:
    """Serve the master: it tracks membership, liveness and checkpoints of training jobs.

    \b
    One machine:   nothing to do, `dlrover-hooks run` starts a master.
    Sidecar:       python -m dlrover_hooks.master --journal master.db
    Several masters, of which one leads: --journal etcd://a,b,c on each, or on one machine --journal master.db
    --standby; clients get the addresses of all.
    Many machines: DLROVER_HOOKS_TOKEN=... python -m dlrover_hooks.master --host 0.0.0.0 --journal master.db
    Workers find it through DLROVER_HOOKS_MASTER=http://HOST:8780 (and DLROVER_HOOKS_TOKEN).

    \b
    GET /healthz /readyz /metrics /openapi.json report its state and its interface.
    Exit codes: 0 ended by a signal or its owner, 70 internal failure (restart it), 78 bad option, file or address.
    """
    options = ServeOptions(**flags)
    logging.basicConfig(
        level=options.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        if token_file is not None:
            options = msgspec.structs.replace(options, token=read_token(token_file))
        if options.etcd_password is not None:
            options = msgspec.structs.replace(options, etcd_password=read_token(options.etcd_password, "password"))
        serve(options)
    except HooksError as error:
        click.echo(f"dlrover-hooks master: {error}", err=True)
        sys.exit(USAGE)


def serve(options: ServeOptions) -> None:
    """Serve until a signal arrives or `life_fd` is closed. Raises HooksError for errors that the caller can correct."""
    check_tls(_listening(options))
    _check_journal(options)
    gc.set_threshold(*_COLLECT_AT)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a worker holds two or three connections
    listener = listening(_listening(options))
    host, port = listener.getsockname()[:2]
    scheme = "https" if options.ssl_certfile else "http"
    if is_etcd(options.journal) or options.standby:
        address = advertised(options.advertise, f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}")
        served = _serve_candidate(options, listener, _candidate(options, address, listener))
    else:
        served = _serve_alone(options, listener, SqliteJournal(options.journal, synchronous=options.synchronous))
    if options.fd is None:  # a caller that passed a socket has its address
        click.echo(f"dlrover-hooks master: {scheme}://{host}:{port} pid {os.getpid()}", err=True)
    if not uvloop.run(served):
        sys.exit(FAILED)


def _check_journal(options: ServeOptions) -> None:
    """The options of several masters fit the journal. Raises UsageError."""
    etcd = is_etcd(options.journal)
    if not etcd and {options.leader_lease_s, options.etcd_password} != {None}:
        raise UsageError(
            "--leader-lease and --etcd-password-file are for several masters with a journal in etcd",
            hint="add --journal etcd://...",
        )
    if options.advertise is not None and not etcd and not options.standby:
        raise UsageError(
            "--advertise is for several masters", hint="add --journal etcd://..., or --standby on one machine"
        )
    if options.standby and options.journal is None:
        raise UsageError(
            "--standby needs a journal that the other master has, too", hint="add --journal FILE, the same for each"
        )


def _candidate(options: ServeOptions, address: str, listener: socket.socket) -> LeaderCandidate:
    journal = str(options.journal)
    if not is_etcd(journal):
        return FileCandidate(journal, address, synchronous=options.synchronous)
    return EtcdCandidate(journal, options.etcd_password or "", address, listener, options.leader_lease_s or TTL_S)


async def _serve_candidate(options: ServeOptions, listener: socket.socket, candidate: LeaderCandidate) -> bool:
    """Serve as a standby, and as the leader once elected. False if the runtime failed. Raises HooksError."""
    standby, loop = StandbyMaster(lambda: candidate.leadership.leader), asyncio.get_running_loop()
    server = Server(uvicorn_config(_listening(options), standby.asgi), ending=candidate.stopping)
    campaign = loop.run_in_executor(None, candidate.elected)

    async def lead() -> HooksError | None:
        """Returns why this master cannot lead, if its user can mend that."""
        try:
            if (journal := await campaign) is not None:
                server.runtime, app = _runtime(options, journal, candidate.leadership)
                server.runtime.on_failure = server.fail
                standby.lead(app.asgi)
                log.warning("this master leads (epoch %d)", candidate.leadership.epoch)
        except LeadershipLost:  # or this process image was replaced by a fresh standby
            log.info("this master ends before it leads")
            if not candidate.stopping.is_set():
                server.fail()
        except HooksError as error:
            server.fail()
            return error
        except Exception:  # nothing awaits this task before the server ends: without it, a standby that never leads
            log.critical("this master cannot lead", exc_info=True)
            server.fail()
        return None

    leading = loop.create_task(lead())
    if options.life_fd is not None:
        _end_with(options.life_fd, server, loop)
    try:
        await server.serve(sockets=[listener])
    finally:
        server.ending.set()
        refusal = await leading
        if server.runtime is not None:
            await server.runtime.close()
        await loop.run_in_executor(None, candidate.leadership.resign)
    if refusal is not None:
        raise refusal
    return not server.failed


def _runtime(options: ServeOptions, journal: Journal, leadership: Leadership | None = None) -> tuple[Runtime, App]:
    """A runtime that has started, and its application. `leadership`: of one of several masters."""
    metrics = Metrics()
    runtime = Runtime(
        journal,
        storage=CommittedStorage() if leadership is None else LeaderStorage(CommittedStorage(), leadership),
        lease_s=options.lease_s,
        open_lease_s=options.open_lease_s,
        forget_after_s=options.forget_after_s,
        observe_commit=metrics.committed,
        brain=_brain_jobs(options),
        leads=(lambda: True) if leadership is None else leadership.holds,
    )
    runtime.start()
    return runtime, App(runtime, metrics, token=options.token, body_limit_bytes=options.body_limit_bytes)


def _brain_jobs(options: ServeOptions) -> BrainJobs | None:
    """Raises UsageError for a wrong address. Imported here: few masters have a Brain."""
    if options.brain is None:
        return None
    from dlrover_hooks.master.brain.client.brain_jobs import BrainJobs

    return BrainJobs(options.brain, options.brain_token)


async def _serve_alone(options: ServeOptions, listener: socket.socket, journal: SqliteJournal) -> bool:
    """False if the runtime failed: only a new process, which replays the journal, has a reliable state."""
    runtime, app = _runtime(options, journal)
    server = Server(uvicorn_config(_listening(options), app.asgi), runtime)
    runtime.on_failure = server.fail
    if options.life_fd is not None:
        _end_with(options.life_fd, server, asyncio.get_running_loop())
    try:
        await server.serve(sockets=[listener])
    finally:
        await runtime.close()
        if options.ephemeral and server.orphaned:
            journal.remove()
    return not server.failed


def _listening(options: ServeOptions) -> Listening:
    return Listening(
        options.host, options.port, options.fd, options.token,
        options.ssl_certfile, options.ssl_keyfile, options.ssl_client_ca,
    )  # fmt: skip


class Server(uvicorn.Server):
    """A uvicorn server that ends all long-polls before it waits for its connections to close."""

    def __init__(
        self, config: uvicorn.Config, runtime: Runtime | None = None, ending: threading.Event | None = None
    ) -> None:
        super().__init__(config)
        self.runtime = runtime
        """None for a standby."""
        self.ending = ending or threading.Event()
        """Set as soon as this process is to end."""
        self.failed = False
        self.orphaned = False
        """The owner of `life_fd` has closed it or ended."""

    def end(self) -> None:
        """Stop soon: this master's owner has ended. Call from the loop."""
        self.should_exit = self.orphaned = True
        self.ending.set()

    def fail(self) -> None:
        """Stop at once: this process's state may be wrong. Call from the loop."""
        self.should_exit = self.failed = True
        self.ending.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn when it leaves its main loop."""
        if self.runtime is not None:
            self.runtime.release_waiters()
        await super().shutdown(sockets=sockets)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Stop on a signal. uvicorn would raise it again afterwards, but a master stopped by a signal exits with 0."""
        del frame
        log.info("ending on %s", signal.Signals(sig).name)
        self.should_exit = True
        self.ending.set()


def _end_with(life_fd: int, server: Server, loop: asyncio.AbstractEventLoop) -> None:
    """Start a thread that waits for EOF on the owner's pipe; it ends with this process."""

    def wait() -> None:
        while os.read(life_fd, 1024):
            pass
        loop.call_soon_threadsafe(server.end)

    def end(_: object) -> None:  # without this thread nothing would end the master with its owner
        loop.call_soon_threadsafe(server.end)

    BackgroundThread("dlrover-hooks-life", wait, where="the owner's pipe", on_error="warn", failed=end).start()


def main() -> None:
    """Entry point of the module."""
    command.main(prog_name="python -m dlrover_hooks.master")


if __name__ == "__main__":
    main()
