"""Keepers where the kernel refuses memfd_create, descriptors on sockets, or both, by a real seccomp filter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dlrover_hooks.checkpoint.ipc import keeper_messages
from dlrover_hooks.checkpoint.ipc.unix_socket import reach
from dlrover_hooks.errors import KeeperAway
from dlrover_hooks.protocol import Restore, Source
from tests.e2e.kept import Kept, memfds, state
from tests.waiting import WAIT_S

REFUSING = str(Path(__file__).with_name("refusing.py"))


pytestmark = pytest.mark.usefixtures("runtime")


@pytest.mark.parametrize("calls", ["memfd_create", "sendmsg", "memfd_create,sendmsg"])
def test_memory_is_shared_all_the_same(kept: Kept, calls: str) -> None:
    """Restored by a next life bit-exact, saved again in the same pages; and nothing is left when all are dead."""
    before = set(os.listdir("/dev/shm"))
    keeper = kept.keeper(before=(REFUSING, calls))
    kept.dead_trainer(1, size=1 << 20)
    second = kept.trainer()
    (held,) = second.held()
    tree = second.load(Restore(held.generation, 1, Source.MEMORY)).tree
    assert (tree["state"]["w"] == 1).all()
    second.save(2, state(2, 1 << 20))
    kept.notice(keeper_messages.Hashed)
    assert sorted(one.generation.step for one in second.held()) == [1, 2]
    assert len(memfds(keeper.pid)) == (0 if "memfd_create" in calls else 1)
    files = [path for path in links(keeper.pid) if path.startswith("/dev/shm/")]
    assert len(files) == (1 if "memfd_create" in calls else 0)
    keeper.kill()
    keeper.wait()
    second.close()
    assert set(os.listdir("/dev/shm")) <= before


def links(pid: int) -> set[str]:
    return {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}


def test_a_launchers_pipe_is_taken_over_without_descriptors_on_sockets(kept: Kept, runtime: Path) -> None:
    first = kept.keeper()
    life, ours = os.pipe()
    second = kept.keeper("--life-fd", str(life), pass_fds=(life,), ready=False, before=(REFUSING, "sendmsg"))
    os.close(life)
    assert second.wait(WAIT_S) == 0
    assert first.poll() is None
    os.close(ours)
    assert first.wait(WAIT_S) == 0
    assert list(runtime.iterdir()) == []


def test_only_what_was_named_is_opened(tmp_path: Path) -> None:
    """The number of a process may have gone to another one meanwhile."""
    fd = os.memfd_create("named")
    path, device, inode = keeper_messages.whereabouts(fd)
    os.close(reach((path, device, inode)))
    for wrong in ((path, device, inode + 1), (path, device + 1, inode), (f"{tmp_path}/none", device, inode)):
        with pytest.raises(KeeperAway, match="memory") as refused:
            reach(wrong)
        assert "namespace" in refused.value.hint
    os.close(fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_user_gets_no_word_and_no_memory(kept: Kept, runtime: Path) -> None:
    """Even where folder and socket were opened to everybody: the kernel names the peer."""
    keeper = kept.keeper()
    trainer = kept.trainer()
    trainer.save(1, state(1))
    kept.notice(keeper_messages.Hashed)
    for path in (runtime.parent, runtime, *runtime.glob("*.sock")):
        path.chmod(0o777)
    (socket_path,) = runtime.glob("*.sock")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            code = stranger(socket_path, keeper.pid)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(trainer.held()) == 1


def stranger(path: Path, keeper: int) -> int:
    """0: the line was ended without a word, and the keeper's descriptors are closed to us."""
    import socket

    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(path))
        try:
            line.sendall(keeper_messages.frame(keeper_messages.Inventory(ref=1)))
            said = line.recv(1)
        except OSError:
            said = b""
    try:
        os.listdir(f"/proc/{keeper}/fd")
    except PermissionError:
        return 2 if said else 0
    return 3
