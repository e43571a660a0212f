"""What a node uses, and the limits of its control groups: files as kernels of both versions write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlrover_hooks.vitals import node_sampler
from dlrover_hooks.vitals.disk_sampler import DiskSampler
from dlrover_hooks.vitals.node_sampler import NodeSampler


def tree(tmp_path: Path, group: str, mounts: str) -> str:
    """A /proc that says so."""
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text(group)
    (proc / "self/mountinfo").write_text(mounts)
    return str(proc)


def put(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def v2(tmp_path: Path) -> tuple[NodeSampler, Path]:
    """In a container of a pod; the pod has the limits. Its folder."""
    root = tmp_path / "cg"
    events = "low 0\nhigh 0\nmax 7\noom 3\noom_kill {}\noom_group_kill 0"
    put(root, cpu__stat="usage_usec 5")
    put(
        root / "pod",
        cpu__max="150000 100000",
        cpu__stat="usage_usec 5\nnr_periods 100\nnr_throttled 10\nthrottled_usec 5",
        memory__max=9000,
        memory__current=5000,
        memory__stat="anon 1\ninactive_file 1000",
        memory__events=events.format(9),
    )
    put(root / "pod/box", cpu__max="max 100000", memory__max="max", memory__events=events.format(2))
    mounts = f"30 24 0:26 / {root} rw,nosuid - cgroup2 cgroup2 rw\n"
    return NodeSampler(tree(tmp_path, "0::/pod/box\n", mounts)), root / "pod"


def test_the_limits_of_a_pod_v2(tmp_path: Path) -> None:
    sampler, pod = v2(tmp_path)
    memory = sampler.memory()
    assert (memory.limit_bytes, memory.limit_used_bytes, memory.oom_kills) == (9000, 4000, 2)
    cpu = sampler.cpu()
    assert (cpu.limit_cores, cpu.throttled_percent) == (1.5, 0.0)
    put(pod, cpu__stat="nr_periods 150\nnr_throttled 35", cpu__max="50000 100000")
    cpu = sampler.cpu()
    assert (cpu.limit_cores, cpu.throttled_percent) == (0.5, 50.0)
    put(pod, cpu__max="max 100000")  # an administrator lifts it
    assert sampler.cpu().limit_cores is None


def test_the_limits_of_a_container_v1(tmp_path: Path) -> None:
    root, none = tmp_path / "cg", 9223372036854771712
    put(root / "cpu", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    put(root / "cpu/box", cpu__cfs_quota_us=250000, cpu__cfs_period_us=100000, cpu__stat="nr_periods 0\nnr_throttled 0")
    limits = {"memory__usage_in_bytes": 700, "memory__stat": "total_inactive_file 100"}
    put(root / "memory", memory__limit_in_bytes=none, **limits)
    put(
        root / "memory/box",
        memory__limit_in_bytes=900,
        memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 4",
        **limits,
    )
    mounts = (
        f"35 31 0:32 / {root}/memory rw - cgroup cgroup rw,memory\n"
        f"36 31 0:33 / {root}/cpu rw - cgroup cgroup rw,cpu,cpuacct\n41 31 0:38 / /no-such rw - cgroup2 cgroup2 rw\n"
    )
    sampler = NodeSampler(tree(tmp_path, "4:memory:/box\n1:cpu,cpuacct:/box\n0::/\n", mounts))
    memory = sampler.memory()
    assert (memory.limit_bytes, memory.limit_used_bytes, memory.oom_kills) == (900, 600, 4)
    assert (sampler.cpu().limit_cores, sampler.cpu().throttled_percent) == (2.5, 0.0)


def test_without_control_groups_there_are_no_limits(tmp_path: Path) -> None:
    sampler = NodeSampler(str(tmp_path))
    memory = sampler.memory()
    assert (memory.limit_bytes, memory.limit_used_bytes, memory.oom_kills) == (None, None, None)
    assert 0 < memory.used_bytes < memory.total_bytes
    assert (sampler.cpu().limit_cores, sampler.cpu().throttled_percent) == (None, None)


def test_busy_cores_are_the_machines_cpu_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sampler, seconds = NodeSampler(str(tmp_path)), [0.0]
    real = node_sampler.psutil.cpu_times()
    times = {"user": 0.0, "nice": 0.0, "system": 0.0, "irq": 0.0, "softirq": 0.0}
    monkeypatch.setattr(node_sampler.psutil, "cpu_times", lambda: real._replace(**times, idle=seconds[0], iowait=5.0))
    monkeypatch.setattr(node_sampler, "time", type("Time", (), {"monotonic": lambda: seconds[0]}))
    sampler._busy = node_sampler.CounterRate()
    sampler.cpu()
    seconds[0], times["user"], times["softirq"] = 10.0, 14.0, 1.0
    assert sampler.cpu().busy_cores == 1.5


def test_loopback_and_parts_of_a_bond_are_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sampler, now = NodeSampler(str(tmp_path)), [0.0]
    one = next(iter(node_sampler.psutil.net_io_counters(pernic=True).values()))
    sent = {"lo": 5000, "bond0": 100, "eth0": 60, "eth1": 40, "eth2": 7}
    monkeypatch.setattr(
        node_sampler.psutil,
        "net_io_counters",
        lambda **_: {name: one._replace(bytes_sent=value, bytes_recv=2 * value) for name, value in sent.items()},
    )
    masters = ("/sys/class/net/eth0/master", "/sys/class/net/eth1/master")
    monkeypatch.setattr(node_sampler.os.path, "lexists", lambda path: path in masters)
    monkeypatch.setattr(node_sampler, "time", type("Time", (), {"monotonic": lambda: now[0]}))
    sampler._sent, sampler._received = node_sampler.CounterRate(), node_sampler.CounterRate()
    sampler.network()
    now[0] = 10.0
    sent |= {"lo": 99999, "bond0": 300, "eth0": 160, "eth1": 140, "eth2": 17}
    use = sampler.network()
    assert (use.sent_bytes_per_s, use.received_bytes_per_s) == (21.0, 42.0)


def test_the_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    disk = DiskSampler(str(tmp_path / "not" / "yet")).sample()
    assert disk.path == str(tmp_path)
    assert 0 < disk.free_bytes <= disk.total_bytes
