"""Several masters on one journal: one leads, the others are standbys; a killed or stopped one is replaced.

With the journal in a real etcd or in a SQLite file; what etcd alone has is tested here, too.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import requests

from dlrover_hooks import protocol as p
from dlrover_hooks.config import Tls
from dlrover_hooks.errors import JournalFailed
from dlrover_hooks.master.core import events, job_registry
from dlrover_hooks.master.core.events import Envelope
from dlrover_hooks.master.core.job_registry import Master
from dlrover_hooks.master.journal import etcd_journal
from dlrover_hooks.master.journal.etcd_gateway import EtcdAccess, EtcdAway, EtcdGateway, EtcdRefused, delete, put
from dlrover_hooks.master.journal.etcd_journal import EtcdJournal, EtcdUrl
from dlrover_hooks.master.journal.etcd_leadership import EtcdLeadership
from dlrover_hooks.master.journal.journal_protocol import LeadershipLost
from tests.e2e.etcd_process import EtcdProcess
from tests.e2e.job_script import join
from tests.e2e.launched import Launched
from tests.e2e.several_masters import Masters, client_of, names, takeovers_under_load
from tests.e2e.test_tls import certificate, folder_of_cas
from tests.waiting import until


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    process = EtcdProcess(tmp_path_factory.mktemp("etcd"))
    yield process
    process.close()


@pytest.fixture
def etcd_masters(tmp_path: Path, etcd: EtcdProcess) -> Iterator[Masters]:
    several = Masters(tmp_path, etcd.journal(tmp_path.name))
    yield several
    several.close()


@pytest.fixture
def file_masters(tmp_path: Path) -> Iterator[Masters]:
    several = Masters(tmp_path, str(tmp_path / "master.db"), 2, "--standby")
    yield several
    several.close()


@pytest.fixture(params=["etcd_masters", "file_masters"])
def masters(request: pytest.FixtureRequest) -> Masters:
    return request.getfixturevalue(request.param)


def named_by(masters: Masters, index: int) -> str:
    """The leader that a standby names."""
    answer = masters.readiness(index)
    return "" if answer is None else answer.headers.get(p.LEADER_HEADER, "")


def test_a_killed_leader_is_replaced_and_nothing_is_lost(masters: Masters) -> None:
    first = masters.leader()
    client = client_of(masters)
    client.call(join())
    masters.kill(first)
    assert names(client) == {"job"}
    client.call(join(job="second"))
    masters.again(first)
    masters.kill(masters.leader(first))
    assert names(client) == {"job", "second"}, masters.told()
    client.close()


def test_a_standby_names_the_leader(masters: Masters) -> None:
    """One address is enough while that master runs."""
    first = masters.leader()
    standby = masters.urls[1 - first]
    until(lambda: named_by(masters, 1 - first) == masters.urls[first], "a standby that knows the leader")
    client = client_of(masters, standby)
    client.call(join())
    assert names(client) == {"job"}
    assert requests.get(f"{standby}/healthz", timeout=5).json()["role"] == "standby"
    client.close()


def test_a_stopped_leader_does_no_harm_when_it_goes_on(etcd_masters: Masters) -> None:
    """Requests reach it before it could learn that it was replaced: it answers none of them as the leader."""
    masters = etcd_masters
    first = masters.leader()
    client = client_of(masters)
    client.call(join())
    masters.signal(first, signal.SIGSTOP)
    masters.leader(first)
    client.call(join(job="second"))
    masters.signal(first, signal.SIGCONT)
    late = client_of(masters, masters.urls[first])
    assert names(late) == {"job", "second"}
    until(lambda: "goes on as a standby" in masters.told(), "the former leader")
    until(lambda: named_by(masters, first) == masters.urls[1 - first], "a standby that knows the leader")
    late.close()
    client.close()


@pytest.mark.deep
def test_a_long_poll_at_a_stopped_leader_is_sent_to_the_next_one(etcd_masters: Masters) -> None:
    """Long before its own timeout: no master is asked to keep it for longer than a few seconds."""
    masters = etcd_masters
    first = masters.leader()
    client = client_of(masters, masters.urls[first], masters.urls[1 - first])
    client.call(join())
    masters.stop(first)
    began = time.monotonic()
    assert client.call(p.AwaitRound("job", "agent", timeout_s=20.0)).round == 1
    assert time.monotonic() - began < 15.0
    client.close()


@pytest.mark.deep
def test_a_leader_without_its_key_goes_on_as_a_standby(etcd_masters: Masters) -> None:
    """The journal tells it: its lease lives. It neither ends nor writes, and it keeps its port."""
    masters = etcd_masters
    first = masters.leader()
    client = client_of(masters)
    client.call(join())
    members, prefix, *_ = EtcdUrl.parse(masters.journal)
    key = f"{prefix}leader".encode()
    EtcdGateway(members).transaction([], [delete(key, key + b"\0")])
    client.call(join(job="second"))
    assert names(client) == {"job", "second"}
    until(lambda: "goes on as a standby" in masters.told(), "a leader that stops to lead", diagnostic=masters.told)
    until(lambda: masters.readiness(first) is not None, "an answer of the former leader", diagnostic=masters.told)
    assert masters.processes[first].poll() is None
    client.close()


def test_a_leader_that_ends_is_replaced_at_once(masters: Masters) -> None:
    first = masters.leader()
    masters.signal(first, signal.SIGTERM)
    assert masters.processes[first].wait(60) == 0
    masters.leader(first)


@pytest.mark.deep
def test_etcd_is_away_for_a_while(tmp_path: Path) -> None:
    """Without etcd no master leads; what was acknowledged is there when it is back."""
    own = EtcdProcess(tmp_path)
    masters = Masters(tmp_path, own.journal(tmp_path.name))
    client = client_of(masters)
    try:
        masters.leader()
        client.call(join())
        own.kill(0)
        until(lambda: "goes on as a standby" in masters.told(), "a leader that stops to lead", diagnostic=masters.told)
        until(lambda: masters.told().count("cannot follow") >= 2, "two standbys", diagnostic=masters.told)
        own.again(0)
        client.call(join(job="second"))
        assert names(client) == {"job", "second"}
    finally:
        client.close()
        masters.close()
        own.close()


@pytest.mark.deep
def test_a_member_of_three_is_killed(tmp_path: Path) -> None:
    own = EtcdProcess(tmp_path, 3)
    masters = Masters(tmp_path, own.journal(tmp_path.name))
    client = client_of(masters)
    try:
        masters.leader()
        client.call(join())
        for index in range(3):
            own.kill(index)
            client.call(join(job=f"without-{index}"))
            own.again(index)
        assert names(client) == {"job", "without-0", "without-1", "without-2"}
        assert [process.poll() for process in masters.processes] == [None, None], masters.told()
    finally:
        client.close()
        masters.close()
        own.close()


@pytest.mark.deep
def test_the_quota_of_etcd_is_used_up(tmp_path: Path) -> None:
    """Events are refused with the reason, questions are answered; with room again all goes on under that leader."""
    own = EtcdProcess(tmp_path, 1, "--quota-backend-bytes", str(16 << 20))
    masters = Masters(tmp_path, own.journal(tmp_path.name))
    client, etcd = client_of(masters), EtcdGateway([own.members])
    try:
        leader = masters.leader()
        client.call(join())
        with pytest.raises(EtcdRefused, match="space"):
            fill(etcd, b"filler/")
        with pytest.raises(JournalFailed, match="space") as refused:
            client.call(join(job="second"))
        assert "quota" in refused.value.hint
        assert names(client) == {"job"}
        make_room(etcd, b"filler/")
        until(lambda: masters.leader() == leader, "a leader that accepts events", diagnostic=masters.told)
        client.call(join(job="third"))
        assert names(client) == {"job", "third"}
        assert "goes on as a standby" not in masters.told()
    finally:
        client.close()
        masters.close()
        own.close()


@pytest.mark.deep
def test_etcd_with_tls_and_a_password(tmp_path: Path) -> None:
    """A member that restarts has forgotten the masters' tokens. A wrong password is named. The CA is in a folder."""
    cert, key = certificate(tmp_path, "etcd", "O")  # etcd's gateway refuses a common name beside a password
    access = EtcdAccess(Tls(ca=cert, cert=cert, key=key))
    files = {"CA_FILE": folder_of_cas(tmp_path / "cas", cert), "CLIENT_CERT": cert, "CLIENT_KEY": key}
    env = {f"DLROVER_HOOKS_{name}": value for name, value in files.items()}
    (tmp_path / "password").write_text("right\n")
    (tmp_path / "wrong").write_text("wrong\n")
    own = EtcdProcess(tmp_path, 1, tls=(cert, key))
    demand_passwords(EtcdGateway([own.members], access=access))
    flags = "--etcd-password-file", str(tmp_path / "password")
    journal = own.journal(tmp_path.name, "etcds://hooks@")
    masters = Masters(tmp_path, journal, 1, *flags, **env)
    refused = Masters(tmp_path, journal, 1, flags[0], str(tmp_path / "wrong"), **env)
    client = client_of(masters)
    try:
        masters.leader()
        client.call(join())
        own.kill(0)
        own.again(0)
        client.call(join(job="second"))
        assert names(client) == {"job", "second"}
        until(lambda: "invalid user ID or password" in refused.told(), "the reason", diagnostic=refused.told)
    finally:
        client.close()
        masters.close()
        refused.close()
        own.close()


