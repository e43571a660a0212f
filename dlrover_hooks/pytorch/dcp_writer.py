"""torch.distributed.checkpoint for its existing users: a cheaper stager and a writer without pickle.

    stager = FlashStager()
    dcp.async_save(state, storage_writer=FlashWriter("s3://bucket/run", step=step), async_stager=stager)

It writes an ordinary generation: hashed safetensors shards with their offsets, and a MANIFEST last. Stock
`HuggingFaceStorageReader` and `safetensors` read the shards.
"""

from __future__ import annotations

import dataclasses
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

import dlrover_hooks.elastic.gloo_exit_wait  # noqa: F401  # a script's last save may be its end
from dlrover_hooks import config as settings
from dlrover_hooks.checkpoint.save.state_tree_copies import StateTreeCopies
from dlrover_hooks.checkpoint.state.pytree import flatten
from dlrover_hooks.checkpoint.state.safetensors_header import Inside, WholeTensor
from dlrover_hooks.checkpoint.state.safetensors_layout import TensorSpec, header_bytes, plan
from dlrover_hooks.checkpoint.storage import generations
from dlrover_hooks.checkpoint.tensors import torch_backend
from dlrover_hooks.errors import UnsupportedState, UsageError
from dlrover_hooks.protocol import Generation, Manifest, Message, ShardFile


class FlashStager(AsyncStager):
    """Stages with plain threads into reused memory; DTensors keep their layout.

    At most two copies: a third save waits until the first is written and its future's result is dropped. Call `close`
    after the last save. One thread.

    Raises:
        UnsupportedState: something in the state cannot be copied.
        CheckpointError: earlier saves are still being written after ten minutes.
    """

    _synchronize_after_execute = False  # what `stage` returns is complete

    def __init__(self) -> None:
        self._copies = StateTreeCopies()

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """An independent copy on the CPU."""
        return self._copies.take(state_dict)

    def close(self) -> None:
        """Free the memory."""
        self._copies.close()


