"""`torchrun --rdzv-backend=dlrover`: what torch finds by the entry point group `torchrun.handlers`.

torch calls `get_handler` in every process that imports its rendezvous package, and while it is importing it: so this
module imports nothing, and does nothing, before torchrun asks for a rendezvous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

BACKEND = "dlrover"


def get_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What makes a rendezvous out of torchrun's parameters."""
    return _create


def _create(params: RendezvousParameters) -> RendezvousHandler:
    from dlrover_hooks.torchrun.rendezvous_handler import Rendezvous

    return Rendezvous(params)
