"""Keeps an `ObjectCache` up to date: lists a collection, then watches it; lists again where the watch has a gap."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable
from typing import Any

import urllib3

from dlrover_hooks.errors import KubernetesFailed
from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.kubernetes.api_server import ApiServer
from dlrover_hooks.kubernetes.object_cache import GONE, ObjectCache, ObjectChange

log = logging.getLogger("dlrover_hooks.kubernetes")
WATCH_S = 240
"""A watch is renewed so often. The server ends it after at least 30 minutes otherwise (`--min-request-timeout`)."""
PAGE = 500
"""Objects of one answer to a list, as kubectl."""
_REFUSED = {400, 401, 403, 404, 405, 422}
"""HTTP status of an answer that another attempt does not change."""
_HINT = "the log says why"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0


class ListWatch:
    """A collection of objects, and a thread that follows its changes.

    Args:
        api: its cluster.
        path: the collection, such as "/api/v1/namespaces/default/pods".
        changed: called on the thread with every change, in order. What it raises stops nothing: see `BackgroundThread`.
        query: which objects, such as `label_selector="app=x"`.
    """

    def __init__(self, api: ApiServer, path: str, changed: Callable[[ObjectChange], object], **query: str) -> None:
        self._api, self.path, self.changed, self.query = api, path, changed, query
        self._cache, self._lock = ObjectCache(), threading.Lock()
        self._stream: urllib3.BaseHTTPResponse | None = None
        self._answered = threading.Event()
        """Set once the collection was listed, or the list was refused."""
        self._refusal = KubernetesFailed(f"{path} was not listed in time", hint=_HINT)
        """Why it is not listed yet."""
        self.lists = 0
        """How often it was listed: 1, and one for each gap of the watch."""
        self._thread = BackgroundThread(
            "kubernetes-watch", self._run, where=f"watch of {path}", again_s=1.0, wake=self._interrupt
        )

    def start(self, within_s: float) -> None:
        """Start the thread. Returns once `changed` was called for each object that there is.

        Raises `KubernetesFailed` if the server refuses the list, or has not answered after `within_s` seconds.
        """
        self._thread.start()
        if not self._answered.wait(within_s) or not self.lists:
            self.stop()
            raise self._refusal

    def check(self) -> None:
        """Raise what was raised by `changed` since the last call."""
        self._thread.check()

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._thread.stop()

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._thread.stopping.is_set():
            try:
                if not self._cache.version:
                    self._list()
                self._watch()
                pause_s = _FIRST_PAUSE_S
            except KubernetesFailed as error:
                self._met(error, warn=pause_s == _FIRST_PAUSE_S)
                self._thread.stopping.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _met(self, error: KubernetesFailed, *, warn: bool) -> None:
        if error.code == GONE:
            self._cache.version = ""
            log.info("%s: the watch has a gap; listing again", self.path)
            return
        if not self.lists:
            self._refusal = error
            if error.code in _REFUSED:
                self._answered.set()
        if warn:
            log.warning("%s Trying again.", error.message)

    def _list(self) -> None:
        found, more, version = list[dict[str, Any]](), None, ""
        while more is None or more:
            page = self._api.get(self.path, limit=PAGE, _continue=more, **self.query)
            found += page["items"]
            version, more = page["metadata"]["resourceVersion"], page["metadata"].get("continue", "")
        for change in self._cache.listed(found, version):
            self.changed(change)
        self.lists += 1
        self._answered.set()

    def _watch(self) -> None:
        with self._api.watch(
            self.path, self._cache.version, WATCH_S, allow_watch_bookmarks=True, **self.query
        ) as stream:
            with self._lock:
                self._stream = stream
            try:
                if not self._thread.stopping.is_set():
                    self._follow(stream)
            finally:
                with self._lock:
                    self._stream = None

    def _follow(self, stream: urllib3.BaseHTTPResponse) -> None:
        rest = b""
        try:
            for part in stream.stream(1 << 16):
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    if (change := self._cache.watched(self._decoded(line))) is not None:
                        self.changed(change)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            if not self._thread.stopping.is_set():
                raise KubernetesFailed(f"The watch of {self.path} broke off ({type(error).__name__}).") from error

    def _decoded(self, line: bytes) -> dict[str, Any]:
        """Raises KubernetesFailed: the change is told again by the next watch."""
        try:
            return json.loads(line)
        except ValueError as error:
            raise KubernetesFailed(f"The watch of {self.path} sent what is no JSON ({error}).") from error

    def _interrupt(self) -> None:
        with self._lock:
            if self._stream is not None:
                with contextlib.suppress(ValueError, OSError):  # it has just ended by itself
                    self._stream.shutdown()
