"""The port of the next round's store is held by the process that named it, until it names another one."""

from __future__ import annotations

import contextlib
import socket

import pytest

from dlrover_hooks.config import Config, Place
from dlrover_hooks.worker.round_join import join_request


def taken(port: int) -> bool:
    """No other program gets it."""
    with socket.socket() as other:
        try:
            other.bind(("", port))
        except OSError:
            return True
    return False


def test_a_port_that_was_named_is_held_and_the_store_listens_there() -> None:
    config, place = Config(job="job"), Place(node="n")
    first = join_request(config, place, "w0").port
    assert taken(first)
    with contextlib.closing(socket.create_server(("", first))) as store:  # as torch's, it sets SO_REUSEADDR
        assert store.getsockname()[1] == first
    second = join_request(config, place, "w0").port
    assert taken(second)
    assert not taken(first)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_lets_it_go() -> None:
    """A DataLoader worker may outlive its parent's round."""
    import os

    from dlrover_hooks.host import ports

    ports.held_port()
    child = os.fork()
    if child == 0:
        os._exit(len(ports._HELD))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(ports._HELD) == 1
