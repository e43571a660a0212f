"""torch's key-value store of one round, provided by the master.

torchrun's agents use it to agree on the workers' ranks and to wait for each other at the end. Its keys exist as long as
the round. Waiting in a round that lost a member raises an error.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, Store  # pyright: ignore[reportPrivateImportUsage]

from dlrover_hooks import protocol as p
from dlrover_hooks.client import MasterClient
from dlrover_hooks.errors import MasterAway, MasterError

_POLL_S = 5.0
_CHANNEL = "store"


class MasterStore(Store):
    """A `torch.distributed.Store` whose every wait ends after `timeout`.

    Raises:
        DistStoreError: a key did not come in time, or its round is over.
        DistNetworkError: the master does not answer.
    """

    def __init__(self, client: MasterClient, job: str, round: int, timeout: timedelta = timedelta(minutes=5)) -> None:
        super().__init__()
        self._client, self._job, self._round = client, job, round
        self.set_timeout(timeout)

    # ---- one key ----------------------------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        self._change(p.KeyChange(p.Change.SET, key, _bytes(value)))

    def get(self, key: str) -> bytes:
        return self._await([key], self._timeout_s)[0]

    def add(self, key: str, value: int) -> int:
        return int(self._change(p.KeyChange(p.Change.ADD, key, b"%d" % value))[0])

    def append(self, key: str, value: str | bytes) -> None:
        self._change(p.KeyChange(p.Change.APPEND, key, _bytes(value)))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._change(p.KeyChange(p.Change.SWAP, key, _bytes(desired_value), _bytes(expected_value)))[0]

    def delete_key(self, key: str) -> bool:
        return bool(self._change(p.KeyChange(p.Change.DELETE, key))[0])

    # ---- several ----------------------------------------------------------------------------------------------------

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._await(keys, self._timeout_s)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        pairs = zip(keys, values, strict=True)
        self._change(*[p.KeyChange(p.Change.SET, key, _bytes(value)) for key, value in pairs])

    def check(self, keys: Sequence[str]) -> bool:
        return set(keys) <= set(self.list_keys())

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._await(keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def list_keys(self) -> list[str]:
        return list(self._call(p.ListKeys(self._job, self._client.incarnation, self._round)).names)

    def num_keys(self) -> int:
        return len(self.list_keys())

    # ---- required by torch's C++ code -------------------------------------------------------------------------------

    def has_extended_api(self) -> bool:
        """`append`, `multi_get` and `multi_set` are implemented."""
        return True

    def clone(self) -> MasterStore:
        return MasterStore(self._client, self._job, self._round, timedelta(seconds=self._timeout_s))

    deleteKey, getNumKeys, compareSet = delete_key, num_keys, compare_set

    # ---- within -----------------------------------------------------------------------------------------------------

    @property
    def _timeout_s(self) -> float:
        return self.timeout.total_seconds()  # pyright: ignore[reportAttributeAccessIssue]  # torch's own, see set_timeout

    def _change(self, *changes: p.KeyChange) -> tuple[bytes, ...]:
        return self._call(p.ChangeKeys(self._job, self._client.incarnation, self._round, changes)).values

    def _await(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        until = time.monotonic() + timeout_s
        while True:
            left = max(0.0, until - time.monotonic())
            request = p.AwaitKeys(
                self._job, self._client.incarnation, self._round, tuple(keys), timeout_s=min(_POLL_S, left)
            )
            values = self._call(request, max(1.0, left)).values
            if values is not None:
                return list(values)
            if left <= 0:
                raise DistStoreError(f"wait timeout after {timeout_s:g} s for {_named(keys)}")

    def _call(self, request: p.Message, patience_s: float | None = None) -> Any:
        with _as_torch_says():
            patience_s = self._timeout_s if patience_s is None else patience_s
            return self._client.call(request, channel=_CHANNEL, timeout_s=patience_s)


@contextlib.contextmanager
def _as_torch_says() -> Iterator[None]:
    """Raises torch's errors, which users of a store expect."""
    try:
        yield
    except MasterAway as away:
        raise DistNetworkError(str(away)) from away
    except MasterError as error:
        raise DistStoreError(str(error)) from error


def _named(keys: Sequence[str]) -> str:
    return ", ".join(keys[:8]) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "")


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
