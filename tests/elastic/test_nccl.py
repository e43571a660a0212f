"""NCCL's groups are aborted with gloo's, and a new one can be made in the same process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dlrover_hooks.elastic.process_groups import Groups
from dlrover_hooks.host.ports import free_port

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_an_aborted_group_makes_way_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks need two devices; of one it can be seen that abort and a second life do not hang."""
    torch.cuda.set_device(0)
    for life in range(2):
        env = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        for name, value in env.items():
            monkeypatch.setenv(name, str(value))
        groups = Groups(lambda: None)
        with groups.watched():
            dist.init_process_group("nccl")
        total = torch.full((4,), float(life), device="cuda")
        dist.all_reduce(total)
        assert total.tolist() == [life] * 4
        groups.cut()
        groups.destroy()
        assert not dist.is_initialized()
