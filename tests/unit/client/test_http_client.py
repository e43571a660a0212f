"""The client and the liveness connection against what may stand between a worker and its master."""

from __future__ import annotations

import contextlib
import http.server
import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.client import MasterClient, http_client as client_module
from dlrover_hooks.errors import HooksError, JournalFailed, MasterAway, MasterError, UsageError
from dlrover_hooks.host.own_address import towards
from dlrover_hooks.protocol import Notice
from tests.e2e.job_script import join

HTML = (200, {"Content-Type": "text/html"}, b"<html>Sign in</html>")
MOVED = (302, {"Location": "http://127.0.0.1:9/login"}, b"")
NOT_FOUND = (404, {}, b"<html>nothing here</html>")
JOBS = (200, {}, msgspec.json.encode(p.Jobs(("j",))))
BROKEN = (200, {}, msgspec.json.encode(Notice(7, broken=True)))


def refusal(kind: type[HooksError], **headers: str) -> Answer:
    problem = p.Problem(type=kind.__name__, title="", status=503, detail="no")
    return 503, {"Content-Type": "application/problem+json", **headers}, msgspec.json.encode(problem)


Answer = tuple[int, dict[str, str], bytes]


@contextlib.contextmanager
def served(*answers: Answer) -> Iterator[int]:
    """A server on 127.0.0.1 that gives these answers in turn, the last one for ever; its port."""
    left = list(answers)

    class Page(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, headers, body = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = _answer

        def log_message(self, format: str, *arguments: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def client_of(port: int, host: str = "127.0.0.1") -> Iterator[MasterClient]:
    client = MasterClient(f"http://{host}:{port}", incarnation="w")
    try:
        yield client
    finally:
        client.close()


@pytest.mark.parametrize("odd", [HTML, MOVED, NOT_FOUND])
def test_an_odd_answer_on_the_way_is_not_the_masters(odd: Answer) -> None:
    """A proxy's page or redirect costs a call nothing but time, once a master has answered."""
    with served(JOBS, odd, JOBS) as port, client_of(port) as client:
        for _ in range(2):
            assert client.call(p.ListJobs()) == p.Jobs(("j",))


@pytest.mark.parametrize("odd", [HTML, MOVED, NOT_FOUND])
def test_a_lasting_odd_answer_is_an_absence(odd: Answer) -> None:
    """The reporter retries later what raises MasterAway; the message says what answered instead."""
    with served(JOBS, odd) as port, client_of(port) as client:
        client.call(p.ListJobs())
        with pytest.raises(MasterAway, match=rf"HTTP {odd[0]} .*not a dlrover-hooks master"):
            client.call(p.Heartbeat("j", "w"), timeout_s=60.0, again=False)


@pytest.mark.parametrize("first", [HTML, refusal(MasterAway)])
def test_a_refusal_after_an_unknown_outcome_is_not_believed(first: Answer) -> None:
    """A first attempt may have been carried out: "nothing was changed" is true of the second one only."""
    joined = (200, {}, msgspec.json.encode(p.Joined(job="job", run="r")))
    with served(JOBS, first, refusal(JournalFailed), joined) as port, client_of(port) as client:
        client.call(p.ListJobs())
        assert client.call(join()) == p.Joined(job="job", run="r")


def test_masters_with_and_without_tls_are_refused() -> None:
    """The TLS setting of the client is one for all of them."""
    with pytest.raises(UsageError, match="mix http and https"):
        MasterClient("http://a:1,https://b:1", incarnation="w")


def test_a_refusal_after_a_standby_is_believed() -> None:
    standby = refusal(MasterAway, **{p.LEADER_HEADER: ""})
    with served(standby, refusal(JournalFailed)) as port, client_of(port) as client, pytest.raises(JournalFailed):
        client.call(join(), timeout_s=3600.0)


def test_what_never_was_a_master_is_refused_at_once() -> None:
    """A wrong address is not waited for."""
    with served(HTML) as port, client_of(port) as client, pytest.raises(MasterError, match="HTTP 200"):
        client.call(p.ListJobs(), timeout_s=3600.0)


def test_a_name_of_several_addresses_is_tried_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """`localhost` is ::1 first: calls reach the master at 127.0.0.1, and so does the watch."""
    lookup, heard = socket.getaddrinfo, threading.Event()

    def two(host: str, port: int, *rest: Any, **more: Any) -> list[Any]:
        found = lookup("127.0.0.1", port, *rest, **more)
        refused = [(*one[:4], ("127.0.0.2", port)) for one in found]
        return [*refused, *found] if host == "two.test" else found

    monkeypatch.setattr(socket, "getaddrinfo", two)
    with served(BROKEN) as port, client_of(port, "two.test") as client:
        client.watch("j", lambda notice: heard.set())
        assert heard.wait(60.0)


def test_the_way_to_a_name_is_any_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without IPv6 has a way to a host that is also known by IPv6."""
    reachable = (socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.0.1", 9))
    nowhere = (socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("255.255.255.255", 9))  # needs a permission to broadcast
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [nowhere, reachable])
    assert towards("node.test", 9) == "127.0.0.1"


def test_a_master_that_was_never_there_is_named_while_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, long before the deadline."""
    monkeypatch.setattr(client_module, "_SILENT_S", 0.0)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with client_of(nobody.getsockname()[1]) as client:
            for _ in range(3):
                with pytest.raises(MasterAway):
                    client.call(p.ListJobs(), again=False)
            assert caplog.text.count(f"no master has answered at {client.url} yet") == 1


def test_a_callback_that_fails_ends_no_watch() -> None:
    """The master would declare this worker dead without a reason."""
    failures, heard = queue.SimpleQueue[HooksError](), threading.Event()

    def notice(one: Notice) -> None:
        if not failures.empty():
            heard.set()
        raise ZeroDivisionError("unforeseen")

    with served(BROKEN) as port, client_of(port) as client:
        watcher = client.watch("j", notice, on_failure=failures.put)
        assert heard.wait(60.0), "the next notice"
        assert watcher._thread.alive
    assert "job j, the liveness connection" in failures.get(timeout=60.0).message
