"""A real master process: every route, every refusal, and what happens when it is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import openapi_spec_validator
import pytest
import requests

from dlrover_hooks import protocol as p
from dlrover_hooks.client import MasterClient
from dlrover_hooks.client.liveness_connection import LivenessConnection
from dlrover_hooks.errors import MasterAway, Stale, TooLarge, Unauthorized, UnknownJob
from dlrover_hooks.master.listening import _KEEPALIVE, _keep_alive
from tests.e2e.job_script import attach, join, vote
from tests.e2e.master_process import LiveMaster
from tests.waiting import WAIT_S


def test_every_route_answers(live_master: LiveMaster) -> None:
    """Each row of ROUTES, through the client, against a real process."""
    exercised: set[type[p.Message]] = set()

    def call(incarnation: str, request: p.Message) -> Any:
        exercised.add(type(request))
        reply = live_master.client(incarnation).call(request)
        assert type(reply) is p.Routes.by_request[type(request)].reply
        return reply

    call("agent", join())
    assert call("agent", p.AwaitRound("job", "agent")).ranks == (0, 1)
    for worker in ("w0", "w1"):
        call(worker, attach(worker))
    assert call("w0", p.AwaitPlan("job", "w0")).phase is p.Phase.TRAINING
    assert call("w0", p.Locate("job", "w0", p.Generation(0, 1, "run0"), 0)).at == ()
    call("w0", p.Loaded("job", "w0", 1, True))
    call("w0", p.Heartbeat("job", "w0", 2))
    cpu, memory = p.CPUVitals(8, 1.0, (1.0, 1.0, 1.0)), p.MemoryVitals(2, 1)
    call("agent", p.NodeVitals("job", "agent", "node-agent", cpu, memory, p.NetworkVitals(0.0, 0.0)))
    assert call("x", p.ShowVitals("job")).nodes[0].cpu == cpu
    whole = (p.Partition(end=20),)
    assert call("w0", p.OpenLedger("job", "w0", "a/data set", "f", whole, 10, shard_size=4)).fence == 1
    lease = call("w0", p.TakeLeases("job", "w0", "a/data set", 1)).leases[0]
    call("w0", p.TakeLeases("job", "w0", "a/data set", 1, 0, acks=(p.Ack(lease.id, 3),)))
    assert call("w0", p.AwaitShards("job", "w0", "a/data set", 1)).state is p.LedgerState.OPEN
    assert call("x", p.ShowLedger("job", "a/data set")) == p.LedgerView(1, 3, {"w0": 1}, 16, leases=1)
    call("w0", vote(0, 2))
    assert call("x", p.ListJobs()).jobs == ("job",)
    assert call("x", p.ShowJob("job")).round == 1
    assert call("w1", p.Preempt("job", "w1", "node", 30.0, "SIGTERM")).nodes == ("node",)
    for worker, passed in (("w0", 4), ("w1", 3)):
        call(worker, p.Hold("job", worker, passed))
    assert call("w1", p.AwaitParting("job", "w1")).step == 5
    put = p.KeyChange(p.Change.SET, "key", b"value")
    assert call("w0", p.ChangeKeys("job", "w0", 1, (put,))).values == (b"value",)
    assert call("w1", p.AwaitKeys("job", "w1", 1, ("key",))).values == (b"value",)
    assert call("w1", p.ListKeys("job", "w1", 1)).names == ("key",)
    call("agent", p.Exited("job", "agent", "w1", -9))
    assert call("w0", p.Watch("job", "w0")).broken
    call("w0", p.Leave("job", "w0", p.Departure.STOPPED))
    call("other", p.Join("short", "other", "node", (p.Seat("s0", 0),), "localhost", 1, 1, 1, "run1"))
    call("x", p.DeleteJob("short", force=True))
    play_tasks(call)
    play_check(call)
    play_roles(call)
    play_planned_nodes(call)
    assert exercised == {row.request for row in p.ROUTES}
    metrics = requests.get(live_master.url + "/metrics", headers=_token(live_master), timeout=60).text
    assert 'dlrover_hooks_rounds_total{job="job"} 1.0' in metrics
    assert 'dlrover_hooks_members_connected{job="job"} 0.0' in metrics
    assert 'dlrover_hooks_requests_total{route="/v1/vote",status="200"} 1.0' in metrics
    assert "dlrover_hooks_journal_commit_seconds_count" in metrics


def play_tasks(call: Callable[..., Any]) -> None:
    """A parameter server job: started, migrated, reported, and ended."""
    call("launcher", p.ScaleTasks("ps", "launcher", ps=1, workers=1))
    tasks = call("launcher", p.ShowTasks("ps")).tasks
    ids = {task.type: task.id for task in tasks}
    for task in tasks:
        address = "" if task.type is p.NodeType.CHIEF else f"localhost:{2000 + task.id}"
        call(f"task{task.id}", p.RegisterTask("ps", f"task{task.id}", task.type, 0, address, task.id))
    chief = f"task{ids[p.NodeType.CHIEF]}"
    assert call(chief, p.AwaitCluster("ps", chief)).version == 1
    call(chief, p.Connected("ps", chief, 1))
    call("launcher", p.MigrateTask("ps", "launcher", p.NodeType.PS, 0))
    assert len(call("launcher", p.AwaitTasks("ps", "launcher")).tasks) == 4
    call(chief, p.ReportTask("ps", chief, 1, p.NodeType.WORKER, 0, "unreachable"))
    call("launcher", p.Fenced("ps", "launcher", ids[p.NodeType.WORKER], -9))
    call(chief, p.EndTasks("ps", chief))
    assert call("x", p.ShowTasks("ps")).finished


def play_roles(call: Callable[..., Any]) -> None:
    """A job of two roles: a worker ends and is replaced, a role is started again, and a user stops it."""
    rules = (p.RoleRules("actor", 1), p.RoleRules("reward", 1, driver=False))
    assert len(call("prime", p.StartRoles("roles", "prime", "first", rules)).workers) == 2
    call("sub", p.WorkerWaits("roles", "sub", "actor", 0, 1, "no room"))
    assert call("w1", p.RegisterWorker("roles", "w1", "actor", 0, 1, "n0")).state is p.WorkerState.RUNNING
    call("sub", p.WorkerEnded("roles", "sub", "actor", 0, 1, p.WorkerCause.KILLED))
    call("sub", p.MasterRestarted("roles", "sub", "actor"))
    assert call("sub", p.AwaitRoles("roles", "sub", role="actor")).workers[0].life == 2
    call("sub", p.PluginFailed("roles", "sub", "site", "on_event"))
    call("sub", p.NodesRelaunched("roles", "sub", ("n0",)))
    call("user", p.RestartRole("roles", "user", "actor"))
    call("user", p.StopRoles("roles", "user", "enough"))
    assert call("user", p.ShowRoles("roles")).phase is p.JobPhase.STOPPED


def play_planned_nodes(call: Callable[..., Any]) -> None:
    """A job whose nodes the master plans: the first one runs, and a user asks for a second one."""
    limits = p.ResourceLimits(8, 1 << 14, max_workers=2)
    first = call("launcher", p.StartScaling("planned", "launcher", p.ScalingMode.MANUAL, limits))
    listed = call("launcher", p.AwaitNodes("planned", "launcher", first.number))
    assert [node.name for node in listed.nodes] == ["worker-0"]
    call("launcher", p.ReportNodes("planned", "launcher", (p.NodeChange("worker-0"),)))
    two = p.ResourcePlan({"worker": p.NodeGroupResource(2)})
    assert len(call("cli", p.ScaleNodes("planned", "cli", two)).nodes) == 2
    assert [plan.what for plan in call("cli", p.ShowPlans("planned")).plans][1:] == ["worker 1 -> 2"]


def play_check(call: Callable[..., Any]) -> None:
    """A check of two nodes that reach each other."""
    names = ("one", "two")
    for name in names:
        call(name, p.JoinCheck("check", name, name, "localhost", 1, p.Secret("s"), 2, 2, 60.0, 60.0, 60.0))
    turn = call("one", p.AwaitCheck("check", "one"))
    while turn.report is None:
        for name in names:
            call(name, p.ReportTransfer("check", name, turn.step, 1e9, 1e-4))
        turn = call("one", p.AwaitCheck("check", "one", turn.step))
    assert [one.verdict for one in call("x", p.ShowCheck("check")).nodes] == [p.NodeVerdict.OK] * 2


def test_it_describes_itself(live_master: LiveMaster) -> None:
    """OpenAPI 3.1, valid, with each row of ROUTES; health and readiness need no token."""
    document = requests.get(live_master.url + "/openapi.json", timeout=60).json()
    openapi_spec_validator.validate(document)
    found = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert found == {(row.method, row.path) for row in p.ROUTES}
    assert document["openapi"].startswith("3.1")
    assert requests.get(live_master.url + "/readyz", timeout=60).json()["status"] == "ready"
    assert requests.get(live_master.url + "/healthz", timeout=60).json()["status"] == "ok"


def _token(master: LiveMaster) -> dict[str, str]:
    return {"Authorization": f"Bearer {master.token}"}


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "words"),
    [
        ("POST", "/v1/join", b"{", {}, 400, "malformed"),
        ("POST", "/v1/join", b'{"job": 3}', {}, 400, "$.job"),
        ("POST", "/v1/join", b"\xff", {}, 400, "malformed"),
        ("POST", "/v1/join", b'{"job":' + b"[" * 2000 + b"]" * 2000 + b"}", {}, 400, "malformed"),
        ("POST", "/v1/join", b'{"x":' + b"[" * 2000 + b"]" * 2000 + b"}", {}, 400, "malformed"),
        ("GET", "/v1/nothing", None, {}, 404, "Not Found"),
        ("GET", "/v1/jobs/nobody", None, {}, 404, "nobody"),
        ("PUT", "/v1/join", b"{}", {}, 405, "Method Not Allowed"),
        ("GET", "/v1/jobs", None, {"Authorization": "Bearer wrong"}, 401, "token"),
        ("GET", "/metrics", None, {"Authorization": ""}, 401, "token"),
        ("GET", "/v1/jobs", None, {"X-Dlrover-Hooks-Protocol": "9"}, 406, "protocol"),
        (
            "POST",
            "/v1/loaded",
            b'{"job":"j","incarnation":"a","round":1,"ok":true}',
            {"Idempotency-Key": "a/1"},
            400,
            "INC",
        ),
        (
            "POST",
            "/v1/loaded",
            b'{"job":"j","incarnation":"a","round":1,"ok":true}',
            {"Idempotency-Key": "b/c/1"},
            422,
            "send",
        ),
    ],
)
def test_every_refusal_is_a_problem(
    live_master: LiveMaster,
    method: str,
    path: str,
    body: bytes | None,
    headers: dict[str, str],
    status: int,
    words: str,
) -> None:
    """Bad input gives problem+json that says what to do, and changes nothing."""
    answer = requests.request(
        method, live_master.url + path, data=body, headers=_token(live_master) | headers, timeout=60
    )
    problem = answer.json()
    assert (answer.status_code, problem["status"]) == (status, status)
    assert answer.headers["content-type"] == "application/problem+json"
    assert words in problem["detail"] + problem["hint"]
    assert problem["hint"]


def test_too_large_a_body(live_master: LiveMaster) -> None:
    """413 for a declared length and for chunks that never declare one."""
    big = b" " * (17 * 2**20)
    for body in (big, iter([big[: 2**20]] * 17)):
        answer = requests.post(live_master.url + "/v1/join", data=body, headers=_token(live_master), timeout=60)
        assert (answer.status_code, answer.json()["type"]) == (413, "TooLarge")
    with pytest.raises(TooLarge, match="bytes"):
        live_master.client("a").call(join(job="x" * (17 * 2**20)))


def test_headers_without_end_are_refused(live_master: LiveMaster) -> None:
    """Row 5: a connection without the token ends after 64 KiB of them, with an answer that says why."""
    host, port = live_master.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as peer:
        peer.sendall(b"GET /v1/jobs HTTP/1.1\r\na: " + b"x" * (65 * 2**10))
        assert peer.recv(12) == b"HTTP/1.1 431"


def test_no_web_page_speaks_to_a_master_without_a_token(tmp_path: Path) -> None:
    """Row 12: neither by a form's POST, nor by a name of its own that leads to this machine."""
    master = LiveMaster(tmp_path, token=None)
    try:
        body = msgspec.json.encode(join())
        for headers, status in (
            ({"Content-Type": "text/plain"}, 415),
            ({"Content-Type": "application/json", "Origin": "http://evil.example"}, 403),
            ({"Content-Type": "application/json", "Host": "evil.example:8780"}, 403),
            ({"Content-Type": "application/json", "Host": "localhost:8780"}, 200),
        ):
            answer = requests.post(master.url + "/v1/join", data=body, headers=headers, timeout=60)
            assert answer.status_code == status, headers
        assert requests.get(master.url + "/v1/jobs", timeout=60).json() == {"jobs": ["job"]}
    finally:
        master.close()


