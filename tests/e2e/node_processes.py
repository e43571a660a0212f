"""A node of a check as a process, whose way to the other nodes a test can harm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from dlrover_hooks.host.ports import Port
from dlrover_hooks.testing.tcp_proxy import Proxy
from tests.e2e.launched import REPOSITORY
from tests.e2e.master_process import LiveMaster
from tests.waiting import WAIT_S, json_lines, until

AGES_S = 1e6


class CheckedNode:
    """A process of `checked_node.py`. `proxy`: through which the other nodes reach it."""

    def __init__(
        self, folder: Path, master: LiveMaster, name: str, count: int, transfer_s: float, proxied: bool
    ) -> None:
        self.said = folder / f"{name}.jsonl"
        self.held, self.proxy = Port(), None
        if proxied:
            self.proxy = Proxy(f"http://127.0.0.1:{self.held.number}")
        port = int(self.proxy.url.rpartition(":")[2]) if self.proxy is not None else 0
        words = [master.url, master.token, name, count, transfer_s, self.held.number, port]
        command = [sys.executable, "-m", "tests.e2e.checked_node", *map(str, words)]
        with self.said.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, cwd=REPOSITORY)

    def lines(self) -> list[Any]:
        return json_lines(self.said)

    def in_round(self, number: int) -> Any:
        """Wait for the begin of its transfer of that round, or a later one."""
        return until(
            lambda: next((one for one in self.lines() if one.get("round", 0) >= number), None),
            f"round {number}",
            diagnostic=self.lines,
        )

    def end(self) -> tuple[int, Any]:
        """Its exit code, and the last line that it wrote."""
        code = self.process.wait(WAIT_S)
        return code, self.lines()[-1]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.proxy is not None:
            self.proxy.close()
        self.held.release()