def demand_passwords(etcd: EtcdGateway) -> None:
    """From now on etcd refuses requests without one. The user `hooks` may use the keys of the masters, no others."""
    for user in ("root", "hooks"):
        etcd.call("/v3/auth/user/add", {"name": user, "password": "right"})
        etcd.call("/v3/auth/role/add", {"name": user})
        etcd.call("/v3/auth/user/grant", {"user": user, "role": user})
    first, end = (base64.b64encode(key).decode() for key in (b"/dlrover-hooks/", b"/dlrover-hooks0"))
    keys = {"permType": "READWRITE", "key": first, "range_end": end}
    etcd.call("/v3/auth/role/grant", {"name": "hooks", "perm": keys})
    etcd.call("/v3/auth/enable", {})


def fill(etcd: EtcdGateway, folder: bytes) -> None:
    for number in range(64):
        etcd.transaction([], [put(folder + b"%02d" % number, bytes(1 << 20))])


def make_room(etcd: EtcdGateway, folder: bytes) -> None:
    """What an operator does: delete, compact, defragment, end the alarm."""
    etcd.transaction([], [delete(folder, folder[:-1] + b"0")])
    revision = etcd.call("/v3/kv/range", {"key": "AA=="})["header"]["revision"]
    etcd.call("/v3/kv/compaction", {"revision": revision, "physical": True})
    etcd.call("/v3/maintenance/defragment", {})
    for alarm in etcd.call("/v3/maintenance/alarm", {"action": "GET"})["alarms"]:
        etcd.call("/v3/maintenance/alarm", {"action": "DEACTIVATE", **alarm})