def test_wrong_token_unknown_job_stale_incarnation(live_master: LiveMaster) -> None:
    """The client raises the classes of `errors`, with the hint."""
    stranger = MasterClient(live_master.url, "wrong", incarnation="x")
    with pytest.raises(Unauthorized, match="DLROVER_HOOKS_TOKEN"):
        stranger.call(p.ListJobs())
    stranger.close()
    with pytest.raises(UnknownJob):
        live_master.client("x").call(p.ShowJob("nobody"))
    live_master.client("agent").call(join())
    with pytest.raises(Stale, match="HINT"):
        live_master.client("zombie").call(attach("zombie"))


def test_an_event_sent_twice_is_applied_once(live_master: LiveMaster) -> None:
    """The same idempotency key is answered as before, also by the next life; an older one is refused."""
    live_master.client("agent").call(join())
    for worker in ("w0", "w1"):
        live_master.client(worker).call(attach(worker))
    bytes_ = msgspec.json.encode(vote(0, 4))

    def send(key: str) -> requests.Response:
        headers = _token(live_master) | {"Idempotency-Key": key}
        return requests.post(live_master.url + "/v1/vote", data=bytes_, headers=headers, timeout=60)

    first = send("w0/votes/5")
    live_master.client("w1").call(vote(1, 4))
    live_master.kill()
    live_master.restart()
    assert send("w0/votes/5").content == first.content
    assert send("w0/votes/4").status_code == 409
    assert b"newest_complete" in send("w0/votes/6").content


