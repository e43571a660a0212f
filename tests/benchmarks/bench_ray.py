"""How fast a job of several roles recovers on Ray from the death of each of its layers: `make bench-ray`.

Writes build/bench/ray.json and build/ray.json. One machine, a head and two or three more raylets. Each time is from the
kill until the job is as it is to be: a worker registered (replace, role, nodes), the survivor and the new worker made
steps (rejoin), or a master wrote into the journal that it is back. Figures are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from dlrover_hooks import protocol as p
from tests.benchmarks import ray_train_job
from tests.benchmarks.report import REPOSITORY, Figures, report
from tests.integrations.ray_nodes import EDGE, ROLES, Nodes, job, runs, several_nodes
from tests.waiting import until

KILLS = 5
ENDING_S = 75.0
"""What an ended job has left after this time is counted. Trainers that end before their last epoch leave their
checkpoints in memory for 60 s."""
BARS = {"node_loss_s": 10.0, "hung_node_s": 15.0, "left_behind": 0}
AT_LEAST = {"counted_exactly": 1.0}


class MeasuredJob:
    """One job: two servers that are replaced, two trainers that rejoin, two that are restarted together, a driver."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        roles = job(folder).restarts(job=-1).role("server").run(f"{ROLES}:serve").workers(2).not_driver()
        roles = roles.restarts(-1).role("dp").train(f"{ROLES}:train").workers(2).restarts(-1, on_failure="rejoin")
        roles = roles.role("pair").run(f"{ROLES}:wait").workers(2).restarts(-1, role=-1, on_failure="role")
        self.handle: Any = roles.build().submit(backend="ray", wait=False)
        self.lives = {one: 1 for one in (("server", 0), ("server", 1), ("dp", 0), ("dp", 1), ("pair", 0), ("pair", 1))}
        for role, rank in self.lives:
            self.current(role, rank)
        self.steps(self.current("dp", 0), 5)
        self.lost = 0

    def current(self, role: str, rank: int) -> p.RoleWorker:
        return runs(self.handle, role, rank, self.lives[role, rank])

    def steps(self, worker: p.RoleWorker, more: int) -> None:
        """Wait until a trainer has made `more` steps from now on."""
        path = self.folder / f"steps-{worker.pid}"

        def made() -> int:
            text = path.read_text() if path.exists() else ""
            return int(text or 0)

        before = made()
        until(lambda: made() >= before + more, f"dp {worker.rank} makes steps")

    def events(self, kind: str) -> int:
        return sum(one.kind == kind for one in self.handle.status().events)

    def pid(self, *parts: str) -> int:
        import ray

        from dlrover_hooks.integrations.ray import cluster_state

        actor = cluster_state.actor(cluster_state.actor_name(self.handle.name, *parts))
        return ray.get(actor.ping.remote(), timeout=60)

    # ---- one kill each: seconds --------------------------------------------------------------------------------------

    def replace(self) -> float:
        victim = self.current("server", 0)
        began = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        self.lives["server", 0] += 1
        self.lost += 1
        self.current("server", 0)
        return time.monotonic() - began

    def rejoin(self) -> float:
        survivor, victim = self.current("dp", 0), self.current("dp", 1)
        began = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        self.lives["dp", 1] += 1
        self.lost += 1
        self.steps(self.current("dp", 1), 1)
        self.steps(survivor, 1)
        took = time.monotonic() - began
        assert self.current("dp", 0).pid == survivor.pid, "the survivor's process was replaced"
        return took

    def role(self) -> float:
        victim = self.current("pair", 0)
        began = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        self.lost += 1
        for rank in range(2):
            self.lives["pair", rank] += 1
        for rank in range(2):
            self.current("pair", rank)
        return time.monotonic() - began

    def sub_master(self) -> float:
        return self._masters("sub_master", [self.pid("sub-master", "dp")])

    def prime(self) -> float:
        return self._masters("prime_master", [self.pid("prime")])

    def _masters(self, kind: str, pids: list[int]) -> float:
        before, workers = self.events(kind), self.handle.status().workers
        began = time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        until(lambda: self.events(kind) > before, f"{kind} is back")
        took = time.monotonic() - began
        assert self.handle.status().workers == workers, "a worker was touched"
        return took

    def all_three(self) -> float:
        pids = [self.pid("prime"), self.pid("sub-master", "server"), self.current("server", 1).pid]
        began = time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.lives["server", 1] += 1
        self.lost += 1
        self.current("server", 1)
        return time.monotonic() - began