class FlashWriter(StorageWriter):
    """Writes one generation, `step`, into the checkpoint tree at `url`. It exists once every rank's file does.

    Python values beside the tensors are kept as tagged JSON, see `saved_values`. If the step exists already, it is
    saved as a newer attempt.

    Args:
        url: folder or fsspec URL of the tree, the same for all steps.
        step: the optimizer step of the state.
        job: the job that the tree belongs to; None: the launcher's job, else that of the tree.
        keep: generations kept.
        storage_options: fsspec options.

    Errors reach the caller on every rank inside DCP's CheckpointException: StorageFailed, SaveToBusy for another job's
    tree, UnsupportedState for values that are no plain data and tensors that safetensors lacks.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        step: int,
        job: str | None = None,
        keep: int = 2,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._url, self._step, self._job = generations.absolute(os.fspath(url)), step, job
        self._keep, self._options = keep, dict(storage_options or {})
        self._order: _Order | None = None

    @property
    def folder(self) -> str | None:
        """Location of the written shards, for stock readers. Coordinator only."""
        return None if self._order is None else f"{self._url}/{generations.folder(self._order.generation)}"

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start over; `checkpoint_id` replaces the URL."""
        self._order = None
        if checkpoint_id is not None:
            self._url = generations.absolute(os.fspath(checkpoint_id))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuse a save that cannot give one generation."""
        if not kwargs.get("use_collectives", True) and dist.is_initialized() and dist.get_world_size() > 1:
            raise UsageError(
                "FlashWriter commits once all ranks have written", hint="leave use_collectives=False out of the save"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Coordinator: choose this generation's name."""
        given = settings.load(job=self._job)
        found = generations.scan(self._url, self._options, None).manifests
        job = found[0].job if found and not given.named else given.job
        generations.refuse_others(self._url, self._options, job)
        generation = _next(found, self._step)
        orders = [
            _Order(job=job, generation=generation, rank=rank, world_size=len(plans)) for rank in range(len(plans))
        ]
        self._order = orders[0]
        return [
            dataclasses.replace(one, storage_data=msgspec.to_builtins(order))
            for one, order in zip(plans, orders, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file."""
        order = msgspec.convert(plan.storage_data, _Order)
        if order.generation.step != self._step:
            raise UsageError(
                f"the plan is of step {order.generation.step}, the state of {self._step}",
                hint="FlashWriter needs a planner without enable_plan_caching",
            )
        shard = _Shard(order)
        for item in plan.items:
            shard.add(item, planner)
        pieces, nbytes = shard.image()
        where = (self._url, self._options, order.generation, order.rank, order.world_size)
        file = generations.write_shard(*where, pieces, nbytes, job=order.job)
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex(file.name), nbytes, msgspec.to_builtins(file))])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Coordinator: commit the generation once all files exist."""
        assert self._order is not None
        files = tuple(msgspec.convert(one.storage_data, ShardFile) for rank in results for one in rank)
        manifest = Manifest(self._order.job, self._order.generation, len(files), files, time.time())
        generations.commit(self._url, self._options, manifest, self._keep)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accepts any URL."""
        return True


class _Order(Message, frozen=True):
    """What one rank writes."""

    job: str
    generation: Generation
    rank: int
    world_size: int


class _Shard:
    """One rank's image under construction."""

    def __init__(self, order: _Order) -> None:
        self._order = order
        self._tensors: dict[str, torch.Tensor] = {}
        self._specs: list[TensorSpec] = []
        self._values: dict[str, msgspec.Raw] = {}

    def add(self, item: WriteItem, planner: Any) -> None:
        name = item.index.fqn
        if name in self._tensors or name in self._values:
            raise UsageError(f"{name} has several shards on rank {self._order.rank}", hint="use DTensor")
        if item.type is WriteItemType.BYTE_IO:
            flat = flatten(planner.lookup_object(item.index), where=name)
            if flat.tensors:
                raise UnsupportedState(f"{name} has tensors inside", hint="give them a name of their own in the state")
            self._values[name] = msgspec.Raw(flat.skeleton)
            return
        assert item.tensor_data is not None
        tensor, chunk = planner.resolve_data(item).detach().cpu().contiguous(), item.tensor_data.chunk
        tensor = tensor.resolve_conj().resolve_neg()
        (spec,) = torch_backend.specs({name: tensor})
        if item.type is WriteItemType.SHARD:
            dtype = spec.whole.dtype if spec.whole is not None else spec.dtype
            spec = spec._replace(whole=WholeTensor(tuple(item.tensor_data.size), dtype, sharded=True))
        more = (0,) * (len(spec.shape) - len(chunk.offsets))
        self._tensors[name] = tensor
        self._specs.append(spec._replace(offsets=(*chunk.offsets, *more)))

    def image(self) -> tuple[Iterator[memoryview], int]:
        """The bytes of the image, and their number."""
        order = self._order
        inside = Inside(order.generation, order.rank, order.world_size, self._values)
        layout = plan(self._specs, reserve=len(msgspec.json.encode(msgspec.json.encode(inside).decode())))
        header = header_bytes(layout, inside)
        tensors = (self._tensors[spec.name] for spec in layout.specs)
        return _chained(header, tensors), layout.total_bytes


def _chained(header: bytes, tensors: Iterator[torch.Tensor]) -> Iterator[memoryview]:
    yield memoryview(header)
    for tensor in tensors:
        if tensor.nbytes:
            flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
            yield memoryview(flat)


def _next(found: tuple[Manifest, ...], step: int) -> Generation:
    """The generation of `step` that is newer than all existing ones."""
    if not found:
        return Generation(0, step, uuid.uuid4().hex)
    newest = found[0].generation
    return Generation(newest.attempt + (step <= newest.step), step, newest.run)
