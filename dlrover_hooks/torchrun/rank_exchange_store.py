"""How torchrun's agents agree on their workers' ranks, and the values they get if one of them dies meanwhile.

Each agent sets `torchelastic/role_info/NODE`; the first one reads all of them and sets
`torchelastic/assigned_ranks/NODE` for each (torch 2.13, `SimpleElasticAgent._assign_worker_ranks`). torch does not
retry there: an error ends the agent.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from torch.distributed import DistStoreError  # pyright: ignore[reportPrivateImportUsage]

from dlrover_hooks.client import MasterClient
from dlrover_hooks.errors import Stale
from dlrover_hooks.torchrun.round_store import MasterStore

_INFO, _ASSIGNED = "torchelastic/role_info/", "torchelastic/assigned_ranks/"


class RankStore(MasterStore):
    """The store of a round of `world_size` agents.

    If the round loses a member before the agreement is complete, each agent gets the ranks that it would have if all
    nodes had as many workers as its own. Workers that start with these ranks cannot connect. At its first check, 0.1 s
    later, the agent detects that the round is broken and restarts them in the next one.
    """

    def __init__(self, client: MasterClient, job: str, round: int, world_size: int) -> None:
        super().__init__(client, job, round)
        self._world_size = world_size
        self._own = b""

    def set(self, key: str, value: str | bytes) -> None:
        if key.startswith(_INFO):
            self._own = value if isinstance(value, bytes) else value.encode()
        try:
            super().set(key, value)
        except DistStoreError as error:
            self._raise_unless_broken(error, key)

    def get(self, key: str) -> bytes:
        try:
            return super().get(key)
        except DistStoreError as error:
            self._raise_unless_broken(error, key)
            return self._alike(int(key.removeprefix(_ASSIGNED))) if key.startswith(_ASSIGNED) else self._own

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        try:
            return super().multi_get(keys)
        except DistStoreError as error:
            self._raise_unless_broken(error, *keys)
            return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        try:
            super().multi_set(keys, values)
        except DistStoreError as error:
            self._raise_unless_broken(error, *keys)

    def _raise_unless_broken(self, error: DistStoreError, *keys: str) -> None:
        about_ranks = all(key.startswith((_INFO, _ASSIGNED)) for key in keys)
        if not (about_ranks and self._own and isinstance(error.__cause__, Stale)):
            raise error

    def _alike(self, node: int) -> bytes:
        """First rank and number of workers, for all workers and for the role."""
        workers = json.loads(self._own)["local_world_size"]
        return json.dumps([node * workers, self._world_size * workers] * 2).encode()