def processes() -> list[psutil.Process]:
    """Those of jobs: masters, workers, and the keepers of checkpoints in memory."""
    found = list[psutil.Process]()
    for one in psutil.process_iter(["cmdline"]):
        words = " ".join(one.info["cmdline"] or ())
        if one.pid != os.getpid() and ("dlrover_hooks" in words or "Actor" in words):
            found.append(one)
    return found


def of_kills(folder: Path, kills: int) -> Figures:
    """One layer after the other, in turn."""
    import ray

    from dlrover_hooks.integrations.ray import cluster_state

    found = dict[str, list[float]]()
    with several_nodes(1):
        measured = MeasuredJob(folder)
        kinds: dict[str, Callable[[], float]] = {
            "replace_s": measured.replace, "rejoin_s": measured.rejoin, "role_s": measured.role,
            "submaster_s": measured.sub_master, "prime_s": measured.prime, "all_three_s": measured.all_three,
        }  # fmt: skip
        for turn in range(kills):
            for name, shoot in kinds.items():
                found.setdefault(name, []).append(shoot())
                print(f"{turn} {name} {found[name][-1]:.2f}", flush=True)
        exactly = measured.events("lost") == measured.lost
        (folder / "end").touch()
        assert measured.handle.wait(120) == 0, measured.handle.status()
        groups = ray.util.placement_group_table().values()
        left: list[Any] = cluster_state.actor_names("job/") + [one for one in groups if one["state"] != "REMOVED"]
        psutil.wait_procs(processes(), timeout=ENDING_S)
        left += processes()
    figures: Figures = {name: statistics.median(times) for name, times in found.items()}
    return figures | {"counted_exactly": exactly, "left_behind": len(left)}


def of_nodes(folder: Path, kills: int, name: str, lose: Callable[[Nodes, Any], Any]) -> Figures:
    """A node with a worker is lost, while another one has room."""
    times = list[float]()
    for turn in range(kills):
        with several_nodes(2) as nodes:
            place = folder / f"{name}-{turn}"
            place.mkdir()
            roles = job(place).silent_after(8).role("server").run(f"{ROLES}:serve").resource(**{EDGE: 1}).not_driver()
            handle = roles.role("main").run(f"{ROLES}:wait").build().submit(backend="ray", wait=False)
            victim = runs(handle, "server", 0)
            runs(handle, "main", 0)
            began = time.monotonic()
            lose(nodes, nodes.of(victim.node))
            runs(handle, "server", 0, life=2)
            times.append(time.monotonic() - began)
            print(f"{turn} {name} {times[-1]:.2f}", flush=True)
            for one in nodes.stopped:
                one.kill()
    return {name: statistics.median(times), f"{name}_worst": max(times)}


def of_peer(folder: Path, kills: int) -> Figures:
    """Ray Train, in a cluster of the same shape."""
    with several_nodes(1):
        place = folder / "ray-train"
        place.mkdir()
        return dict(ray_train_job.recovery_s(place, kills))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=KILLS, help="of each kind")
    kills = parser.parse_args().kills
    folder = Path(tempfile.mkdtemp(prefix="bench-ray-"))
    os.environ["PYTHONPATH"] = str(REPOSITORY)
    os.environ.update(RAY_worker_niceness="0")  # as on a machine of its own: at Ray's 15 any other process comes first
    found: Figures = {}
    try:
        (folder / "kills").mkdir()
        found |= of_kills(folder / "kills", kills)
        found |= of_nodes(folder, kills, "node_loss_s", lambda nodes, node: nodes.lose(node))
        found |= of_nodes(folder, kills, "hung_node_s", lambda nodes, node: nodes.hang(node))
        found |= of_peer(folder, kills)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    conditions = {"kills": kills, "raylets": 2, "raylets_of_lost_nodes": 3, "silent_after_s": 8}
    code = report("ray", "Jobs of several roles on Ray", conditions, found, BARS, AT_LEAST)
    (REPOSITORY / "build" / "ray.json").write_text(json.dumps({**conditions, **found}, indent=1) + "\n")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
