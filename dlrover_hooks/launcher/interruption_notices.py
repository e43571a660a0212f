"""Notices that this node will be interrupted: from a cloud's metadata service, or by touching a file.

The parsers are pure and follow the documented answers; `NoticePoller` polls in its own thread. The services and their
answers:

- AWS: a token (IMDSv2), then `spot/instance-action`: 404 until two minutes before; hibernation comes at once
  (docs.aws.amazon.com, "Spot Instance interruption notices", which asks for a poll every 5 s).
- GCP: `instance/preempted`, held open until it changes; the power button is pressed 30 s later
  (cloud.google.com/compute/docs/instances/create-use-preemptible).
- Azure: `scheduledevents`, of all machines of a scale set; `Preempt` comes at least 30 s ahead, `Terminate` 5 to 15 min
  (learn.microsoft.com/azure/virtual-machines/linux/scheduled-events).
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Protocol

import msgspec
import requests

from dlrover_hooks.errors import UsageError
from dlrover_hooks.host.background_thread import BackgroundThread

log = logging.getLogger("dlrover_hooks.run")

GCP_S = 30.0
"""From the notice of a spot machine's end to its power button."""
AZURE_S = 30.0
"""Used for an event that has begun, which no longer contains a time."""
_ASK_S = 5.0
"""Polling interval, and timeout of an answer."""
_AZURE_GOES = frozenset({"Preempt", "Terminate", "Reboot", "Redeploy"})


class InterruptionNotice(msgspec.Struct, frozen=True):
    """This node ends at `at` (seconds since the epoch); None: unknown."""

    reason: str
    at: float | None = None


class NoAnswer(Exception):
    """The service is unreachable, or its answer is not a documented one."""


# ---- parsers --------------------------------------------------------------------------------------------------------


class _Action(msgspec.Struct):
    action: str
    time: str


def aws(status: int, body: bytes) -> InterruptionNotice | None:
    """The answer to `GET /latest/meta-data/spot/instance-action`. Raises NoAnswer."""
    if status == 404:
        return None
    try:
        found = msgspec.json.decode(body, type=_Action) if status == 200 else None
        at = datetime.fromisoformat(found.time.replace("Z", "+00:00")).timestamp() if found else None
    except (msgspec.DecodeError, ValueError) as error:
        raise NoAnswer(f"instance-action: {body[:100]!r}") from error
    if found is None:
        raise NoAnswer(f"instance-action: HTTP {status}")
    return InterruptionNotice(f"aws: spot instance {found.action}", at)


def gcp(status: int, body: bytes, now: float) -> InterruptionNotice | None:
    """The answer to `GET /computeMetadata/v1/instance/preempted`. Raises NoAnswer."""
    text = body.strip().upper()
    if status != 200 or text not in (b"TRUE", b"FALSE"):
        raise NoAnswer(f"instance/preempted: HTTP {status} {body[:100]!r}")
    return InterruptionNotice("gcp: preempted", now + GCP_S) if text == b"TRUE" else None


class _Event(msgspec.Struct, rename="pascal"):
    event_type: str
    resources: list[str] = []
    event_status: str = ""
    not_before: str = ""


class _Events(msgspec.Struct, rename="pascal"):
    events: list[_Event] = []


def azure(status: int, body: bytes, name: str, now: float) -> InterruptionNotice | None:
    """The answer to `GET /metadata/scheduledevents` about the machine called `name`. Raises NoAnswer."""
    try:
        found = msgspec.json.decode(body, type=_Events) if status == 200 else None
        ours = [one for one in found.events if name in one.resources] if found else []
        times = {
            (parsedate_to_datetime(one.not_before).replace(tzinfo=timezone.utc).timestamp()
             if one.not_before else now + AZURE_S): one
            for one in ours if one.event_type in _AZURE_GOES
        }  # fmt: skip
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        raise NoAnswer(f"scheduledevents: {body[:100]!r}") from error
    if found is None:
        raise NoAnswer(f"scheduledevents: HTTP {status}")
    return InterruptionNotice(f"azure: {times[min(times)].event_type}", min(times)) if times else None


# ---- sources --------------------------------------------------------------------------------------------------------


class NoticeSource(Protocol):
    """`ask` returns within a few seconds. Raises NoAnswer, requests.RequestException, OSError."""

    name: str

    def ask(self, http: requests.Session) -> InterruptionNotice | None: ...


class Aws:
    name = "aws"

    def __init__(self, url: str = "http://169.254.169.254") -> None:
        self._url, self._token = url, ""

    def ask(self, http: requests.Session) -> InterruptionNotice | None:
        if not self._token:
            header = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
            answer = http.put(f"{self._url}/latest/api/token", headers=header, timeout=_ASK_S)
            self._token = answer.text if answer.status_code == 200 else ""
        header = {"X-aws-ec2-metadata-token": self._token} if self._token else {}
        answer = http.get(f"{self._url}/latest/meta-data/spot/instance-action", headers=header, timeout=_ASK_S)
        if answer.status_code == 401:
            self._token = ""  # it has expired
        return aws(answer.status_code, answer.content)


