"""Plays the launcher of workers that recover in process: starts them, reaps them, replaces one of them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlrover_hooks import protocol as p
from dlrover_hooks.client import MasterClient
from dlrover_hooks.errors import Stale, UnknownJob
from tests.chaos.cluster import Process
from tests.waiting import WAIT_S, json_lines, until

ROOT = Path(__file__).parents[2]


class Zygote:
    """Forks what is asked for, with torch and the workers' module (`target`) imported already."""

    def __init__(self, folder: Path, runtime: Path, target: str = "tests.elastic.worker") -> None:
        self.runtime, self.log, self.target = runtime, folder / "log", target
        self.calm = dict[str, str]()
        """What runs that nobody disturbed ended with, by what they were made of: see `as_if_left_alone`."""
        self.log.touch()
        ours, theirs = socket.socketpair()
        self._life, self._life_end = os.pipe()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.fd, self.life = self.listener.fileno(), self._life
        env = {name: value for name, value in os.environ.items() if not name.startswith("DLROVER_HOOKS_")}
        env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        env |= {"XDG_RUNTIME_DIR": str(runtime), "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, "-m", "tests.chaos.zygote", str(theirs.fileno()), str(self.log)]
        command += ["torch", "torch._dynamo", target, "dlrover_hooks.integrations.torch"]
        fds = (theirs.fileno(), self.fd, self._life)
        self._process = subprocess.Popen(command, pass_fds=fds, env=env, cwd=ROOT, start_new_session=True)
        theirs.close()
        self._line = ours
        self._line.settimeout(60.0)

    def start(self, target: str, **order: Any) -> Process:
        self._line.sendall(json.dumps({"target": target, **order}).encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            answer += self._line.recv(64)
        return Process(int(answer))

    def close(self) -> None:
        self._line.close()
        self._process.wait(30)
        self.listener.close()
        for fd in (self._life, self._life_end):
            os.close(fd)


class Crew:
    """One job. `workers` by name; each writes its events to a file."""

    def __init__(self, zygote: Zygote, folder: Path, *, low: int, high: int, lease_s: float = 10.0, **settings: Any):
        self.job, self.folder, self.zygote = f"crew-{uuid.uuid4().hex[:8]}", folder, zygote
        self.low, self.high = low, high
        self.settings = {"save_every": 1000, "pace_s": 0.01} | settings
        self.options: dict[str, Any] = {}
        self.environment: dict[str, Any] = {}
        self.workers: dict[str, Process] = {}
        self._newcomers: dict[str, str] = {}
        """Incarnation by name, of those that were given one, as a launcher's newcomers are."""
        self._reaped = set[str]()
        self._agent = uuid.uuid4().hex
        self.url = f"http://127.0.0.1:{zygote.listener.getsockname()[1]}"
        flags = ["--lease", str(lease_s), "--open-lease", str(lease_s)]
        self._master = zygote.start("tests.elastic.crew:master", keeps=[zygote.fd], fd=zygote.fd,
                                    journal=str(folder / "master.db"), flags=flags)  # fmt: skip
        self._keepers = dict[str, Process]()
        self.client = MasterClient(self.url, "secret", incarnation=self._agent)

    def start(
        self,
        local_rank: int,
        name: str = "",
        *,
        newcomer: bool = False,
        alone: bool | str = False,
        among: int = 1,
        **trouble: Any,
    ) -> str:
        """A worker that joins for itself; a `newcomer` before its script begins, as those of a launcher do.

        `alone`: on a node of its own, or on that of this name, as one of `among`.
        """
        name = name or f"w{local_rank}"
        node = alone if isinstance(alone, str) else name if alone else "n0"
        if node not in self._keepers:
            self._keepers[node] = self.zygote.start("tests.elastic.crew:keeper", job=self.job, node=node)
        env = {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": self.high, "DLROVER_HOOKS_JOB": self.job}
        env |= {"TORCHELASTIC_RUN_ID": self.job}  # as the launcher: without it Fabric makes up ranks of its own
        env |= {"LOCAL_RANK": local_rank % among, "LOCAL_WORLD_SIZE": among} if alone else {}
        env |= {"DLROVER_HOOKS_MASTER": self.url, "DLROVER_HOOKS_TOKEN": "secret", "DLROVER_HOOKS_NODE": node}
        env |= {"DLROVER_HOOKS_LAUNCHER": self._agent, "DLROVER_HOOKS_MIN_WORKERS": self.low}
        env |= {"DLROVER_HOOKS_MAX_WORKERS": self.high} | self.environment
        if newcomer:
            self._newcomers[name] = uuid.uuid4().hex
            env |= {"DLROVER_HOOKS_JOIN": "1", "DLROVER_HOOKS_INCARNATION": self._newcomers[name]}
        self.workers[name] = self.zygote.start(
            f"{self.zygote.target}:main", name=name, folder=str(self.folder), trouble=trouble,
            env={key: str(value) for key, value in env.items()}, options=self.options, settings=self.settings,
        )  # fmt: skip
        return name

    def replace(self, local_rank: int, was: str, name: str, **trouble: Any) -> None:
        """Once that worker has ended, another one takes its place."""
        self.ended(was)
        self.start(local_rank, name, **trouble)

    def new_keeper(self, node: str) -> None:
        """That of the node is killed, with all that it held; another one comes."""
        self._keepers[node].kill()
        self._keepers[node] = self.zygote.start("tests.elastic.crew:keeper", job=self.job, node=node)

    def lose(self, node: str) -> None:
        """That node's keeper ends with all that it held."""
        self._keepers[node].kill()

    def waits(self, name: str) -> bool:
        """The master knows that newcomer, and has no round for it yet."""
        own = self._newcomers[name]
        try:
            return self.client.call(p.AwaitRound(self.job, own, timeout_s=0.01), timeout_s=WAIT_S).round is None
        except (Stale, UnknownJob):  # it has not joined yet
            return False

    def view(self) -> p.JobView:
        return self.client.call(p.ShowJob(self.job), timeout_s=WAIT_S)

    def release(self) -> None:
        """Workers that hold go on."""
        (self.folder / "go").touch()

    def events(self, *kinds: str, who: str | None = None) -> list[dict[str, Any]]:
        """In the order of time."""
        found: list[dict[str, Any]] = []
        for path in self.folder.glob("*.jsonl"):
            found += json_lines(path)
        rows = [one for one in found if (not kinds or one["event"] in kinds) and who in (None, one["who"])]
        return sorted(rows, key=lambda row: row["t"])

    def until(self, condition: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
        """The first true answer of `condition`; the dead are reaped meanwhile."""
        return until(
            condition, "what the workers do", timeout_s, between=self.reap, diagnostic=self.story, every_s=0.005
        )

    def reap(self) -> None:
        """As a launcher's waitpid does: the master hears of a death at once."""
        for name, process in self.workers.items():
            if name not in self._reaped and process.ended():
                self._reaped.add(name)
                begun = [row["incarnation"] for row in self.events("begin", who=name)]
                own = self._newcomers.get(name) or begun[-1]
                code = 0 if any(row["code"] == 0 for row in self.events("exit", who=name)) else -9
                with contextlib.suppress(Stale, UnknownJob):  # it has left before it ended
                    self.client.call(p.Exited(self.job, self._agent, own, code), timeout_s=WAIT_S)

    def send(self, name: str, signum: int) -> float:
        self.workers[name].send(signum)
        return time.time()

    def ended(self, *names: str, timeout_s: float = WAIT_S) -> None:
        self.until(lambda: all(name in self._reaped for name in names or self.workers), timeout_s)

    def stepped(self, step: int, *names: str, world: int | None = None) -> list[dict[str, Any]]:
        """Wait until all of `names` have made `step` (in a world of that size)."""

        def done() -> list[dict[str, Any]] | None:
            rows = [row for row in self.events("step") if row["step"] >= step and world in (None, row["world"])]
            first = {row["who"]: row for row in reversed(rows)}
            return [first[name] for name in names] if set(names) <= set(first) else None

        return self.until(done)

    def story(self) -> str:
        rows = [row for row in self.events() if row["event"] not in ("micro",)][-40:]
        for process in self.workers.values():
            if not process.ended():
                process.send(signal.SIGUSR2)
        select.select([], [], [], 0.3)
        return "\n".join(map(str, rows)) + "\n" + self.zygote.log.read_text()[-6000:]

    def lineage(self) -> dict[int, int]:
        """By step, the round in which it was made for good."""
        found: dict[int, int] = {}
        for row in self.events("micro"):
            found[row["step"]] = max(row["round"], found.get(row["step"], 0))
        return found

    def samples(self, epochs: int) -> list[list[int]]:
        """What the model that is left was trained on, by epoch."""
        rounds, seen = self.lineage(), [list[int]() for _ in range(epochs)]
        for row in self.events("micro"):
            if row["round"] == rounds[row["step"]]:
                seen[row["epoch"]] += row["ids"]
        return [sorted(one) for one in seen]

    def restores(self) -> dict[int, list[dict[str, Any]]]:
        """What each rank restored, by round; the first round left out."""
        rows = self.events("restored")
        first = min(row["round"] for row in rows)
        return {number: [row for row in rows if row["round"] == number]
                for number in sorted({row["round"] for row in rows} - {first})}  # fmt: skip

    def check(self, steps: int, epochs: int) -> None:
        """The promises that hold whatever happened: equal ranks after each restore, every sample once, all steps."""
        for rows in self.restores().values():
            assert len({(row["state"], row["step"], row["cursor"]) for row in rows}) == 1, rows
        ends = self.events("trained")
        assert {row["step"] for row in ends} == {steps}, ends
        assert len({row["state"] for row in ends}) == 1, ends
        assert self.samples(epochs) == [list(range(48))] * epochs

    def end(self) -> str:
        """What rank 0 trained, bit for bit."""
        (row,) = (row for row in self.events("trained") if row["rank"] == 0)
        return row["state"]

    def close(self) -> None:
        for process in (*self.workers.values(), self._master, *self._keepers.values()):
            process.kill()
        self.client.close()


def steps_of(crew: Crew) -> list[int]:
    """What each later round began with."""
    return [rows[0]["step"] for rows in crew.restores().values()]


def as_if_left_alone(
    crew: Callable[..., Crew],
    world: int,
    victim: int,
    place: tuple[str, int],
    *,
    apart: bool = False,
    lost: bool = False,
    **settings: Any,
) -> Crew:
    """One run is left alone, and one loses `victim` at `place` and gets another: both end alike. The second one.

    `apart`: each worker has a node of its own, and a replacement comes to its predecessor's. `lost`: that node is
    lost, and another one comes in its place.
    """

    def run(**trouble: Any) -> Crew:
        one = crew(world, world, **settings)
        for rank in range(world):
            one.start(rank, alone=apart or lost, **(trouble if rank == victim else {}))
        if trouble:
            one.ended(f"w{victim}")
            if lost:
                one.lose(f"w{victim}")
            one.start(victim, "again", alone=lost or (f"w{victim}" if apart else False))
        one.ended()
        one.close()
        return one

    one = run(at=place, what="kill", after_s=0.3)
    calm, same = one.zygote.calm, repr((world, apart or lost, sorted(settings.items())))
    if same not in calm:
        calm[same] = run().end()
    assert one.end() == calm[same]
    return one


def master(fd: int, journal: str, flags: list[str]) -> None:
    from dlrover_hooks.master.__main__ import command

    command(["--fd", str(fd), "--journal", journal, "--token", "secret", *flags], prog_name="master")


def keeper(job: str, node: str) -> int:
    from dlrover_hooks.checkpoint.keeper import __main__ as keeper

    return keeper.main(["--job", job, "--node", node, "--linger-s", "1000"])
