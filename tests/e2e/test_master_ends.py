"""The master's process: how it starts, ends and fails."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.client import MasterClient
from dlrover_hooks.errors import JournalFailed, MasterAway
from tests.e2e.job_script import attach, join, vote
from tests.e2e.master_process import LiveMaster


def test_a_bug_in_a_commit_ends_the_process(tmp_path: Path) -> None:
    """Exit code 70 and a traceback, so that its owner starts the next life; no deaf master that says ready."""
    script = (
        "from dlrover_hooks.master import __main__\n"
        "from dlrover_hooks.master.journal.sqlite_journal import SqliteJournal\n"
        "SqliteJournal.append = lambda *_: 1 / 0\n"
        "__main__.main()\n"
    )
    command = [sys.executable, "-c", script, "--port", "0", "--journal", str(tmp_path / "master.db")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    url = process.stderr.readline().split()[2]
    client = MasterClient(url, incarnation="agent", deadline_s=5.0)
    with pytest.raises(MasterAway):
        client.call(join())
    _, errors = process.communicate(timeout=200)
    client.close()
    assert process.returncode == 70
    assert "ZeroDivisionError" in errors


def test_who_passed_the_socket_is_not_told_its_address(live_master: LiveMaster) -> None:
    """The launcher has named it already, in its own first line."""
    assert live_master.log.read_text() == ""


def test_it_ends_quickly_and_with_its_owner(live_master: LiveMaster) -> None:
    """SIGTERM is not held up by long-polls; EOF on the owner's pipe ends it too."""
    client = live_master.client("agent", deadline_s=0.5)
    client.call(join())
    poll = threading.Thread(target=lambda: _ignore(client, p.AwaitRound("job", "agent", after=1, timeout_s=20.0)))
    poll.start()
    watch = client.watch("job", lambda notice: None)
    code, seconds = live_master.terminate()
    assert code == 0
    assert seconds < 15.0, "it waited for the long-poll"
    poll.join(60)
    watch.close()
    live_master.restart()
    assert live_master.end_life() == 0


def _ignore(client: MasterClient, request: p.Message) -> None:
    try:
        client.call(request)
    except MasterAway:
        return


def test_nobody_there(tmp_path: Path) -> None:
    """MasterAway within the deadline, naming the address and what to do."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    client = MasterClient(url, incarnation="x", deadline_s=0.2)
    with pytest.raises(MasterAway, match="DLROVER_HOOKS_MASTER"):
        client.call(p.ListJobs())
    client.close()


def _command(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dlrover_hooks.master", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


@pytest.mark.deep
def test_refusals_of_the_command_line(tmp_path: Path) -> None:
    """Exit 78 and words, no traceback: open address without token, port in use, journal in no folder, bad fd."""
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe" * 1000)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        cases = {
            ("--host", "0.0.0.0", "--port", "0"): "token",
            ("--port", port): port,
            ("--port", "0", "--journal", str(tmp_path / "none" / "x.db")): "journal",
            ("--fd", "99"): "--fd 99",
            ("--token-file", str(tmp_path / "empty")): "is empty",
            ("--token-file", str(tmp_path / "binary")): "ASCII",
            ("--port", "0", "--journal", str(tmp_path / "binary")): "not a database",
            ("--port", "0", "--leader-lease", "3"): "several masters",
            ("--port", "0", "--advertise", "http://a:1"): "several masters",
            ("--port", "0", "--standby"): "--standby needs a journal",
            ("--port", "0", "--standby", "--journal", str(tmp_path / "none" / "x.db")): "cannot be opened",
            ("--port", "0", "--journal", "etcd://me:secret@a/n"): "--etcd-password-file",
            ("--port", "0", "--journal", "etcd://me@a/n"): "needs a password",
        }
        for flags, word in cases.items():
            ended = _command(*flags)
            assert ended.returncode == 78
            assert word in ended.stderr
            assert "HINT" in ended.stderr
            assert "Traceback" not in ended.stderr


@pytest.mark.deep
def test_a_second_master_on_a_journal_is_refused(live_master: LiveMaster, tmp_path: Path) -> None:
    """Exit 78 with the first one's pid and host, by whatever path; killed, the first one leaves it free."""
    live_master.client("agent").call(join())
    (tmp_path / "link.db").symlink_to(live_master.journal)
    for name in ("master.db", "link.db"):
        ended = _command("--port", "0", "--journal", str(tmp_path / name))
        assert ended.returncode == 78
        assert f"pid {live_master.pid} on host {socket.gethostname()}" in ended.stderr
        assert "Traceback" not in ended.stderr
    live_master.kill()
    live_master.restart()
    assert live_master.client("agent").call(p.ShowJob("job")).run == "run0"


def test_journal_is_private(live_master: LiveMaster) -> None:
    """It holds storage options: mode 0600, its side files (WAL, its index, the lock) too."""
    live_master.client("agent").call(join())
    files = list(live_master.journal.parent.glob("master.db*"))
    assert len(files) == 4
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


def test_full_disk_loses_nothing(tmp_path: Path) -> None:
    """A journal that cannot be written: 503, nothing was changed, and all is well again when there is room."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk]).returncode != 0:
        pytest.skip("needs root and mount(2) for a small disk")
    master = LiveMaster(tmp_path, journal=disk / "master.db")
    try:
        agent = master.client("agent")
        agent.call(join())
        for worker in ("w0", "w1"):
            master.client(worker).call(attach(worker))
        before = agent.call(p.ShowJob("job"))
        with open(disk / "filler", "wb", buffering=0) as filler:
            try:
                while filler.write(b"x" * 4096):
                    pass
            except OSError:
                pass
        refused = 0
        for step in range(400):
            try:
                master.client("w0").call(vote(0, step, reason="x" * 2000))
            except JournalFailed as error:
                refused += error.status == 503 and "room" in error.hint
                break
        assert refused
        assert agent.call(p.ShowJob("job")).members == before.members
        state = agent.call(p.ShowJob("job"))
        (disk / "filler").unlink()
        master.client("w1").call(vote(1, 500))
        master.kill()
        master.restart()
        after = agent.call(p.ShowJob("job"))
        assert (after.members, after.round, after.attempt) == (state.members, state.round, state.attempt)
        assert after.step == 500
    finally:
        master.close()
        subprocess.run(["umount", "-l", disk], check=False)
        shutil.rmtree(disk, ignore_errors=True)