@pytest.mark.deep
def test_ten_takeovers_under_load_lose_nothing(tmp_path: Path) -> None:
    """Leaders are killed, or stopped and woken, while clients write. What was acknowledged was done, and done once."""
    own = EtcdProcess(tmp_path, 3)
    masters = Masters(tmp_path, own.journal(tmp_path.name), 3)
    try:
        found = takeovers_under_load(masters, 10, stop_each_second=True)
        assert found.errors == []
        assert found.jobs == dict.fromkeys(found.acknowledged, 1)
    finally:
        masters.close()
        own.close()


# ---- the journal alone


class Follower:
    """One candidate for the journal `name`, in this process."""

    def __init__(self, etcd: EtcdProcess, name: str) -> None:
        members, prefix, *_ = EtcdUrl.parse(f"etcd://{etcd.members}/{name}")
        self.lost = threading.Event()
        self.gateway = EtcdGateway(members)
        self.leadership = EtcdLeadership(self.gateway, f"{prefix}leader".encode(), name, self.lost.set)
        self.journal = EtcdJournal(self.gateway, prefix, self.leadership)

    def lead(self) -> Master:
        assert self.leadership.campaign(threading.Event(), self.journal.follow)
        return self.journal.load()


def record(state: Master, job: str, now: float) -> bytes:
    event = join(job=job)
    job_registry.apply(state, event, now, None)
    return events.encode(Envelope(now=now, event=event, key=None))


