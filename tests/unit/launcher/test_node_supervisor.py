"""Parts of the launcher that start no process."""

from __future__ import annotations

import os

import pytest

from dlrover_hooks.launcher.node_supervisor import _local_folder


@pytest.mark.parametrize(
    ("save_to", "folder"),
    [
        (None, os.getcwd()),
        ("", os.getcwd()),
        ("s3://bucket/run", os.getcwd()),
        ("ckpt", "ckpt"),
        ("/data/ckpt", "/data/ckpt"),
        ("file:///data/ckpt", "/data/ckpt"),
    ],
)
def test_the_file_system_that_is_reported(save_to: str | None, folder: str) -> None:
    assert _local_folder(save_to) == folder
