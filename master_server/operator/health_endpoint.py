"""`/healthz` and `/readyz` over HTTP, for the probes of a kubelet."""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from dlrover_hooks.errors import UsageError
from dlrover_hooks.host.background_thread import BackgroundThread

_TIMEOUT_S = 5.0


class HealthEndpoint:
    """Serves on all addresses from `start` to `stop`. Raises `UsageError` if the port is taken.

    Args:
        port: 0 picks a free one; see `port`.
        healthy: whether this process works. Called on the thread of a request. Otherwise the answer is 503.
        ready: what `/readyz` says, and whether it is 200.
    """

    def __init__(self, port: int, healthy: Callable[[], bool], ready: Callable[[], tuple[bool, str]]) -> None:
        class HealthProbe(BaseHTTPRequestHandler):
            timeout = _TIMEOUT_S

            def do_GET(self) -> None:
                if self.path == "/healthz":
                    good, text = healthy(), "ok"
                elif self.path == "/readyz":
                    good, text = ready()
                else:
                    self.send_error(404, "there are /healthz and /readyz")
                    return
                body = f"{text if good or text != 'ok' else 'failed'}\n".encode()
                self.send_response(200 if good else 503)
                self.send_header("Content-Type", "text/plain; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Nothing: probes come every few seconds."""

        try:
            self._server = ThreadingHTTPServer(("", port), HealthProbe)
        except OSError as error:
            raise UsageError(
                f"port {port} cannot be used: {error.strerror}", hint="give --health-port another one"
            ) from error
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = BackgroundThread(
            "dlrover-hooks-health", self._server.serve_forever, where=f"port {self.port}", on_error="warn",
            wake=self._server.shutdown,
        )  # fmt: skip

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close the port. Only after `start`."""
        self._thread.stop()
        self._server.server_close()
