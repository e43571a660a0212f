"""Where a thread is, as its own code and the collective it waits in."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from dlrover_hooks.worker.thread_stack import line_of_dump, stack_of


def held_in(call: Any) -> Any:
    """`stack_of` a thread that is in `call(entered, leave)`."""
    entered, leave = threading.Event(), threading.Event()
    thread = threading.Thread(target=call, args=(entered, leave))
    thread.start()
    try:
        assert entered.wait(30)
        assert thread.ident is not None
        return stack_of(thread.ident)
    finally:
        leave.set()
        thread.join(30)


def read_shards(entered: threading.Event, leave: threading.Event) -> None:
    entered.set()
    leave.wait(30)


def test_the_line_is_the_users_own_however_deep_in_a_library_it_waits() -> None:
    stack = held_in(read_shards)
    assert re.fullmatch(r"test_thread_stack\.py:\d+, in read_shards", stack.where)
    assert "threading.py" in stack.text, "the text is the whole stack"
    assert stack.text.rstrip().splitlines()[-1].strip().startswith(("waiter.acquire", "gotit"))
    assert stack.waits_in == ""


@pytest.mark.parametrize(
    ("file", "outer", "expected"),
    [
        ("torch/distributed/distributed_c10d.py", "all_reduce", "all_reduce"),
        ("torch/autograd/graph.py", "_engine_run_backward", "backward"),
        ("torch/nn/modules/module.py", "all_reduce", ""),
    ],
)
def test_the_collective_is_named(tmp_path: Path, file: str, outer: str, expected: str) -> None:
    """As torch's own functions do: one calls another of the same file, below a wrapper."""
    path = str(tmp_path / "site-packages" / file)
    code = f"def {outer}(*events):\n    inner(*events)\ndef inner(*events):\n    read(*events)\n"
    names: dict[str, Any] = {"read": read_shards}
    exec(compile(code, path, "exec"), names)
    assert held_in(names[outer]).waits_in == expected


def test_a_thread_that_has_ended_is_nowhere() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    assert thread.ident is not None
    assert stack_of(thread.ident) is None


def test_the_line_of_a_dump_is_the_main_threads(tmp_path: Path) -> None:
    """A real dump, of a process with two threads; its main thread waits deep in the standard library."""
    script = tmp_path / "waits.py"
    script.write_text(
        """
import faulthandler, sys, threading

def load():
    event.wait(0)
    faulthandler.dump_traceback(all_threads=True)

event = threading.Event()
other = threading.Thread(target=threading.Event().wait, args=(60,), daemon=True)
other.start()
load()
"""
    )
    said = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True).stderr
    assert said.count("most recent call first") == 2
    assert line_of_dump(said) == "waits.py:6, in load"
    assert line_of_dump("Thread 0x1 (most recent call first):\n  <no Python frame>\n") == ""
