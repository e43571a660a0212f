"""Sends the statistics of one job to the Brain, in batches, on a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

from dlrover_hooks.config import Tls
from dlrover_hooks.errors import BrainAway, HooksError, UnknownJob
from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.master.brain.client.brain_client import BrainClient
from dlrover_hooks.master.brain.messages import BATCH, RegisterJob, ReportSamples, TimedSample
from dlrover_hooks.protocol import JobSample

log = logging.getLogger("dlrover_hooks.brain")
EVERY_S = 5.0
"""A sample waits at most so long for others."""
QUEUE = 4096
"""Samples that wait while the Brain is away: half a day of one every 10 s. Then the oldest are dropped."""
BATCH_NODES = 20_000
"""Nodes in the samples of one request: about 3 MB, the Brain refuses 16."""
ATTEMPT_S = 3.0
LAST_S = 2.0
"""At the end the samples that wait are sent within this time, or dropped."""


class StatsReporter:
    """Reports samples of `job` to the Brain at `url`. It registers the job if the Brain does not know it.

    While the Brain is away, samples wait; one that was sent and not answered is sent again, so it may count twice.

    Args:
        every_s: seconds between two batches.
        queue: samples that wait at most.

    Raises `UsageError` for a wrong address.
    """

    def __init__(
        self, url: str, token: str | None, job: RegisterJob, *, every_s: float = EVERY_S, queue: int = QUEUE,
        tls: Tls | None = None,
    ) -> None:  # fmt: skip
        self._client, self._job, self._every_s, self._most = BrainClient(url, token, tls=tls), job, every_s, queue
        self._waiting, self._guard = deque[TimedSample](), threading.Lock()
        self._ready = threading.Event()
        self.sent, self.dropped = 0, 0
        """Samples that the Brain has, and those that were given up."""
        self._away = False
        self._thread = BackgroundThread(
            "stats-reporter", self._run, where=f"job {job.job}", on_error="warn", again_s=every_s, wake=self._ready.set
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def report(self, sample: JobSample, at: float | None = None) -> None:
        """Queue a sample; never waits. `at`: the end of its window, seconds since 1970; by default now. Any thread."""
        with self._guard:
            if len(self._waiting) >= self._most:
                self._waiting.popleft()
                self.dropped += 1
            self._waiting.append(TimedSample(time.time() if at is None else at, sample))
            full = len(self._waiting) >= BATCH
        if full:
            self._ready.set()

    def stop(self) -> bool:
        """Send what waits, and end the thread. False: not all was sent. Bounded by `LAST_S` and one attempt."""
        self._thread.stop(2 * (ATTEMPT_S + LAST_S))
        self._client.close()
        with self._guard:
            self.dropped += len(self._waiting)
            complete = not self._waiting
            self._waiting.clear()
        return complete

    def _run(self) -> None:
        while not self._thread.stopping.is_set():
            self._ready.wait(self._every_s)
            self._ready.clear()
            self._flush(ATTEMPT_S)
        self._flush(LAST_S)

    def _flush(self, within_s: float) -> None:
        """Send all that waits, oldest first, until the Brain does not answer."""
        until = time.monotonic() + within_s
        while batch := self._batch():
            try:
                self._send(batch, max(0.1, min(within_s, until - time.monotonic())))
            except BrainAway as error:
                self._put_back(batch)
                if not self._away:
                    log.warning("job %s: %s Its statistics wait", self._job.job, error.message)
                self._away = True
                return
            except HooksError as error:  # another attempt would end likewise
                self.dropped += len(batch)
                log.error("job %s: the Brain refuses its statistics: %s", self._job.job, error)
                return
            self.sent += len(batch)
            if self._away:
                log.warning("job %s: the Brain answers again; %d samples were lost", self._job.job, self.dropped)
            self._away = False

    def _send(self, batch: list[TimedSample], within_s: float) -> None:
        try:
            self._client.call(ReportSamples(self._job.job, tuple(batch)), within_s)
        except UnknownJob:
            self._client.call(self._job, within_s)
            self._client.call(ReportSamples(self._job.job, tuple(batch)), within_s)

    def _batch(self) -> list[TimedSample]:
        """The oldest samples that fit into one request."""
        batch, nodes = list[TimedSample](), 0
        with self._guard:
            while self._waiting and len(batch) < BATCH and nodes < BATCH_NODES:
                batch.append(self._waiting.popleft())
                nodes += len(batch[-1].sample.nodes)
        return batch

    def _put_back(self, batch: list[TimedSample]) -> None:
        with self._guard:
            room = max(0, self._most - len(self._waiting))
            self.dropped += max(0, len(batch) - room)
            self._waiting.extendleft(reversed(batch[len(batch) - room :] if room < len(batch) else batch))