def test_a_journal_is_read_back(etcd: EtcdProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots of several parts, batches, and what a warm standby has read in between: all give the same state."""
    monkeypatch.setattr(etcd_journal, "PART_BYTES", 700)
    leader, standby = Follower(etcd, tmp_path.name), Follower(etcd, tmp_path.name)
    state = leader.lead()
    for turn in range(6):
        batch = [record(state, f"job-{turn}-{index}", float(turn)) for index in range(3)]
        leader.journal.append(batch, job_registry.encode(state) if turn % 2 else None)
        if turn in (0, 3):
            standby.journal.follow()
        assert job_registry.encode(leader.journal.load()) == job_registry.encode(state)
    leader.journal.close()
    assert job_registry.encode(standby.lead()) == job_registry.encode(state)
    assert standby.journal.since_snapshot == 0
    keys = leader.gateway.range(b"/dlrover-hooks/", b"/dlrover-hooks0", keys_only=True)
    assert {one.key.split(b"/")[4] for one in keys if b"/events/" in one.key and tmp_path.name.encode() in one.key} == {
        b"%016d" % first for first in (13, 16)
    }, "events that are in the older of two snapshots are gone"
    standby.journal.close()


def test_a_replaced_leader_writes_nothing(etcd: EtcdProcess, tmp_path: Path) -> None:
    """Also one that still believes in its lease: the epoch is a condition of each write."""
    former, leader = Follower(etcd, tmp_path.name), Follower(etcd, tmp_path.name)
    state = former.lead()
    former.journal.append([record(state, "first", 1.0)])
    former.gateway.revoke(former.leadership._lease)
    state = leader.lead()
    former.leadership._until = float("inf")
    with pytest.raises(LeadershipLost):
        former.journal.append([record(Master(), "lost", 2.0)])
    with pytest.raises(LeadershipLost):
        former.journal.probe()
    assert former.lost.is_set()
    leader.journal.append([record(state, "second", 2.0)])
    assert set(leader.journal.load().jobs) == {"first", "second"}
    former.journal.close()
    leader.journal.close()


def test_a_refusal_after_silence_is_an_unknown_outcome(etcd: EtcdProcess, tmp_path: Path) -> None:
    """The first attempt was stored, although no answer came: it must not be reported as not stored."""
    leader, answers = Follower(etcd, tmp_path.name), iter([EtcdAway("no answer"), EtcdRefused("no space")])
    leader.lead()

    def attempt() -> None:
        raise next(answers)

    with pytest.raises(JournalFailed):
        leader.journal._insist(partial(fail, EtcdRefused("no space")))
    with pytest.raises(LeadershipLost):
        leader.journal._insist(attempt)
    assert leader.lost.is_set()
    leader.journal.close()


def fail(error: Exception) -> None:
    raise error


def test_a_value_that_was_not_completed_does_not_exist(etcd: EtcdProcess, tmp_path: Path) -> None:
    former, leader = Follower(etcd, tmp_path.name), Follower(etcd, tmp_path.name)
    state = former.lead()
    former.journal.append([record(state, "first", 1.0)])
    key = f"/dlrover-hooks/{tmp_path.name}/events/{2:016d}/{1:05d}".encode()
    former.journal._fenced([etcd_journal.put(key, b"the second part of two")])
    former.journal.close()
    state = leader.lead()
    leader.journal.append([record(state, "second", 2.0)])
    assert set(leader.journal.load().jobs) == {"first", "second"}
    leader.journal.close()


# ---- a training run

HOLDS = (6, 15)
TRAINING = """
    import hashlib, torch
    from torch.utils.data import DataLoader, TensorDataset
    from dlrover_hooks import AsyncCheckpointer, elastic_loader

    torch.manual_seed(1)
    torch.distributed.init_process_group("gloo")
    net = torch.nn.Linear(4, 1)
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    data = TensorDataset(torch.randn(96, 4, generator=torch.Generator().manual_seed(3)))
    loader = elastic_loader(DataLoader(data, batch_size=4, shuffle=True), optimizer=optimizer)
    save_to, holds = os.environ["SAVE_TO"], json.loads(os.environ["HOLDS"])
    with AsyncCheckpointer(save_to, model=model, optimizer=optimizer, loader=loader, save_every=4) as saves:
        for epoch in loader.epochs(2):
            for (x,) in loader:
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if saves.step in holds and os.environ["RANK"] == "0":
                    note(held=saves.step)
                    open(f"go-{saves.step}").read()  # a FIFO
        step = saves.step
    weights = torch.cat([one.detach().flatten() for one in net.parameters()])
    note(save_to=save_to, end=step, weights=hashlib.sha256(weights.numpy().tobytes()).hexdigest())
"""


@pytest.mark.deep
@pytest.mark.requirement("ED-56", "ED-58", "ED-62")
def test_a_run_outlives_its_masters_and_ends_bit_equal(
    masters: Masters, launch: Callable[..., Launched], tmp_path: Path
) -> None:
    """The leader is killed twice while the run trains; its checkpoint at the end was committed by the third one."""
    calm = launch(TRAINING, "-n", "2", SAVE_TO="calm", HOLDS="[]")
    code, said = calm.end()
    assert code == 0, said
    for step in HOLDS:
        os.mkfifo(tmp_path / f"go-{step}")
    leader = masters.leader()
    run = launch(TRAINING, "-n", "2", "--rdzv-endpoint", ",".join(masters.urls), SAVE_TO="moved", HOLDS=str([*HOLDS]))
    for step in HOLDS:
        run.wait_for(lambda lives, step=step: any(life.get("held") == step for life in lives))
        masters.kill(leader)
        gone, leader = leader, masters.leader(leader)
        masters.again(gone)
        (tmp_path / f"go-{step}").open("w").close()
    code, said = run.end()
    assert code == 0, f"{said}\n{masters.told()}"
    ends = [life for life in run.read() if "end" in life]
    assert len(ends) == 4
    assert len({(life["end"], life["weights"]) for life in ends}) == 1
    found = [json.loads(path.read_text()) for path in (tmp_path / "moved").glob("step-*/MANIFEST*")]
    last = max(found, key=lambda manifest: manifest["generation"]["step"])
    assert last["generation"]["step"] == ends[0]["end"]
    epochs = [int(epoch) for epoch in re.findall(r"this master leads \(epoch (\d+)\)", masters.told())]
    assert last["epoch"] == epochs[-1]
