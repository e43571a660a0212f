"""CUDA_VISIBLE_DEVICES, and which of the visible GPUs is a worker's own."""

from __future__ import annotations

import pytest

from dlrover_hooks.host.visible_gpus import own, visible

UUIDS = ("GPU-a1b2", "GPU-a1c3", "GPU-d4e5", "GPU-f6")


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (None, UUIDS),
        ("", ()),
        (" ", ()),
        ("0", ("GPU-a1b2",)),
        ("2,0", ("GPU-d4e5", "GPU-a1b2")),
        (" 1 , 3 ", ("GPU-a1c3", "GPU-f6")),
        ("0,1,2,3", UUIDS),
        ("GPU-d4e5", ("GPU-d4e5",)),
        ("GPU-d", ("GPU-d4e5",)),
        ("GPU-f6,GPU-a1b", ("GPU-f6", "GPU-a1b2")),
        ("2,GPU-f", ("GPU-d4e5", "GPU-f6")),
        ("MIG-11-22,MIG-GPU-a1b2/1/0", ("MIG-11-22", "MIG-GPU-a1b2/1/0")),
        # what is not there hides what follows
        ("-1", ()),
        ("NoDevFiles", ()),
        ("1,-1,2", ("GPU-a1c3",)),
        ("1,4,2", ("GPU-a1c3",)),
        ("1,,2", ("GPU-a1c3",)),
        ("GPU-a1", ()),  # two begin so
        ("GPU-", ()),
        ("gpu-d4e5", ()),
        ("²", ()),
        # a device twice hides all
        ("0,0", ()),
        ("0,1,GPU-a1b2", ()),
    ],
)
def test_what_cuda_shows(names: str | None, shown: tuple[str, ...]) -> None:
    assert visible(names, UUIDS) == shown


def test_no_gpu_is_shown_where_there_is_none() -> None:
    assert visible(None, ()) == ()
    assert visible("0", ()) == ()


@pytest.mark.parametrize(
    ("shown", "local_rank", "device"),
    [
        (UUIDS, 0, "GPU-a1b2"),
        (UUIDS, 3, "GPU-f6"),
        (("GPU-f6",), 3, "GPU-f6"),  # each worker is shown its own
        (("GPU-d4e5", "GPU-f6"), 1, "GPU-f6"),
        ((), 0, None),
        ((), 5, None),
    ],
)
def test_the_gpu_of_a_worker(shown: tuple[str, ...], local_rank: int, device: str | None) -> None:
    assert own(shown, local_rank) == device