class Gcp:
    name = "gcp"

    def __init__(self, url: str = "http://metadata.google.internal") -> None:
        self._url, self._etag = url, "0"

    def ask(self, http: requests.Session) -> InterruptionNotice | None:
        """The request is held open until the value changes: a notice of 30 s should not wait for a poll."""
        answer = http.get(
            f"{self._url}/computeMetadata/v1/instance/preempted",
            params={"wait_for_change": "true", "timeout_sec": "3", "last_etag": self._etag},
            headers={"Metadata-Flavor": "Google"}, timeout=2 * _ASK_S,
        )  # fmt: skip
        self._etag = answer.headers.get("ETag", "0")
        return gcp(answer.status_code, answer.content, time.time())


class Azure:
    name = "azure"

    def __init__(self, url: str = "http://169.254.169.254") -> None:
        self._url, self._machine = url, ""

    def ask(self, http: requests.Session) -> InterruptionNotice | None:
        if not self._machine:
            compute = f"{self._url}/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            answer = http.get(compute, headers={"Metadata": "true"}, timeout=_ASK_S)
            if answer.status_code != 200:
                raise NoAnswer(f"compute/name: HTTP {answer.status_code}")
            self._machine = answer.text.strip()
        events = f"{self._url}/metadata/scheduledevents?api-version=2020-07-01"
        answer = http.get(events, headers={"Metadata": "true"}, timeout=24 * _ASK_S)  # the first one may take 2 min
        return azure(answer.status_code, answer.content, self._machine, time.time())


class NoticeFile:
    name = "file"

    def __init__(self, path: str) -> None:
        self._path = path
        self._stale = self._written()
        if self._stale is not None:
            log.warning("--preemption file:%s: the file is there already. If it says no time to come, it is left over "
                        "from an earlier run, and counts once it is written again; remove it", path)  # fmt: skip

    def _written(self) -> tuple[int, int] | None:
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(self._path)
            return found.st_ino, found.st_mtime_ns
        return None

    def ask(self, http: requests.Session) -> InterruptionNotice | None:
        """The file may contain the number of seconds until the node ends."""
        del http
        with contextlib.suppress(FileNotFoundError), open(self._path, encoding="utf-8") as file:
            text = file.read(64).strip()
            within = float(text) if text.replace(".", "", 1).isdigit() else None
            at = os.stat(self._path).st_mtime + within if within is not None else None
            if self._written() == self._stale and (at is None or at < time.time()):
                return None
            return InterruptionNotice(f"file: {self._path}", at)
        return None


_SOURCES = {"aws": Aws, "gcp": Gcp, "azure": Azure}


def source(text: str) -> NoticeSource | None:
    """`aws`, `gcp`, `azure` (also `NAME:URL` of the metadata service), `file:PATH` or `none`. Raises UsageError."""
    name, _, rest = text.partition(":")
    if text in ("", "none"):
        return None
    if name == "file" and rest:
        return NoticeFile(rest)
    if name in _SOURCES and (not rest or rest.startswith("http")):
        return _SOURCES[name](rest.rstrip("/")) if rest else _SOURCES[name]()
    raise UsageError(
        f"--preemption {text!r} is unknown", hint="give aws, gcp, azure, file:PATH (touch PATH to preempt) or none"
    )


class NoticePoller:
    """Owns the daemon thread `dlrover-hooks-notices`. It calls `heard` once and then ends."""

    def __init__(
        self, source: NoticeSource, heard: Callable[[InterruptionNotice], None], *, every_s: float | None = None
    ) -> None:
        fast = isinstance(source, (NoticeFile, Gcp))
        self._source, self._heard, self._every_s = source, heard, every_s or (0.5 if fast else _ASK_S)
        self._warned = False
        self._thread = BackgroundThread(
            "dlrover-hooks-notices",
            self._run,
            where=f"--preemption {source.name}",
            on_error="warn",  # workers train on without notices
            again_s=self._every_s,
        )
        self._thread.start()

    def close(self) -> None:
        """Stop polling. A request in progress is abandoned with its daemon thread. Idempotent."""
        self._thread.stop(0.2)

    def _run(self) -> None:
        with requests.Session() as http:
            http.trust_env = False  # no proxy between a machine and its metadata service
            while not self._thread.stopping.wait(self._every_s):
                try:
                    notice = self._source.ask(http)
                except (NoAnswer, requests.RequestException, OSError) as error:
                    self._warn(error)
                    continue
                if notice is not None and not self._thread.stopping.is_set():
                    self._heard(notice)
                    return

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            log.warning("--preemption %s: no answer yet, asking on: %s", self._source.name, error)
