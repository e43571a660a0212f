"""Sends one message to the Brain and returns its reply, within a deadline."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
import requests

from dlrover_hooks import config as settings
from dlrover_hooks.config import Tls
from dlrover_hooks.config.tls_files import usable
from dlrover_hooks.errors import BrainAway, HooksError, UsageError, named
from dlrover_hooks.master.brain.messages import PATHS
from dlrover_hooks.protocol import Problem

CONNECT_S = 3.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_HINT = "Is it running, and reachable from here? See its /readyz."


class BrainClient:
    """Calls the Brain at `url`, such as `http://127.0.0.1:8781`. One thread uses it; `close` may come from another.

    Args:
        token: bearer token, if the Brain requires one.
        tls: for https; by default from the environment, see `config.tls`.

    Raises `UsageError` if `url` is no URL, or a file of `tls` cannot be used.
    """

    def __init__(self, url: str, token: str | None = None, *, tls: Tls | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"the Brain's address {url!r} is no URL", hint="give one such as http://127.0.0.1:8781")
        self.url, self._closed = url.rstrip("/"), threading.Event()
        self._session = requests.Session()
        self._session.trust_env = False  # no proxies and no netrc between a master and its Brain
        self._session.headers["Content-Type"] = "application/json"
        if token is not None:
            self._session.headers["Authorization"] = f"Bearer {token}"
        if self.url.startswith("https:"):
            files = usable(tls or settings.tls())
            self._session.verify = files.ca
            self._session.cert = (files.cert, files.key or files.cert) if files.cert else None

    def call(self, message: msgspec.Struct, deadline_s: float) -> Any:
        """The reply. It is asked again while the Brain is away.

        Raises `BrainAway` after `deadline_s` seconds, `UnknownJob`, and the other errors that the Brain answers with.
        """
        until, pause_s = time.monotonic() + deadline_s, _FIRST_PAUSE_S
        while True:
            left = until - time.monotonic()
            try:
                return self._once(message, max(0.05, left))
            except BrainAway:
                if until - time.monotonic() <= pause_s or self._closed.wait(pause_s):
                    raise
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def close(self) -> None:
        """Close the connection; a call that waits for another attempt ends."""
        self._closed.set()
        self._session.close()

    def _once(self, message: msgspec.Struct, left: float) -> Any:
        path, kind = PATHS[type(message)]
        try:
            response = self._session.post(
                self.url + path, data=msgspec.json.encode(message), timeout=(min(left, CONNECT_S), left),
                allow_redirects=False,
            )  # fmt: skip
        except requests.RequestException as error:
            raise self._away(message, type(error).__name__) from None
        try:
            if response.status_code < 300:
                return msgspec.json.decode(response.content, type=kind)
            problem = msgspec.json.decode(response.content, type=Problem)
        except (msgspec.DecodeError, UnicodeDecodeError, HooksError):
            why = f"HTTP {response.status_code}, and the answer is not a Brain's"
            raise self._away(message, why) from None
        if response.status_code >= 500:
            raise self._away(message, f"{problem.detail} {problem.hint}".strip())
        raise named(problem.type)(problem.detail, hint=problem.hint)

    def _away(self, message: msgspec.Struct, why: str) -> BrainAway:
        return BrainAway(f"The Brain at {self.url} gave no answer to {type(message).__name__} ({why}).", hint=_HINT)
