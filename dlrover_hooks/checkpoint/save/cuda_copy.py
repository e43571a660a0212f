"""Copies CUDA tensors into a slot with the device's copy engine, on separate streams. The CPU does not wait.

The slot's memory is registered with CUDA once, so that copies into it are asynchronous. Used only for tensors on a
device.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable

import torch

_log = logging.getLogger("dlrover_hooks")
Row = tuple[torch.Tensor, memoryview]
"""A contiguous tensor on a device, and its place in a slot."""


class SideStream:
    """One stream per device. Training thread, except `finish`."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pinned: dict[int, bool] = {}
        """By address: whether it was registered."""

    def pin(self, slot: memoryview) -> None:
        """Register the memory of an entire `slot` with CUDA, once. If CUDA refuses, copies are synchronous."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(slot))
        if address not in self._pinned:
            code = int(torch.cuda.cudart().cudaHostRegister(address, len(slot), 0))  # pyright: ignore[reportOptionalMemberAccess]
            self._pinned[address] = not code
            if code:
                _log.warning("CUDA does not pin a slot's %d bytes (error %d): saves hold up the step", len(slot), code)

    def unpin(self) -> None:
        """Unregister all memory. Call it before the memory is unmapped."""
        for address in (address for address, registered in self._pinned.items() if registered):
            code = int(torch.cuda.cudart().cudaHostUnregister(address))  # pyright: ignore[reportOptionalMemberAccess]
            if code:
                _log.warning("CUDA does not let a slot's memory go (error %d)", code)
        self._pinned.clear()

    def copy(self, rows: Iterable[Row]) -> list[torch.cuda.Event]:
        """Begin to copy `rows`, after the work already queued on their devices. Returns one event per device."""
        used: set[torch.device] = set()
        for tensor, place in rows:
            if tensor.device not in used:
                used.add(tensor.device)
                self._stream(tensor.device).wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(self._stream(tensor.device)):
                flat = torch.frombuffer(place, dtype=torch.uint8).view(tensor.dtype)
                flat.view(tensor.shape).copy_(tensor.detach(), non_blocking=True)
            tensor.record_stream(self._stream(tensor.device))  # its memory is not reused before the copy ends
        return [self._stream(device).record_event(torch.cuda.Event()) for device in used]  # pyright: ignore[reportReturnType]

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


def gate(events: Iterable[torch.cuda.Event]) -> None:
    """Make the work queued on the devices from now on wait for `events`; the CPU does not wait."""
    for event in events:
        torch.cuda.current_stream(event.device).wait_event(event)


def finish(events: Iterable[torch.cuda.Event]) -> None:
    """Wait for `events`. Any thread."""
    for event in events:
        event.synchronize()


def capturing() -> bool:
    """Whether this thread's work for its device is being captured in a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
