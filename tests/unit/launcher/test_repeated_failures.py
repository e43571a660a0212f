"""Which failure is the script's own: one at a step that was no further than where it started, or twice the same one."""

from __future__ import annotations

import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.config import of_lost_peer
from dlrover_hooks.launcher.failures.verdict import USER_ERROR, RepeatedFailures, WorkerExit, judge
from dlrover_hooks.launcher.processes.worker_errors import WorkerError
from dlrover_hooks.launcher.warm.fork_server import opens_gpu


def view(step: int) -> p.JobView:
    return p.JobView(job="job", run="run", attempt=1, round=1, phase=p.Phase.BROKEN, step=step, begun_step=0)


def failure(code: int = 1, error: str = "ValueError: x", step: int = -1, name: str = "worker 0") -> WorkerExit:
    return WorkerExit(name, code, reported=WorkerError(error, "a.py:3, f", step=step))


@pytest.mark.parametrize(
    ("first", "then", "step", "same"),
    [
        (failure(), failure(), 5, True),
        (failure(name="worker 0"), failure(name="worker 1"), 5, True),  # ranks move with each round
        (failure(), failure(), 6, False),
        (failure(step=6), failure(step=6), 5, True),  # the heartbeat of the first one was a second old
        (failure(step=6), failure(step=7), 5, False),
        (failure(), failure(code=2), 5, False),
        (failure(), failure(error="ValueError: y"), 5, False),
        (failure(code=-9), failure(code=-9), 5, False),  # a signal may be the machine's
        (failure(code=p.AGAIN), failure(code=p.AGAIN), 5, False),
    ],
)
def test_the_same_failure_at_the_same_step(first: WorkerExit, then: WorkerExit, step: int, same: bool) -> None:
    repeats = RepeatedFailures()
    assert not repeats.seen(first, view(5))
    assert repeats.seen(then, view(step)) is same


def test_another_failure_in_between_begins_anew() -> None:
    repeats = RepeatedFailures()
    assert [repeats.seen(one, view(5)) for one in (failure(), failure(code=-9), failure())] == [False] * 3


def test_a_repeated_failure_is_not_tried_again() -> None:
    verdict = judge(failure(step=6), view(5), 4, node="n", failures=2, max_restarts=10, window_s=60, again=True)
    assert verdict.code == USER_ERROR
    assert "at step 6, the same failure as before: not restarted" in verdict.text
    assert judge(failure(step=6), view(5), 4, node="n", failures=2, max_restarts=10, window_s=60).code is None


class DistBackendError(RuntimeError):
    """As torch's."""

    __module__ = "torch.distributed"


@pytest.mark.parametrize(
    ("error", "echo"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1160"), True),
        (DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:3384, remote process exited"), True),
        (RuntimeError("CUDA out of memory"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_what_a_lost_peer_looks_like(error: Exception, echo: bool) -> None:
    assert of_lost_peer(error) is echo


@pytest.mark.parametrize(
    ("device", "context"),
    [
        ("/dev/nvidia-uvm", True),
        ("/dev/nvidia-uvm-tools", True),
        ("/dev/nvidiactl", False),
        ("/dev/nvidia0", False),
        ("/dev/null", False),
    ],
)
def test_a_handle_of_nvml_is_no_context(device: str, context: bool) -> None:
    """A standby server may have asked NVML how many devices there are; a CUDA context does not survive a fork."""
    assert opens_gpu(device) is context
