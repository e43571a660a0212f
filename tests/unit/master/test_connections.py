"""Limits of connections that have not shown a token: real sockets, a server in this process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import uvicorn

from dlrover_hooks.master.app import App
from dlrover_hooks.master.connections import Connection, Limits, UnauthenticatedConnections
from dlrover_hooks.master.core import views
from dlrover_hooks.master.journal.sqlite_journal import SqliteJournal
from dlrover_hooks.master.metrics import Metrics
from dlrover_hooks.master.runtime import Runtime
from dlrover_hooks.protocol import Leases, Ledger, Message, OpenLedger, Partition, Routes, TakeLeases, Watch
from dlrover_hooks.testing import StorageFake

Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Takes `/token` for a request with the token."""
    if scope["path"] == "/token":
        scope["state"]["connection"].welcome()
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.asynccontextmanager
async def serving(limits: Limits, served: Any = app) -> AsyncIterator[Any]:
    """Gives `connect`."""
    listener = socket.create_server(("127.0.0.1", 0))
    made = functools.partial(Connection, UnauthenticatedConnections(limits))
    config = uvicorn.Config(
        served,
        interface="asgi3",
        http=made,  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
    )
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[listener])
    await server.on_tick(0)  # makes the Date header
    peers: list[Peer] = []

    async def connect() -> Peer:
        peers.append(await asyncio.open_connection(*listener.getsockname()))
        return peers[-1]

    try:
        yield connect
    finally:
        for _, writer in peers:
            writer.close()
        await server.shutdown(sockets=[listener])


async def ask(peer: Peer, path: str = "/") -> bytes:
    """The answer's first line."""
    reader, writer = peer
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    await reader.readexactly(2)
    return head.partition(b"\r\n")[0]


async def answers(peer: Peer, path: str) -> bool:
    """It was not ended before."""
    try:
        return b"200" in await ask(peer, path)
    except (ConnectionError, asyncio.IncompleteReadError):
        return False


async def end(peer: Peer) -> bytes:
    """What comes until the connection ends."""
    try:
        return await asyncio.wait_for(peer[0].read(), 10)
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize(
    ("begin", "filling"),
    [
        (b"GET /", b"x"),
        (b"GET / HTTP/1.1\r\na: ", b"x"),
        (b"GET / HTTP/1.1\r\n", b"a: b\r\n"),
        (b"", b"\r\n"),
        (b"POST /token HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1;", b"x"),
        (b"POST /token HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\na: ", b"x"),
    ],
)
def test_a_head_without_end_is_refused(begin: bytes, filling: bytes) -> None:
    """Row 5: after 64 KiB, wherever in the request it is: URL, header, line breaks, chunk extension, trailer."""

    async def scenario() -> None:
        async with serving(Limits()) as connect:
            peer = await connect()
            peer[1].write(begin)
            sent = 0
            with contextlib.suppress(ConnectionError):
                while sent < 2**20 and not peer[0].at_eof():
                    peer[1].write(filling * 1000)
                    await peer[1].drain()
                    sent += len(filling) * 1000
                    await asyncio.sleep(0)
            assert sent < 2**20

    asyncio.run(scenario())


def test_a_head_that_takes_too_long_is_refused() -> None:
    """Row 5: also on a connection that has shown the token; what is complete is not touched."""

    async def scenario() -> None:
        async with serving(Limits(head_s=0.05)) as connect:
            known, slow = await connect(), await connect()
            for peer in (known, slow):
                assert b"200" in await ask(peer, "/token")
            slow[1].write(b"GET / HTTP/1.1\r\nhost")
            assert (await end(slow)).startswith(b"HTTP/1.1 408")
            assert b"200" in await ask(known)

    asyncio.run(scenario())


def test_a_stranger_is_not_kept() -> None:
    """Row 5: silent, or after an answer that needs no token."""

    async def scenario() -> None:
        async with serving(Limits(stranger_s=0.05)) as connect:
            known = await connect()
            while not await answers(known, "/token"):  # this machine may be slow
                known = await connect()
            silent, probing = await connect(), await connect()
            await answers(probing, "/")
            assert await end(silent) == await end(probing) == b""
            assert b"200" in await ask(known)

    asyncio.run(scenario())


def test_too_many_strangers_end_the_oldest() -> None:
    """Row 5: a caller with the token is served, however many others there are."""

    async def scenario() -> None:
        async with serving(Limits(strangers=2)) as connect:
            known = await connect()
            assert b"200" in await ask(known, "/token")
            strangers = [await connect() for _ in range(2)]
            for stranger in strangers:
                assert b"200" in await ask(stranger)
            late = await connect()
            assert b"200" in await ask(late, "/token")
            assert await end(strangers[0]) == b""
            for peer in (known, strangers[1], late):
                assert b"200" in await ask(peer)

    asyncio.run(scenario())


