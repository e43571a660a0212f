"""The Brain's HTTP interface. Its errors are problem+json, its tokens and limits those of the master.

A request that waits for a plan holds a thread; the others take a thread for milliseconds.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route as HttpRoute

from dlrover_hooks.errors import HooksError
from dlrover_hooks.master.brain import administer
from dlrover_hooks.master.brain.database import events, jobs
from dlrover_hooks.master.brain.database.database import Database
from dlrover_hooks.master.brain.messages import (
    PATHS,
    AskPlan,
    EndJob,
    PlanAnswer,
    Registered,
    RegisterJob,
    ReportSamples,
)
from dlrover_hooks.master.brain.optimize_processor import OptimizeProcessor
from dlrover_hooks.master.http_answers import (
    BODY_LIMIT_BYTES,
    bearer,
    bug,
    check_bearer,
    check_browser,
    http_problem,
    malformed,
    plain,
    problem,
    read_body,
)
from dlrover_hooks.protocol import Done, Message

POLL_S = 0.05
"""Between two looks whether another process has made the plan."""
QUICK, WAITING = 8, 24
"""Threads for requests that only read and write, and for those that wait for a plan."""
T = TypeVar("T")


class BrainService:
    """What the requests do. Threads call it at the same time; each call blocks its thread."""

    def __init__(self, database: Database, processor: OptimizeProcessor) -> None:
        self.database, self.processor = database, processor
        self.ending = threading.Event()
        """Set when the process ends: requests that wait are answered."""

    def register(self, message: RegisterJob) -> Registered:
        """Begin a job with its first event, or update what is known of it."""
        with self.database.writing() as connection:
            now = self.database.now(connection)
            row, made = jobs.register(connection, message, now)
            if made:
                events.create(connection, row.id, administer.created(), now)
            return Registered(events.newest_plan(connection, row.id))

    def report(self, message: ReportSamples) -> Done:
        """Keep samples. Raises `UnknownJob`."""
        with self.database.writing() as connection:
            jobs.add_samples(connection, message.job, message.samples, self.database.now(connection))
        return Done()

    def plan(self, message: AskPlan) -> PlanAnswer:
        """The newest plan that the master has not got, or a new one. Raises `UnknownJob`."""
        until = time.monotonic() + message.timeout_s
        with self.database.writing() as connection:
            now = self.database.now(connection)
            row = jobs.find(connection, message.job)
            if not message.oom_nodes and not message.model_only:
                found = events.unseen_plan(connection, row.id, message.stage, message.have, now)
                if found is not None:
                    return found
            event_id = events.create(connection, row.id, administer.asked(message), now)
        self.processor.process(event_id)
        while True:
            with self.database.reading() as connection:
                answer = events.outcome(connection, event_id)
            if answer is not None:
                return answer
            left = until - time.monotonic()
            if left <= 0 or self.ending.wait(min(POLL_S, left)):
                return PlanAnswer(pending=True)

    def end(self, message: EndJob) -> Done:
        """The job is over. Raises `UnknownJob`."""
        with self.database.writing() as connection:
            now = self.database.now(connection)
            # before its events, as everywhere: otherwise two transactions may deadlock
            row = jobs.find(connection, message.job, lock=True)
            events.drop_open(connection, row.id, "the job has ended", now)
            jobs.end(connection, message.job, message.succeeded, now)
        return Done()

    def check(self) -> None:
        """Raises `DatabaseFailed` if the database does not answer."""
        with self.database.reading() as connection:
            events.next_due(connection, self.database.now(connection))


class BrainApp:
    """`asgi` is the application. `close` ends its threads."""

    def __init__(
        self, service: BrainService, *, token: str | None = None, body_limit_bytes: int = BODY_LIMIT_BYTES
    ) -> None:
        self.service, self._token, self._bearer = service, token, bearer(token)
        self._body_limit_bytes = body_limit_bytes
        self._quick, self._waiting = ThreadPoolExecutor(QUICK, "brain"), ThreadPoolExecutor(WAITING, "brain-plan")
        calls: dict[type[msgspec.Struct], tuple[Callable[[Any], Message], ThreadPoolExecutor]] = {
            RegisterJob: (service.register, self._quick),
            ReportSamples: (service.report, self._quick),
            AskPlan: (service.plan, self._waiting),
            EndJob: (service.end, self._quick),
        }
        routes = [
            HttpRoute(
                PATHS[kind][0], functools.partial(self._answer, msgspec.json.Decoder(kind), *call), methods=["POST"]
            )
            for kind, call in calls.items()
        ]
        self.asgi = Starlette(
            routes=[*routes, HttpRoute("/healthz", self._health), HttpRoute("/readyz", self._ready)],
            exception_handlers={HTTPException: http_problem, HooksError: problem, Exception: bug},
        )

    def close(self) -> None:
        """Answer what waits, and end the threads."""
        self.service.ending.set()
        self._quick.shutdown(cancel_futures=True)
        self._waiting.shutdown(cancel_futures=True)

    async def _answer(
        self, decoder: msgspec.json.Decoder[Any], call: Callable[[Any], Message], threads: ThreadPoolExecutor,
        request: Request,
    ) -> Response:  # fmt: skip
        check_bearer(dict(request.scope["headers"]), self._bearer, "the Brain's")
        request.scope["state"]["connection"].welcome()
        if self._token is None:
            check_browser(request, "Brain")
        try:
            body = await read_body(request, self._body_limit_bytes)
        except ClientDisconnect:
            return Response(status_code=499)
        try:
            message = decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise malformed(error, "See dlrover_hooks.master.brain.messages.") from error
        reply = await self._on(threads, functools.partial(call, message))
        return Response(msgspec.json.encode(reply), media_type="application/json")

    async def _health(self, request: Request) -> Response:
        del request
        return plain({"status": "ok", "worker": self.service.processor.worker})

    async def _ready(self, request: Request) -> Response:
        del request
        try:
            await self._on(self._quick, self.service.check)
        except HooksError as error:
            return plain({"status": error.message}, 503)
        return plain({"status": "ready"})

    async def _on(self, threads: ThreadPoolExecutor, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(threads, call)
