"""The master's storage work: manifests, the end of a run, and the claims that keep other masters off a URL."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from dlrover_hooks.errors import HooksError
from dlrover_hooks.master.core.effects import CommitGeneration, WriteFinished
from dlrover_hooks.master.core.events import CommitFailed, Committed, FinishWritten
from dlrover_hooks.master.manifest_storage import HeldUrl, Storage, release
from dlrover_hooks.protocol import Message

log = logging.getLogger("dlrover_hooks.master")


class CheckpointCommits:
    """Storage work, one task at a time per job. Call it from the event loop; blocking calls run in a few threads.

    `owner` is that of the claims. `inform` is called on the loop with the events that report the outcome. `writes`
    returns whether a job needs its claims. `wall` dates manifests.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        owner: str,
        inform: Callable[[Message], None],
        writes: Callable[[str], bool],
        wall: Callable[[], float],
    ) -> None:
        self._storage, self._owner, self._inform, self._writes, self._wall = storage, owner, inform, writes, wall
        self._claims: dict[tuple[str, str], HeldUrl] = {}
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        """By job, while a task holds the lock or waits for it."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="dlrover-hooks-storage")

    def commit(self, effect: CommitGeneration) -> None:
        """Begin to commit a generation; `Committed` or `CommitFailed` follows."""
        self._spawn(self._commit(effect))

    def finish(self, effect: WriteFinished) -> None:
        """Begin to record the end of a run; `FinishWritten` follows, unless that fails."""
        self._spawn(self._finish(effect))

    def release(self, job: str) -> None:
        """Begin to release the job's claims: after its other storage work, and unless the job writes again by then."""
        self._spawn(self._release(job))

    def claim_again(self, job: str, url: str, options: dict[str, Any]) -> None:
        """Begin to take over the claim of an earlier process of this master."""
        self._spawn(self._claim_again(job, url, options))

    async def claim(self, job: str, url: str, options: dict[str, Any]) -> None:
        """Claim `url` before the job is recorded as saving there. Once per job and URL. Raises SaveToBusy."""
        if (job, url) in self._claims:
            return
        async with self._lock(job):
            if (job, url) not in self._claims:
                self._claims[job, url] = await self._run(self._storage.claim, url, options, job, self._owner)

    async def drain(self, patience_s: float) -> None:
        """Wait up to `patience_s` for the tasks under way, including those that start meanwhile."""
        until = asyncio.get_running_loop().time() + patience_s
        while self._tasks and (left_s := until - asyncio.get_running_loop().time()) > 0:
            await asyncio.wait(self._tasks, timeout=left_s)

    async def close(self) -> None:
        """Cancel the tasks still under way and release all claims."""
        for task in self._tasks:
            task.cancel()
        for hold in self._claims.values():
            await self._run(release, hold)
        self._claims.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _lock(self, job: str) -> asyncio.Lock:
        return self._locks.setdefault(job, asyncio.Lock())

    def _run(self, work: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _commit(self, effect: CommitGeneration) -> None:
        generation = effect.manifest.generation
        manifest = msgspec.structs.replace(effect.manifest, created_at=self._wall())
        async with self._lock(effect.job):
            try:
                await self._run(self._storage.commit, effect.url, effect.options, manifest, effect.keep)
            except Exception as error:  # whatever storage raised, the outcome must be journaled
                log.warning("job %s: %s is not committed: %s", effect.job, generation, error)
                self._inform(CommitFailed(job=effect.job, generation=generation, reason=str(error)))
            else:
                self._inform(Committed(job=effect.job, generation=generation))

    async def _finish(self, effect: WriteFinished) -> None:
        async with self._lock(effect.job):
            try:
                await self._run(self._storage.finish, effect.url, effect.options, effect.job, effect.run, effect.step)
            except Exception as error:  # the job is finished anyway; the master tries again after its next restart
                log.warning("job %s: its end could not be recorded at %s: %s", effect.job, effect.url, error)
            else:
                self._inform(FinishWritten(job=effect.job))

    async def _release(self, job: str) -> None:
        async with self._lock(job):
            for key in [key for key in self._claims if key[0] == job]:
                if not self._writes(job):
                    await self._run(release, self._claims.pop(key))

    async def _claim_again(self, job: str, url: str, options: dict[str, Any]) -> None:
        async with self._lock(job):
            try:
                self._claims[job, url] = await self._run(self._storage.claim, url, options, job, self._owner)
            except HooksError as error:
                log.warning("job %s: %s", job, error)
