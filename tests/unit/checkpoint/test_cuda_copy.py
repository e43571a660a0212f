"""Slots are registered with CUDA. No GPU is needed: what is asked of CUDA is written down instead."""

from __future__ import annotations

import pytest
import torch

from dlrover_hooks.checkpoint.save.cuda_copy import SideStream


class Cudart:
    """Answers with an error code, and remembers."""

    def __init__(self, code: int) -> None:
        self.code, self.registered, self.let_go = code, list[int](), 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        del address, flags
        self.registered.append(nbytes)
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del address
        self.let_go += 1
        return 0


@pytest.mark.parametrize("code", [0, 2])
def test_a_slot_is_registered_once_and_a_refusal_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    cudart = Cudart(code)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    side, slot = SideStream(), memoryview(bytearray(4096))
    for _ in range(3):
        side.pin(slot)
    side.unpin()
    assert cudart.registered == [4096]
    assert cudart.let_go == (not code)
    assert ("does not pin" in caplog.text) == bool(code)
