"""Preemption notices: the documented answers, and pollers against a real HTTP server."""

from __future__ import annotations

import http.server
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests

from dlrover_hooks.errors import UsageError
from dlrover_hooks.launcher import interruption_notices
from dlrover_hooks.launcher.interruption_notices import (
    InterruptionNotice,
    NoAnswer,
    NoticePoller,
    aws,
    azure,
    gcp,
    source,
)
from tests.waiting import until

NOW = 1_700_000_000.0


def event(kind: str = "Preempt", machine: str = "vm0", when: str = "Tue, 14 Nov 2023 22:14:00 GMT") -> bytes:
    found = {"EventId": "1", "EventType": kind, "ResourceType": "VirtualMachine", "Resources": ["vm9", machine]}
    found |= {"EventStatus": "Scheduled", "NotBefore": when, "Description": "", "DurationInSeconds": -1}
    return json.dumps({"DocumentIncarnation": 3, "Events": [found]}).encode()


def test_aws() -> None:
    assert aws(404, b"<html/>") is None
    body = b'{"action": "terminate", "time": "2023-11-14T22:15:20Z"}'
    assert aws(200, body) == InterruptionNotice("aws: spot instance terminate", NOW + 120)
    for status, wrong in ((200, b"{}"), (200, b'{"action": "stop", "time": "soon"}'), (401, b""), (500, b"")):
        with pytest.raises(NoAnswer):
            aws(status, wrong)


def test_gcp() -> None:
    assert gcp(200, b"FALSE", NOW) is None
    assert gcp(200, b"TRUE\n", NOW) == InterruptionNotice("gcp: preempted", NOW + 30)
    for status, wrong in ((200, b"<html>"), (404, b"")):
        with pytest.raises(NoAnswer):
            gcp(status, wrong, NOW)


def test_azure() -> None:
    assert azure(200, b'{"DocumentIncarnation": 1, "Events": []}', "vm0", NOW) is None
    assert azure(200, event(), "vm0", NOW) == InterruptionNotice("azure: Preempt", NOW + 40)
    assert azure(200, event(when=""), "vm0", NOW) == InterruptionNotice("azure: Preempt", NOW + 30)
    assert azure(200, event(), "vm1", NOW) is None, "another machine of the scale set"
    assert azure(200, event("Freeze"), "vm0", NOW) is None, "a pause of some seconds"
    for status, wrong in ((200, b"[]"), (200, event(when="soon")), (410, b"")):
        with pytest.raises(NoAnswer):
            azure(status, wrong, "vm0", NOW)


class Metadata(http.server.ThreadingHTTPServer):
    """A metadata service of all three clouds; `gone` says what is asked for a notice."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.tokens = 0
        self.gone = threading.Event()
        super().__init__(("127.0.0.1", 0), _Answers)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answers(http.server.BaseHTTPRequestHandler):
    server: Metadata  # pyright: ignore[reportIncompatibleVariableOverride]  # whose handler it is

    def do_PUT(self) -> None:
        assert self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self.server.tokens += 1
        self._answer(200, f"token{self.server.tokens}".encode())

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        gone = self.server.gone.is_set()
        if "instance-action" in self.path:
            if self.headers["X-aws-ec2-metadata-token"] != "token2":  # the first one runs out at once
                self._answer(401, b"")
            else:
                self._answer(*(200, b'{"action": "stop", "time": "2023-11-14T22:15:20Z"}') if gone else (404, b""))
        elif "preempted" in self.path and self.headers["Metadata-Flavor"] == "Google":
            self._answer(200, b"TRUE" if self.server.gone.wait(3) else b"FALSE")
        elif "compute/name" in self.path and self.headers["Metadata"] == "true":
            self._answer(200, b"vm0")
        elif "scheduledevents" in self.path and self.headers["Metadata"] == "true":
            self._answer(200, event() if gone else b'{"Events": []}')
        else:
            self._answer(400, b"")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    server = Metadata()
    yield server
    server.gone.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def poll() -> Iterator[Callable[[str], tuple[threading.Event, list[InterruptionNotice]]]]:
    """Polls `--preemption TEXT`; what it heard, and the event that it did."""
    pollers = []

    def start(text: str) -> tuple[threading.Event, list[InterruptionNotice]]:
        heard, event, asked = list[InterruptionNotice](), threading.Event(), source(text)
        assert asked is not None

        def hear(notice: InterruptionNotice) -> None:
            heard.append(notice)
            event.set()

        pollers.append(NoticePoller(asked, hear, every_s=0.02))
        return event, heard

    yield start
    for one in pollers:
        one.close()


@pytest.mark.parametrize(("cloud", "reason"), [("aws", "stop"), ("gcp", "preempted"), ("azure", "Preempt")])
def test_a_poller_hears_its_cloud(metadata: Metadata, poll: Callable, cloud: str, reason: str) -> None:
    """Nothing before, the notice once it is there; a token that ran out is replaced."""
    told, heard = poll(f"{cloud}:{metadata.url}")
    until(lambda: len(metadata.asked) >= (1 if cloud == "gcp" else 3), "questions to the metadata service")
    assert not told.is_set()
    metadata.gone.set()
    assert told.wait(5)
    assert reason in heard[0].reason


def test_a_touched_file(tmp_path: Path, poll: Callable) -> None:
    path = tmp_path / "preempt"
    told, heard = poll(f"file:{path}")
    assert not told.wait(0.1)
    path.write_text("90")
    assert told.wait(5)
    assert heard[0].at == pytest.approx(time.time() + 90, abs=5)


@pytest.mark.parametrize("text", ["", "90"])
def test_a_file_of_an_earlier_run_is_named_and_not_obeyed(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It counts once it is written again, or where it says a time that is still to come."""
    path = tmp_path / "preempt"
    path.write_text(text)
    os.utime(path, (1e9, 1e9))
    source, http = interruption_notices.NoticeFile(str(path)), requests.Session()
    assert source.ask(http) is None
    assert str(path) in caplog.text
    path.write_text(text)
    assert source.ask(http) is not None
    path.write_text("90")
    assert interruption_notices.NoticeFile(str(path)).ask(http) is not None
    http.close()


def test_a_service_that_is_not_there_is_asked_on(poll: Callable, caplog: pytest.LogCaptureFixture) -> None:
    """On another machine than the flag says: one warning, no end."""
    told, _ = poll("aws:http://127.0.0.1:9")
    until(lambda: "no answer yet" in caplog.text, "the warning")
    assert not told.is_set()


def test_words() -> None:
    assert source("none") is None
    for wrong in ("alibaba", "file:", "aws:ftp"):
        with pytest.raises(UsageError, match="file:PATH"):
            source(wrong)


def test_a_poller_outlives_an_unexpected_answer(caplog: pytest.LogCaptureFixture) -> None:
    answers = iter([ZeroDivisionError("unforeseen")])

    class Odd:
        name = "odd"

        def ask(self, http: requests.Session) -> InterruptionNotice | None:
            for error in answers:
                raise error
            return InterruptionNotice("odd: gone")

    heard = queue.SimpleQueue[InterruptionNotice]()
    poller = NoticePoller(Odd(), heard.put, every_s=0.01)
    assert heard.get(timeout=60.0).reason == "odd: gone"
    poller.close()
    assert "--preemption odd: the thread dlrover-hooks-notices met ZeroDivisionError" in caplog.text