def test_too_many_connections_are_refused_with_the_reason() -> None:
    """Those that are open are served on, and when one ends there is room again."""

    async def scenario() -> None:
        async with serving(Limits(connections=2)) as connect:
            known = [await connect() for _ in range(2)]
            for peer in known:
                assert b"200" in await ask(peer, "/token")
            late = await connect()
            late[1].write(b"GET /token HTTP/1.1\r\nhost: x\r\n\r\n")
            answer = await end(late)
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"This master has 2 connections" in answer
            assert b"ulimit -n" in answer
            known[0][1].close()
            assert b"200" in await ask(known[1], "/token")
            while not await answers(late := await connect(), "/token"):  # until the server has noticed the end
                late[1].close()
            assert b"200" in await ask(known[1])

    asyncio.run(scenario())


def test_connections_without_the_token_leave_the_last_place_to_others() -> None:
    """A peer without the token that fills the last places is ended by the next connection."""

    async def scenario() -> None:
        async with serving(Limits(connections=2)) as connect:
            strangers = [await connect() for _ in range(3)]
            assert await end(strangers[0]) == await end(strangers[1]) == b""

    asyncio.run(scenario())


def test_a_bug_in_a_long_poll_is_answered(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """With the error's name, although most of the request is dropped while it waits."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    async def scenario() -> None:
        runtime = Runtime(SqliteJournal(), storage=StorageFake())
        runtime.start()
        async with serving(Limits(), App(runtime, Metrics()).asgi) as connect:
            peer = await connect()
            head = b"host: 127.0.0.1\r\ncontent-type: application/json\r\nconnection: close\r\n"
            body = msgspec.json.encode(Watch("job", "w0"))
            peer[1].write(b"POST /v1/watch HTTP/1.1\r\n%scontent-length: %d\r\n\r\n%s" % (head, len(body), body))
            answer = await end(peer)
        await runtime.close()
        assert answer.startswith(b"HTTP/1.1 500")
        assert b"ZeroDivisionError in the master" in answer

    monkeypatch.setitem(views._TABLE, Watch, broken)
    asyncio.run(scenario())
    assert "POST /v1/watch failed" in caplog.text


def post(message: Message, header: bytes = b"") -> bytes:
    """The request that sends `message`."""
    body = msgspec.json.encode(message)
    head = b"host: 127.0.0.1\r\ncontent-type: application/json\r\n" + header
    path = Routes.by_request[type(message)].path.encode()
    return b"POST %s HTTP/1.1\r\n%scontent-length: %d\r\n\r\n%s" % (path, head, len(body), body)


def split(answers: bytes) -> list[tuple[bytes, bytes]]:
    """Head and body of each answer."""
    found = list[tuple[bytes, bytes]]()
    while answers:
        head, _, answers = answers.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        found.append((head, answers[:length]))
        answers = answers[length:]
    return found


def test_replies_are_in_the_order_of_their_requests_and_the_connection_closes_if_asked() -> None:
    """Sent at once, so that some replies go out in one write and others as uvicorn does it."""
    ledger = OpenLedger("job", "h", "data", "f", (Partition(end=100),), 100, batch_size=1, shard_size=8, free=True)
    take = TakeLeases("job", "h", "data", 1, 1)

    async def scenario() -> list[tuple[bytes, bytes]]:
        runtime = Runtime(SqliteJournal(), storage=StorageFake())
        runtime.start()
        async with serving(Limits(), App(runtime, Metrics()).asgi) as connect:
            peer = await connect()
            peer[1].write(post(ledger) + post(take) + post(take))
            peer[1].write(post(take, b"connection: close\r\n"))
            answers = split(await end(peer))
        await runtime.close()
        return answers

    answers = asyncio.run(scenario())
    assert [head.partition(b"\r\n")[0] for head, _ in answers] == [b"HTTP/1.1 200 OK"] * 4
    assert all(b"\r\ndate: " in head and b"\r\ncontent-type: application/json" in head for head, _ in answers)
    assert [b"connection: close" in head for head, _ in answers] == [False, False, False, True]
    msgspec.json.decode(answers[0][1], type=Ledger)
    lent = [msgspec.json.decode(body, type=Leases).leases[0].lo for _, body in answers[1:]]
    assert lent == [0, 8, 16]


def test_a_request_that_begins_before_the_reply_to_the_one_before() -> None:
    """A client that sends several requests at once, the second of them in two pieces."""

    async def scenario() -> None:
        async with serving(Limits()) as connect:
            reader, writer = await connect()
            request = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
            writer.write(request + request[:20])
            first = await asyncio.wait_for(reader.readuntil(b"ok"), 10)
            writer.write(request[20:])
            assert await asyncio.wait_for(reader.readuntil(b"ok"), 10) == first

    asyncio.run(scenario())


def test_a_slow_reader_gets_the_whole_response() -> None:
    """It is written as the peer reads it."""
    size, parts = 2**20, 16

    async def large(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        for left in range(parts, 0, -1):
            waited.append(scope["state"]["connection"].flow.write_paused)
            await send({"type": "http.response.body", "body": bytes(size), "more_body": left > 1})

    async def scenario() -> bytes:
        async with serving(Limits(), large) as connect:
            peer = await connect()
            peer[1].write(b"GET / HTTP/1.0\r\n\r\n")
            return await end(peer)

    waited = list[bool]()
    answer = asyncio.run(scenario())
    assert any(waited), "the peer was never too slow: send more"
    assert answer.count(b"\0") == parts * size
