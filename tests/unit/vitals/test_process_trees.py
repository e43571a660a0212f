"""The process trees of workers: real processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from dlrover_hooks.vitals.process_trees import ProcessTrees, uptime_s
from tests.waiting import until

NEST = """
import subprocess, sys
depth, mib = int(sys.argv[1]), int(sys.argv[2])
ballast = bytearray(b"x") * (mib << 20)
if depth:
    child = subprocess.Popen([sys.executable, "-c", sys.argv[3], str(depth - 1), "0", sys.argv[3]])
print("ready", flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""
BUSY = (
    "import time; until = time.process_time() + 0.3; [None for _ in iter(lambda: time.process_time() < until, False)]"
)


class Nest:
    """A process with `depth` descendants, one within the other."""

    def __init__(self, depth: int, mib: int = 0) -> None:
        command = [sys.executable, "-c", NEST, str(depth), str(mib), NEST]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._process.stdout is not None
        self._out, self.pid = self._process.stdout, self._process.pid
        lines = [self._out.readline() for _ in range(depth + 1)]
        assert lines == ["ready\n"] * (depth + 1)

    def do(self, code: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{code}\n")
        self._process.stdin.flush()
        assert self._out.readline() == "done\n"

    def end(self) -> None:
        for child in psutil.Process(self.pid).children(recursive=True):
            child.kill()
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def nests() -> Iterator[list[Nest]]:
    made: list[Nest] = []
    yield made
    for nest in made:
        nest.end()


def test_each_worker_with_its_descendants(nests: list[Nest]) -> None:
    nests += [Nest(0), Nest(2, mib=50), Nest(1)]
    trees = ProcessTrees()
    roots = {"a": nests[0].pid, "b": nests[1].pid, "gone": 1 << 29}
    found = {one.incarnation: one for one in trees.sample(roots, uptime_s())}
    assert {name: one.processes for name, one in found.items()} == {"a": 1, "b": 3}
    assert found["b"].memory_bytes > found["a"].memory_bytes + (50 << 20)
    assert found["a"].memory_bytes == pytest.approx(psutil.Process(nests[0].pid).memory_info().rss, rel=0.1)
    # a third worker is started, or a standby becomes one: its child was seen as nobody's
    again = {one.incarnation: one.processes for one in trees.sample(roots | {"c": nests[2].pid}, uptime_s())}
    assert again == {"a": 1, "b": 3, "c": 2}
    assert trees.sample({}, uptime_s()) == ()


def test_the_cpu_time_of_a_tree(nests: list[Nest]) -> None:
    """What was used between two samples, also by a child that was started meanwhile."""
    nests.append(Nest(0))
    trees, roots = ProcessTrees(), {"a": nests[0].pid}
    nests[0].do(BUSY)
    at = uptime_s()
    assert trees.sample(roots, at)[0].cpu_percent == 0.0
    nests[0].do(BUSY)
    own = trees.sample(roots, at + 10.0)[0].cpu_percent
    assert 2.5 < own < 30.0  # 0.3 s of 10, in ticks of 10 ms, and what starting costs
    child = f"import subprocess; child = subprocess.Popen([sys.executable, '-c', {BUSY + '; input()'!r}], stdin=-1)"
    trees = ProcessTrees()
    at = uptime_s()
    trees.sample(roots, at)
    nests[0].do(child)
    pid = psutil.Process(nests[0].pid).children()[0].pid
    until(lambda: sum(psutil.Process(pid).cpu_times()[:2]) >= 0.3, "the child's work")
    assert trees.sample(roots, at + 10.0)[0].cpu_percent > 2.5


def test_foreign_processes_are_read_once(nests: list[Nest]) -> None:
    nests.append(Nest(1))
    trees = ProcessTrees()
    read: list[int] = []
    real = trees._read
    trees._read = lambda pid: read.append(pid) or real(pid)  # type: ignore[method-assign]
    roots = {"a": nests[0].pid}
    trees.sample(roots, uptime_s())
    assert len(read) > 3
    first, read[:] = set(read), []
    trees.sample(roots, uptime_s())
    assert {nests[0].pid} < set(read)
    assert len(set(read) & first) == 2
