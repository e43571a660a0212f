"""`torchrun --rdzv-backend=dlrover`: the handler that torch finds through the entry point group `torchrun.handlers`.

torch calls `get_handler` in every process that imports its rendezvous package, during that import. This module
therefore imports and does nothing until torchrun requests a rendezvous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

BACKEND = "dlrover"


def get_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """A function that makes a rendezvous from torchrun's parameters."""
    return _create


def _create(params: RendezvousParameters) -> RendezvousHandler:
    from dlrover_hooks.torchrun.rendezvous_handler import Rendezvous

    return Rendezvous(params)
