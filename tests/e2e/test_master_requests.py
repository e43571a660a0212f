"""What an agent has to say while its master is away is said when that is back."""

from __future__ import annotations

import contextlib
import selectors
from pathlib import Path
from typing import Any, cast

from dlrover_hooks import protocol as p
from dlrover_hooks.client.master_addresses import MasterAddresses
from dlrover_hooks.launcher.agent import Agent
from dlrover_hooks.launcher.failures.verdict import WorkerExit
from dlrover_hooks.launcher.master_requests import AgentAddress
from dlrover_hooks.launcher.options import LaunchOptions
from tests.e2e.job_script import attach, join
from tests.e2e.master_process import LiveMaster

NOWHERE = "http://127.0.0.1:9"


def test_the_end_of_a_worker_is_told_until_it_is_heard(tmp_path: Path) -> None:
    """One that has not attached is missed by its launcher alone: all others would wait for it, for ever."""
    with contextlib.ExitStack() as owned:
        master = LiveMaster(tmp_path)
        owned.callback(master.close)
        selector = owned.enter_context(selectors.DefaultSelector())
        client, nobody = master.client("agent"), cast("Any", None)
        agent = Agent(
            LaunchOptions(command=("true",)), AgentAddress("job", "node-agent", "127.0.0.1"), client, nobody, selector,
            lambda: None, fresh=False,
        )  # fmt: skip
        owned.callback(agent._events.close)
        client.call(join())
        master.client("w0").call(attach("w0"))

        def alive() -> list[bool]:
            return [member.alive for member in client.call(p.ShowJob("job")).members]

        here, client._addresses = client._addresses, MasterAddresses(NOWHERE)
        agent._requests.tell({"w1": WorkerExit("worker 1", 1)})
        agent._turn()
        client._addresses = here
        assert alive() == [True, True]
        agent._turn()
        assert alive() == [True, False]
        assert client.call(p.ShowJob("job")).failures == 1
