"""Errors as TensorFlow 2.21 raises them when a server is gone, and errors of the user's step that look like them."""

from __future__ import annotations

import pytest

from dlrover_hooks.ps.failure_kind import FailureKind, failure_kind, named_tasks

_PS = "/job:ps/replica:0/task:1"


@pytest.mark.parametrize(
    ("error", "text", "kind"),
    [
        ("UnavailableError", f"failed to connect to all addresses\nAdditional GRPC error from {_PS}", FailureKind.PS),
        ("UnavailableError", f"Socket closed ... from remote target {_PS}", FailureKind.PS),
        ("AbortedError", "Unable to find a context_id matching the specified one (123)", FailureKind.PS),
        ("CancelledError", "RecvFromRemoteAsync is cancelled.", FailureKind.PS),
        ("InvalidArgumentError", "Unable to find the relevant tensor remote_handle: remote context", FailureKind.PS),
        ("UnavailableError", "Connection reset by peer /job:worker/replica:0/task:0", FailureKind.WORKER),
        ("UnavailableError", "Connection reset by peer /job:worker/task:0 and /job:ps/task:0", FailureKind.PS),
        (
            "InternalError",
            "Unable to parse request\nAdditional GRPC error information from remote target /job:worker/task:1 while",
            FailureKind.WORKER,
        ),
        ("InternalError", "Blas GEMM launch failed on /job:worker/task:1", FailureKind.USER),
        ("InvalidArgumentError", f"Incompatible shapes: [2,3] vs. [4] on {_PS}", FailureKind.USER),
        (
            "InvalidArgumentError",
            "assertion failed: [mine]\nAdditional GRPC error information from remote target /job:worker/task:0",
            FailureKind.USER,
        ),
        ("NotFoundError", "data/part-3.bin; No such file or directory", FailureKind.USER),
        ("OutOfRangeError", "End of sequence", FailureKind.USER),
        ("ResourceExhaustedError", "failed to connect: OOM", FailureKind.USER),
    ],
)
def test_kinds(error: str, text: str, kind: FailureKind) -> None:
    assert failure_kind(error, text) is kind


def test_the_servers_that_a_message_names() -> None:
    assert named_tasks(f"from {_PS}, again {_PS} and /job:worker/task:0") == [("ps", 1), ("worker", 0)]
    assert named_tasks("nothing") == []
