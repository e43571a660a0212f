"""A small cluster for chaos tests: one master, a keeper for each node, trainers; the test is its launcher.

Processes come from a `zygote` and live on over rounds: only what a round kills is started again.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dlrover_hooks import protocol as p
from dlrover_hooks.checkpoint.storage import generations
from dlrover_hooks.client import MasterClient
from tests.chaos.board import NOTHING, Age, Board, age
from tests.chaos.traps import Phase
from tests.waiting import WAIT_S, until

ROOT = Path(__file__).parents[2]
SMALL_FILES = {"latest.json", "finished.json", ".owner.lock"}
"""What lies beside the generations."""


class Process:
    """One that the zygote forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._fd = -1

    def send(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._fd >= 0:
                signal.pidfd_send_signal(self._fd, signum)

    def ended(self, within_s: float = 0.0) -> bool:
        """All of its threads, so that it holds no memory and no socket any more."""
        if self._fd >= 0 and select.select([self._fd], [], [], within_s)[0]:
            os.close(self._fd)
            self._fd = -1
        return self._fd < 0

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        assert self.ended(WAIT_S), f"process {self.pid} survived SIGKILL"


class Notice:
    """What a process said; it waits until it is let go."""

    def __init__(self, line: socket.socket) -> None:
        line.settimeout(WAIT_S)
        with line.makefile("r") as words:
            text = words.readline()
        self.facts: dict[str, Any] = json.loads(text) if text.endswith("\n") else {}
        self._line = line

    def let_go(self) -> None:
        self._line.close()


class Cluster:
    """`world` ranks, dealt out to `nodes` in turn. Use as a context manager: nothing outlives it."""

    def __init__(self, folder: Path, runtime: Path, *, world: int, nodes: int, nbytes: int, **settings: Any) -> None:
        self.job, self.world, self.nbytes = f"chaos-{uuid.uuid4().hex[:8]}", world, nbytes
        self.nodes = [f"n{index}" for index in range(nodes)]
        self.folder, self.runtime, self.log = folder, runtime, folder / "log"
        self.log.touch()
        self.board = Board(runtime / "board")
        self._owned = contextlib.ExitStack()
        self._listener = self._owned.enter_context(socket.create_server(("127.0.0.1", 0), backlog=128))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.settings = {"job": self.job, "master": self.url, "token": "secret", "on_error": "warn"} | settings
        self._ear = self._owned.enter_context(socket.socket(socket.AF_UNIX))
        self._ear.bind(str(runtime / "ear"))
        self._ear.listen(64)
        self._silent = list[socket.socket]()
        """Processes that have said nothing yet: one that is stopped just then does so when it goes on."""
        self._owned.callback(lambda: [line.close() for line in self._silent])
        self._life, self._life_end = os.pipe()
        self._owned.callback(os.close, self._life)
        self._orders = self._trainers = self._zygote()
        self._reports: dict[int, dict[str, Any]] = {}
        """What a process said of its restore, by its pid."""
        self._agents: dict[str, MasterClient] = {}
        self.processes: dict[str, Process] = {}
        """By name: master, n0, n1, rank 0, rank 1..."""
        self.started: list[Process] = []
        self.lost_at = NOTHING
        """All that was in memory up to here is gone with its keeper."""
        self._round = 0

    def _zygote(self, *modules: str) -> socket.socket:
        ours, theirs = socket.socketpair()
        fds = theirs.fileno(), self._listener.fileno(), self._life
        command = [sys.executable, "-m", "tests.chaos.zygote", str(fds[0]), str(self.log), *modules]
        env = {name: value for name, value in os.environ.items() if not name.startswith("DLROVER_HOOKS_")}
        env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        env |= {"XDG_RUNTIME_DIR": str(self.runtime), "PYTHONWARNINGS": "ignore"}
        zygote = subprocess.Popen(command, pass_fds=fds, env=env, cwd=ROOT, start_new_session=True)
        self._owned.callback(zygote.wait)
        self._owned.callback(ours.close)
        theirs.close()
        ours.settimeout(WAIT_S)
        return ours

    def __enter__(self) -> Cluster:
        self.start_master()
        for node in self.nodes:
            self.start_keeper(node)
        return self

    def __exit__(self, *_: object) -> None:
        with self._owned:
            for process in self.started:
                process.kill()
            self.end_keepers()
            for client in self._agents.values():
                client.close()

    # ---- processes

    def _start(self, name: str, zygote: socket.socket, **order: Any) -> Process:
        zygote.sendall(json.dumps(order).encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            answer += zygote.recv(64)
        process = self.processes[name] = Process(int(answer))
        self.started.append(process)
        return process

    def start_master(self) -> None:
        fd, journal = self._listener.fileno(), str(self.folder / "master.db")
        target = "tests.chaos.trainer:master"
        self._start("master", self._orders, target=target, keeps=[fd], folder=str(self.runtime), fd=fd, journal=journal)

    def start_keeper(self, node: str) -> None:
        order = {"job": self.job, "node": node, "life_fd": self._life}
        self._start(
            node,
            self._orders,
            target="tests.chaos.trainer:keeper",
            keeps=[self._life],
            folder=str(self.runtime),
            **order,
        )

    def end_keepers(self) -> None:
        """As a launcher that ends: they write their last will, and go."""
        if self._life_end >= 0:
            os.close(self._life_end)
            self._life_end = -1

    def node_of(self, rank: int) -> str:
        return self.nodes[rank % len(self.nodes)]

    @property
    def ranks(self) -> list[str]:
        return [f"rank {rank}" for rank in range(self.world)]

    def start_trainers(self) -> None:
        """As a launcher does: join for all seats, then start the processes of these seats."""
        seats: dict[str, list[p.Seat]] = {node: [] for node in self.nodes}
        for rank in range(self.world):
            seats[self.node_of(rank)].append(p.Seat(uuid.uuid4().hex, rank // len(self.nodes), rank))
        for node, mine in seats.items():
            join = p.Join(self.job, node, node, tuple(mine), "127.0.0.1", 1, self.world, self.world, uuid.uuid4().hex,
                          again=True, sole=True)  # fmt: skip
            self.agent(node).call(join)
        seated = self.agent("n0").call(p.AwaitRound(self.job, "n0", after=self._round, timeout_s=60.0))
        assert seated.round is not None, "no round was formed"
        self._round = seated.round
        for node, mine in seats.items():
            for seat in mine:
                self._start_trainer(node, seat)

    def _start_trainer(self, node: str, seat: p.Seat) -> None:
        place = {"rank": seat.rank, "world_size": self.world, "local_rank": seat.local_rank, "node": node}
        order = {"place": place | {"incarnation": seat.incarnation}, "settings": self.settings, "nbytes": self.nbytes}
        target = "tests.chaos.ddp:train" if self._trainers is not self._orders else "tests.chaos.trainer:train"
        self._start(f"rank {seat.rank}", self._trainers, target=target, folder=str(self.runtime), **order)

    def agent(self, node: str) -> MasterClient:
        if node not in self._agents:
            self._agents[node] = MasterClient(self.url, "secret", incarnation=node, deadline_s=WAIT_S)
        return self._agents[node]

    def view(self) -> p.JobView:
        """What the master knows."""
        return self.agent(self.nodes[0]).call(p.ShowJob(self.job))

    def kill(self, *names: str) -> None:
        """Kill -9, all at once."""
        for name in names:
            self.processes[name].send(signal.SIGKILL)
        for name in names:
            self.processes[name].kill()
        if any(name in self.nodes for name in names):
            self.lost_at = self.board.newest(self.world)

    def mend(self) -> bool:
        """Start again what is dead; if a rank is, all of them. True then."""
        if self.processes["master"].ended():
            self.start_master()
        for node in self.nodes:
            if self.processes[node].ended():
                self.start_keeper(node)
        if not any(self.processes[name].ended() for name in self.ranks if name in self.processes):
            return False
        self.kill(*self.ranks)
        return True

    # ---- what they say

    def hear(self, wanted: Callable[[dict[str, Any]], bool], within_s: float) -> Notice | None:
        """The next notice that is `wanted`; others are let go, and what they say of restores is kept."""
        until = time.monotonic() + within_s
        while ready := select.select([self._ear, *self._silent], [], [], max(until - time.monotonic(), 0.0))[0]:
            if ready[0] is self._ear:
                self._silent.append(self._ear.accept()[0])
                continue
            self._silent.remove(ready[0])
            notice = Notice(ready[0])
            if wanted(notice.facts):
                return notice
            if "restored" in notice.facts:
                self._reports[notice.facts["pid"]] = notice.facts
            notice.let_go()
        return None

    def catch(self, phase: Phase, within_s: float, who: str = "") -> Notice | None:
        """Wait until a process (called `who`) is in `phase`; the first one is held there, no other."""
        self.board.arm(phase)
        notice = self.hear(lambda facts: facts.get("phase") == phase and facts["who"].startswith(who), within_s)
        self.board.arm(Phase.NONE)
        return notice

    def restored(self) -> list[dict[str, Any]]:
        """What all ranks say of their restore."""
        pids = [self.processes[name].pid for name in self.ranks]
        self.until(lambda: self._reports.keys() >= set(pids), "all ranks restored")
        return [self._reports[pid] for pid in pids]

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """The first true answer of `condition`; notices are let go meanwhile."""
        return until(
            condition, what, between=lambda: self.hear(lambda _: False, 0.003), diagnostic=self.whereabouts, every_s=0.0
        )

    def whereabouts(self) -> str:
        """Which processes live, how far each rank is, and where they hang."""
        living = [name for name, process in self.processes.items() if not process.ended()]
        at, before = [self.board.reached(rank) for rank in range(self.world)], self.tail()
        for name in set(living) & set(self.ranks):
            self.processes[name].send(signal.SIGUSR2)
            self.hear(lambda _: False, 0.2)
        return f"living: {living}, at {at}\n{before}\n{self.tail()}"

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    # ---- what must be there

    def committed(self) -> Age:
        """The newest whole generation in storage."""
        url = self.settings.get("save_to")
        found = generations.scan(url, None, self.job).manifests if url else ()
        return age(found[0].generation) if found else NOTHING

    def floor(self) -> Age:
        """The oldest generation that a restore may come to now."""
        memory = self.board.whole(self.world)
        return max(memory if memory > self.lost_at else NOTHING, self.committed())

    def trained_on(self, steps: int) -> None:
        """Wait until all ranks have published that many steps more, and they are whole in memory."""
        goal = self.board.newest(self.world)
        goal = (goal[0], goal[1] + steps)
        done = (self.board.whole, self.board.known)
        self.until(
            lambda: max(one(self.world) for one in done) >= goal, f"{goal} whole, at {self.board.newest(self.world)}"
        )


@contextlib.contextmanager
def left_nothing(cluster: Cluster, *, damaged: bool = False) -> Iterator[None]:
    """Behind the block, the run is ended in peace; then nothing of it may be left but its checkpoints.

    `damaged`: what lies in storage was harmed, and stays there to be looked at.
    """
    yield
    litter = list(Path(str(cluster.settings.get("save_to"))).glob("*.tmp"))
    for path in litter:
        with contextlib.suppress(FileNotFoundError):  # the living are still renaming theirs
            os.utime(path, (0, 0))  # what a killed master was writing is removed once it is an hour old
    cluster.board.finish(cluster.board.newest(cluster.world)[1] + 10)
    for name in cluster.ranks:
        cluster.until(lambda name=name: cluster.processes[name].ended(), f"the end of {name}")
    cluster.end_keepers()
    for node in cluster.nodes:
        assert cluster.processes[node].ended(WAIT_S), f"the keeper of {node} does not end"
    cluster.processes["master"].send(signal.SIGTERM)
    assert cluster.processes["master"].ended(WAIT_S), "the master does not end"
    assert [process.pid for process in cluster.started if not process.ended()] == []
    assert list((cluster.runtime / "dlrover-hooks").iterdir()) == [], "a keeper's lock or socket"
    if not damaged:
        left_in_storage(cluster)


def left_in_storage(cluster: Cluster) -> None:
    """Whole generations that `keep` keeps, and three small files."""
    if (url := cluster.settings.get("save_to")) is None:
        return
    found = generations.scan(url, None, cluster.job)
    homes = {generations.folder(one.generation) for one in found.manifests}
    assert found.damaged == (), told(cluster, found)
    assert {path.name for path in Path(url).iterdir()} == homes | SMALL_FILES, told(cluster, found)
    assert len(homes) <= int(cluster.settings.get("keep", 2)), told(cluster, found)
    for one in found.manifests:
        files = {path.name for path in (Path(url) / generations.folder(one.generation)).iterdir()}
        assert files == {file.name for file in one.files} | {"MANIFEST.json"}, told(cluster, found)


def told(cluster: Cluster, found: generations.Scan) -> str:
    """What lies in storage, each file with its size and when it was written, and what the processes said."""
    root = Path(str(cluster.settings["save_to"]))
    rows = sorted((path.lstat().st_mtime, str(path.relative_to(root)), path) for path in root.rglob("*"))
    lines = [f"{at:.3f} {name} {path.lstat().st_size}" for at, name, path in rows]
    whole = [generations.folder(one.generation) for one in found.manifests]
    return "\n".join([f"whole: {whole}, damaged: {found.damaged}", *lines, cluster.tail()])


def chosen(chance: random.Random, world: int) -> dict[str, Any]:
    """A cluster's shape."""
    nbytes = chance.choice([64 << 10, 1 << 20, 9 << 20])
    return {"nodes": 2 if world > 1 and chance.random() < 0.4 else 1, "nbytes": nbytes}