@pytest.mark.requirement("ED-62")
def test_requests_behind_a_long_poll_are_answered_after_it(live_master: LiveMaster) -> None:
    """On one connection, sent at once: a long-poll drops the headers of its own request, not those of the next ones."""
    live_master.client("agent").call(join())
    body = msgspec.json.encode(p.Watch("job", "w0"))
    head = f"Host: x\r\nAuthorization: Bearer {live_master.token}\r\nContent-Type: application/json\r\n"
    watch = f"POST /v1/watch HTTP/1.1\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    jobs = f"GET /v1/jobs HTTP/1.1\r\n{head}\r\n".encode()
    last = f"GET /v1/jobs HTTP/1.1\r\n{head}Connection: close\r\n\r\n".encode()
    address = live_master.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1])), timeout=60) as line:
        line.sendall(watch + jobs + last)
        live_master.client("agent").call(p.Exited("job", "agent", "w1", -9))
        answer = b"".join(iter(lambda: line.recv(1 << 16), b""))
    bodies = [part.partition(b"\r\n\r\n")[2] for part in answer.split(b"HTTP/1.1 200 OK")[1:]]
    assert bodies == [msgspec.json.encode(p.Notice(1, broken=True)), *[msgspec.json.encode(p.Jobs(("job",)))] * 2]


