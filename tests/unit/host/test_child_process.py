"""A child of the launcher that SIGKILL does not end: in uninterruptible sleep, or kept by a debugger as here."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys

import pytest

from dlrover_hooks.host import child_process as children
from dlrover_hooks.host.child_process import Child

TRACED = "import ctypes, os, signal\nctypes.CDLL(None).prctl(0x59616D61, -1)\nos.write(1, b'x')\nsignal.pause()"
TRACER = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
SEIZE = 0x4206
os.write(1, b"x" if libc.ptrace(SEIZE, int(sys.argv[1]), None, None) == 0 else b"?")
sys.stdin.read()
"""


def test_a_process_that_cannot_be_killed_does_not_stop_the_launcher(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The parent cannot reap a traced child that was killed before its tracer has: `end` gives it up, by name."""
    monkeypatch.setattr(children, "_DEATH_S", 0.2)
    heard, said = os.pipe()
    child = Child("worker 3", [sys.executable, "-c", TRACED], env=os.environ, stdout=said)
    os.close(said)
    with os.fdopen(heard, "rb") as lines:
        assert lines.read(1) == b"x"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", TRACER, str(child.pid)], stdin=pipe, stdout=pipe) as tracer:
        assert tracer.stdout is not None
        assert tracer.stdout.read(1) == b"x"
        with caplog.at_level(logging.ERROR):
            assert child.end() == -signal.SIGKILL
        assert child.exit_code() is None
    assert f"worker 3 (process {child.pid}) does not end" in caplog.text
    assert child.pid not in children.ALIVE
    assert child.wait(20) == -signal.SIGKILL
