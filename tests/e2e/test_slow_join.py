"""A Join that the master answers late is one event, however often the agent sends it."""

from __future__ import annotations

import http.server
import threading
from typing import Any

import msgspec

from dlrover_hooks import protocol as p
from dlrover_hooks.client import MasterClient
from dlrover_hooks.launcher.master_requests import AgentAddress, MasterRequests
from dlrover_hooks.launcher.options import LaunchOptions


class Slow(http.server.BaseHTTPRequestHandler):
    """Answers the first Join when the second one has come."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(p.Jobs(()))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        server: Any = self.server
        server.keys.append(self.headers["Idempotency-Key"])
        if len(server.keys) == 1:
            assert server.second.wait(60)
        else:
            server.second.set()
        self.answer(p.Joined("job", "run"))

    def answer(self, reply: p.Message) -> None:
        body = msgspec.json.encode(reply)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def test_a_slow_join_is_sent_again_under_its_own_key() -> None:
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    server.keys, server.second = [], threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = MasterClient(f"http://127.0.0.1:{server.server_port}", incarnation="agent")
    try:
        speaks = MasterRequests(
            LaunchOptions(command=("true",)),
            AgentAddress("job", "node", "127.0.0.1"),
            client,
            lambda: None,
            lambda: None,
        )
        assert speaks.join((p.Seat("w0", 0),), 60.0, first=True, fresh=False).run == "run"
        assert len(server.keys) == 2
        assert len(set(server.keys)) == 1
        speaks.join((p.Seat("w1", 0),), 60.0, first=False, fresh=False)
        assert server.keys[2] != server.keys[0]
    finally:
        client.close()
        server.shutdown()
        server.server_close()