def test_killed_and_back_is_a_pause(live_master: LiveMaster) -> None:
    """Kill -9 under a long-poll, a call and a watch; all go on, and the state is what it was."""
    agents = [live_master.client(name) for name in ("a", "b")]
    agents[0].call(join("a", 1, lives="x"))
    seated: list[p.Seated] = []
    poll = threading.Thread(target=lambda: seated.append(agents[0].call(p.AwaitRound("job", "a", timeout_s=60.0))))
    poll.start()
    watch = agents[0].watch("job", lambda notice: None)
    before = live_master.client("any").call(p.ShowJob("job"))
    live_master.kill()
    calling = threading.Thread(target=lambda: agents[1].call(join("b", 1, lives="y")))
    calling.start()
    live_master.restart()
    calling.join(60)
    poll.join(60)
    assert before.run == "run0"
    assert seated
    assert seated[0].round == 1
    old = live_master.client("any").call(p.ShowJob("job"))
    live_master.kill()
    live_master.restart()
    assert live_master.client("any").call(p.ShowJob("job")) == old
    assert watch.error is None


def test_killed_in_the_middle_of_leasing(live_master: LiveMaster) -> None:
    """The master dies by kill -9 three times; each position is lent and done exactly once."""
    total, workers = 4000, ("w0", "w1", "w2")
    whole = (p.Partition(end=total),)
    done: dict[str, list[tuple[int, int]]] = {worker: [] for worker in workers}
    reached = [threading.Event() for _ in range(3)]

    def work(worker: str) -> None:
        call = live_master.client(worker).call
        fence = call(p.OpenLedger("job", worker, "data", "f", whole, total, shard_size=8, free=True)).fence
        reply = call(p.TakeLeases("job", worker, "data", fence, 2))
        while reply.state is not p.LedgerState.FINISHED:
            if not reply.leases:
                reply = call(p.AwaitShards("job", worker, "data", fence, timeout_s=60.0))
            done[worker] += [(lease.lo, lease.hi) for lease in reply.leases]
            count = sum(hi - lo for some in done.values() for lo, hi in some)
            for part, event in enumerate(reached):
                if count > (part + 1) * total // 4:
                    event.set()
            acks = tuple(p.Ack(lease.id, lease.hi) for lease in reply.leases)
            reply = call(p.TakeLeases("job", worker, "data", fence, 2, acks=acks))

    threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for event in reached:
        assert event.wait(60)
        live_master.kill()
        live_master.restart()
    for thread in threads:
        thread.join(60)
    ranges = sorted(pair for some in done.values() for pair in some)
    assert ranges == [(lo, lo + 8) for lo in range(0, total, 8)]
    view = live_master.client("any").call(p.ShowLedger("job", "data"))
    assert (view.done, view.doing, view.todo, view.leases) == (total, {}, 0, 0)


