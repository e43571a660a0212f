"""torchrun's rendezvous, provided by the master. Imports torch: only torchrun's agent loads it (`entry_point`)."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
from collections.abc import Iterator
from urllib.parse import urlsplit

from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from dlrover_hooks import config as settings, protocol as p
from dlrover_hooks.config.spelling import refuse_unknown
from dlrover_hooks.errors import MasterAway, MasterError, Unauthorized, UsageError
from dlrover_hooks.host.own_address import towards
from dlrover_hooks.torchrun.agent_rounds import JobOver, Meeting, NotFormed, Terms
from dlrover_hooks.torchrun.entry_point import BACKEND
from dlrover_hooks.torchrun.rank_exchange_store import RankStore

log = logging.getLogger("dlrover_hooks.rendezvous")

PORT = 8780
"""The master's own default."""
_SECONDS = {"last_call": 0.3, "join_timeout": 600.0, "connect_timeout": 60.0}
_KNOWN = [*_SECONDS, "token"]


class Rendezvous(RendezvousHandler):
    """One agent's `RendezvousHandler`: rounds, ranks and the store come from the master.

    Args:
        params: from torchrun. `--rdzv-conf` takes `last_call`, `join_timeout`, `connect_timeout` (seconds) and `token`.

    Raises:
        UsageError: a setting must be corrected.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        self._params = params
        self._meeting = Meeting(terms(params))
        settings.tell_workers(self._meeting.terms.url, self._meeting.terms.token)

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._params.run_id

    @property
    def use_agent_store(self) -> bool:
        """False: the worker of rank 0 serves a new process group store in each round, on its own port."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Block until the master gives this node a rank.

        Raises:
            RendezvousConnectionError: the master is not there, or requires another token.
            RendezvousTimeoutError: too few nodes within `join_timeout`.
            SystemExit: the job is done, with code 0. torch has `RendezvousGracefulExitError` for this, but torchrun
                (2.13) takes that for a result and ends with an AttributeError and code 1.
        """
        try:
            with _as_torch_says():
                seated = self._meeting.join()
        except JobOver as over:
            log.warning("%s", over)
            raise SystemExit(0) from over
        assert seated.round is not None
        log.info("job %s: round %d, node %d of %d", self._params.run_id, seated.round, *seated.ranks, seated.world_size)
        store = RankStore(self._meeting.life.client, self._meeting.terms.agents, seated.round, seated.world_size)
        address = RendezvousStoreInfo(seated.master_addr, seated.master_port)
        return RendezvousInfo(store, seated.ranks[0], seated.world_size, address)

    def num_nodes_waiting(self) -> int:
        """More than 0 makes torchrun's agent start a new rendezvous: for newcomers, and after the loss of a member."""
        return self._meeting.reasons_to_meet()

    def is_closed(self) -> bool:
        """The job is done: every node has left it after success."""
        return self._meeting.over

    def set_closed(self) -> None:
        """Does nothing: one node cannot end the job of the others."""

    def shutdown(self) -> bool:
        """Leave; the others go on. torch calls this after success, and after failure while its exception is raised."""
        failed = sys.exc_info()[0] not in (None, SystemExit)
        return self._meeting.leave(p.Departure.FAILED if failed else p.Departure.DONE)


@contextlib.contextmanager
def _as_torch_says() -> Iterator[None]:
    try:
        yield
    except (MasterAway, Unauthorized) as error:
        raise RendezvousConnectionError(str(error)) from error
    except NotFormed as late:
        raise RendezvousTimeoutError(str(late)) from late
    except MasterError as refusal:
        raise RendezvousStateError(str(refusal)) from refusal


def terms(params: RendezvousParameters) -> Terms:
    """torchrun's flags as `Terms`. Raises UsageError."""
    _refuse_unknown(params)
    config = settings.load({**settings.environment(), "TORCHELASTIC_RUN_ID": params.run_id})
    if not config.named:
        raise UsageError(
            "the job has no name: the workers of all nodes must know that they belong together",
            hint="give every node the same --rdzv-id=NAME (or DLROVER_HOOKS_JOB)",
        )
    url = _url(params.endpoint or config.master or "")
    seconds = {name: _seconds(params, name) for name in _SECONDS}
    return Terms(
        url=url,
        job=config.job,
        node=settings.place().node,
        host=params.local_addr or _host_towards(url),
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        token=params.get("token") or config.token,
        last_call_s=seconds["last_call"],
        join_s=seconds["join_timeout"],
        connect_s=seconds["connect_timeout"],
        fresh=config.fresh,
    )


def _refuse_unknown(params: RendezvousParameters) -> None:
    try:
        refuse_unknown(set(params.config) - {"timeout"}, _KNOWN)  # torchrun adds that one by itself
    except UsageError as unknown:
        raise UsageError(f"--rdzv-conf: {unknown.message}", hint=unknown.hint) from None


def _seconds(params: RendezvousParameters, name: str) -> float:
    text = params.get(name, _SECONDS[name])
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise UsageError(f"--rdzv-conf {name}={text} is no time", hint=f"give seconds, such as {name}={_SECONDS[name]}")
    return seconds


def _url(endpoint: str) -> str:
    """Accepts `HOST`, `HOST:PORT`, a full URL, or several of them separated by commas."""
    if "," in endpoint:
        return ",".join(_url(one.strip()) for one in endpoint.split(","))
    url = endpoint if "://" in endpoint else f"http://{endpoint}"
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = 0
    if not parts.hostname or port == 0:
        raise UsageError(
            f"--rdzv-endpoint={endpoint!r} is no address of a master",
            hint="start one (python -m dlrover_hooks.master) and give --rdzv-endpoint=HOST:PORT",
        )
    return url if port is not None or parts.scheme == "https" else f"{url}:{PORT}"


def _host_towards(url: str) -> str:
    """This machine's address on the route to the master, which other nodes can reach."""
    parts = urlsplit(url.partition(",")[0])
    with contextlib.suppress(OSError):
        return towards(parts.hostname, parts.port or 443)
    return socket.gethostname()
