"""Tensors of a CUDA device into a slot by its copy engine, on a stream of their own; the CPU waits for nothing.

The slot's memory is registered with CUDA once, so that copies into it are asynchronous. Only used where tensors lie on
a device.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable

import torch

_log = logging.getLogger("dlrover_hooks")
Row = tuple[torch.Tensor, memoryview]
"""A contiguous tensor of a device, and its place in a slot."""


class SideStream:
    """One stream per device. On the training thread, but `finish`."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pinned: dict[int, bool] = {}
        """By address: was it registered?"""

    def pin(self, slot: memoryview) -> None:
        """Register the memory of a whole `slot` with CUDA, once. If that is refused, copies are synchronous."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(slot))
        if address not in self._pinned:
            code = int(torch.cuda.cudart().cudaHostRegister(address, len(slot), 0))  # pyright: ignore[reportOptionalMemberAccess]
            self._pinned[address] = not code
            if code:
                _log.warning("CUDA does not pin a slot's %d bytes (error %d): saves hold up the step", len(slot), code)

    def unpin(self) -> None:
        """Before the memory is unmapped."""
        for address in (address for address, registered in self._pinned.items() if registered):
            code = int(torch.cuda.cudart().cudaHostUnregister(address))  # pyright: ignore[reportOptionalMemberAccess]
            if code:
                _log.warning("CUDA does not let a slot's memory go (error %d)", code)
        self._pinned.clear()

    def copy(self, rows: Iterable[Row]) -> list[torch.cuda.Event]:
        """Begin to copy `rows`, behind what their devices were given so far. One event per device, set at the end."""
        used: set[torch.device] = set()
        for tensor, place in rows:
            if tensor.device not in used:
                used.add(tensor.device)
                self._stream(tensor.device).wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(self._stream(tensor.device)):
                flat = torch.frombuffer(place, dtype=torch.uint8).view(tensor.dtype)
                flat.view(tensor.shape).copy_(tensor.detach(), non_blocking=True)
            tensor.record_stream(self._stream(tensor.device))  # its memory is not given away before
        return [self._stream(device).record_event(torch.cuda.Event()) for device in used]  # pyright: ignore[reportReturnType]

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


def gate(events: Iterable[torch.cuda.Event]) -> None:
    """What the devices are given from here on waits for `events`; the CPU does not."""
    for event in events:
        torch.cuda.current_stream(event.device).wait_event(event)


def finish(events: Iterable[torch.cuda.Event]) -> None:
    """Wait for `events`. Any thread."""
    for event in events:
        event.synchronize()


def capturing() -> bool:
    """Is what this thread gives its device now put into a CUDA graph instead?"""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