def test_a_dead_holder_without_a_seat_is_noticed(live_master: LiveMaster) -> None:
    """Its connection ends, and what it held can be taken by others within a second."""
    whole = (p.Partition(end=8),)
    for worker in ("w0", "w1"):
        live_master.client(worker).call(p.OpenLedger("job", worker, "data", "f", whole, 8, shard_size=8, free=True))
    live_master.client("w0").call(p.TakeLeases("job", "w0", "data", 1))
    watch = live_master.client("w0").watch("job", lambda notice: None)
    live_master.client("w0").call(p.Heartbeat("job", "w0"))
    watch.close()
    poll = p.AwaitShards("job", "w1", "data", 1, timeout_s=60.0)
    assert live_master.client("w1").call(poll).state is p.LedgerState.OPEN
    with pytest.raises(Stale):
        live_master.client("w0").call(p.TakeLeases("job", "w0", "data", 1))


def test_a_watch_closed_while_it_connects_is_over(live_master: LiveMaster, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing yet to hang up; it must not be opened behind the back of its owner, which closed it."""
    connect, hang_up = LivenessConnection.connect, LivenessConnection.hang_up
    connecting, hung_up = threading.Event(), threading.Event()

    def late(line: LivenessConnection) -> None:
        connecting.set()
        assert hung_up.wait(60)
        connect(line)

    def early(line: LivenessConnection) -> None:
        hang_up(line)
        hung_up.set()

    monkeypatch.setattr(LivenessConnection, "connect", late)
    monkeypatch.setattr(LivenessConnection, "hang_up", early)
    live_master.client("w0").call(p.OpenLedger("job", "w0", "data", "f", (p.Partition(end=8),), 8, free=True))
    watch = live_master.client("w0").watch("job", lambda notice: None)
    assert connecting.wait(60)
    watch.close()
    assert "dlrover-hooks-watch" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.requirement("DL-79")
def test_death_of_a_connection_breaks_the_round(tmp_path: Path) -> None:
    """A worker that is killed is noticed by its connection, without any heartbeat: leases are long."""
    live_master = LiveMaster(tmp_path, "--lease", "600", "--open-lease", "600")
    live_master.client("agent").call(join())
    for worker in ("w0", "w1"):
        live_master.client(worker).call(attach(worker))
    told = threading.Event()
    watch = live_master.client("w0").watch("job", lambda notice: told.set())
    script = (  # the forked child, like a DataLoader worker, must not keep the connection
        "import sys, threading; from dlrover_hooks.client import MasterClient\n"
        "c = MasterClient(sys.argv[1], 'secret', incarnation='w1'); c.watch('job', print)\n"
        "import os\n"
        "if os.fork() == 0: threading.Event().wait(300); os._exit(0)\n"
        "from dlrover_hooks.protocol import Heartbeat\n"
        "c.call(Heartbeat('job', 'w1')); print('up', flush=True); threading.Event().wait(300)\n"
    )
    victim = subprocess.Popen(
        [sys.executable, "-c", script, live_master.url], stdout=subprocess.PIPE, start_new_session=True
    )
    assert victim.stdout is not None
    try:
        assert victim.stdout.readline() == b"up\n"
        live_master.await_connections("job")  # of a process that is killed before, only the lease shows the end
        assert not told.is_set()
        victim.kill()
        victim.wait()
        assert told.wait(WAIT_S)
    finally:
        os.killpg(victim.pid, signal.SIGKILL)
        victim.wait()
        victim.stdout.close()
        watch.close()
        live_master.close()


def test_silence_on_an_open_connection_is_borne(tmp_path: Path) -> None:
    """Of two workers that fall silent the one whose connection is open is not taken for dead."""
    master = LiveMaster(tmp_path, "--lease", "0.3")
    try:
        master.client("agent").call(join())
        for worker in ("w0", "w1"):
            master.client(worker).call(attach(worker))
        told = threading.Event()
        watch = master.client("w0").watch("job", lambda notice: told.set())
        master.await_connections("job", 1)  # its lease is longer from then on
        for worker in ("w0", "w1"):
            master.client(worker).call(p.Heartbeat("job", worker))
        assert told.wait(60)
        assert [one.alive for one in master.client("x").call(p.ShowJob("job")).members] == [True, False]
        watch.close()
    finally:
        master.close()


def test_connections_are_kept_alive_by_the_kernel() -> None:
    """A host that vanished is noticed in half a minute though its connection never ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        _keep_alive(listener)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle, again, times = (accepted.getsockopt(socket.IPPROTO_TCP, name) for name, _ in _KEEPALIVE)
            assert idle + again * times <= 30


def test_a_stopped_master_hears_what_came_in_the_meantime(tmp_path: Path) -> None:
    """Master row 3: SIGSTOP for longer than a lease, with heartbeats waiting in its sockets: nobody is lost."""
    master = LiveMaster(tmp_path, "--lease", "2")
    try:
        master.client("agent").call(join())
        for worker in ("w0", "w1"):
            master.client(worker).call(attach(worker))
            master.client(worker).call(p.Heartbeat("job", worker))
        os.kill(master.pid, signal.SIGSTOP)
        with pytest.raises(MasterAway):  # 3 s without an answer
            master.client("w0").call(p.Heartbeat("job", "w0"), timeout_s=3.0, again=False)
        os.kill(master.pid, signal.SIGCONT)
        for worker in ("w0", "w1"):
            master.client(worker).call(p.Heartbeat("job", worker))
        view = master.client("w0").call(p.ShowJob("job"))
        assert [member.alive for member in view.members] == [True, True]
    finally:
        master.close()
