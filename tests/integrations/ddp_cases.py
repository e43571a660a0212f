"""Not a test: cases run by W gloo processes, started by `test_ddp_exactness.py`.

Usage: ddp_cases.py CASE W; prints one JSON line.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from dlrover_hooks.data.loader import ElasticLoader, elastic_loader
from dlrover_hooks.errors import UsageError
from dlrover_hooks.pytorch import ddp_exactness as ddp_module
from dlrover_hooks.pytorch.ddp_exactness import BucketOrder, weigh_gradients
from dlrover_hooks.pytorch.even_batches import EvenLoader, TokenMean
from dlrover_hooks.worker import surviving_process as regroup

Tensors = list[torch.Tensor]


def weights(world: int) -> Any:
    """Largest relative error of the DDP gradient against one process, per (n, batch, G), over the steps of an epoch."""
    # N=5 uneven; tails: uneven shares, fewer samples than ranks (ghosts), even m; then unequal micro-batches
    sizes = ((46, 4, 20), (41, 4, 20), (42, 4, 12))
    found = {f"{n},{b},{G}": _worst_error(n, b, G, scaled=False) for n, b, G in sizes}
    return found | {f"scaled={scaled}": _worst_error(48, 3, 30, scaled=scaled) for scaled in (True, False)}


def _worst_error(n: int, b: int, G: int, *, scaled: bool) -> float:
    torch.manual_seed(0)
    inputs = torch.randn(n, 6, dtype=torch.float64)
    targets = torch.randn(n, 1, dtype=torch.float64)
    data = torch.utils.data.TensorDataset(inputs, targets)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    loader = elastic_loader(torch.utils.data.DataLoader(data, b, shuffle=True), global_batch_size=G, seed=3)
    alone, ddp = copy.deepcopy(net), DDP(net)
    assert weigh_gradients(ddp, lambda: loader.weight)
    errors, q = [], 0
    for step_loss in _steps(loader, ddp, scaled):
        ids = loader.sampler.order.indices(0, torch.arange(q, min(q + G, n)).numpy())
        q += G
        alone.zero_grad()
        torch.nn.functional.mse_loss(alone(inputs[ids]), targets[ids]).backward()
        ours, exact = _flat(ddp), _flat(alone)
        errors.append(float((ours - exact).norm() / exact.norm()))
        ddp.zero_grad()
        assert step_loss
    assert q >= n
    return max(errors)


def _steps(loader: ElasticLoader, ddp: DDP, scaled: bool) -> Any:
    """A hand-written accumulating loop: yields when a step's gradient is reduced."""
    m, done, batches = loader.sampler.plan.micro_batches, 0, 0
    for x, y in loader:
        batches += 1
        with contextlib.nullcontext() if loader.sampler.step_ends else ddp.no_sync():
            scale = loader.loss_scale if scaled else 1.0
            (torch.nn.functional.mse_loss(ddp(x), y) * scale / m).backward()
        if loader.sampler.step_ends:
            done += 1
            loader.sampler.mark()
            yield done
    assert batches == len(loader)


def scaled(world: int) -> Any:
    """The same error where the loss is weighed: FSDP2 and plain DDP, a mean over samples and one over tokens."""
    sizes = ((46, 4, 20), (41, 4, 20), (42, 4, 12))
    return {
        f"{kind} {by} {n},{b},{G}": _worst_scaled(kind, by, n, b, G)
        for kind in ("fsdp", "ddp", "hooked")
        for by in ("samples", "tokens")
        for n, b, G in sizes
        if (kind, by) != ("hooked", "samples")  # that is `weights`
    }


def _worst_scaled(kind: str, by: str, n: int, b: int, G: int) -> float:
    torch.manual_seed(0)
    inputs, lengths = torch.randn(n, 6, dtype=torch.float64), torch.randint(1, 9, (n,))
    data = torch.utils.data.TensorDataset(inputs, lengths)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    alone = copy.deepcopy(net)
    loader = EvenLoader(elastic_loader(torch.utils.data.DataLoader(data, b, shuffle=True), global_batch_size=G, seed=3))
    model: Any = (
        fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),))) if kind == "fsdp" else DDP(net)
    )
    if kind == "hooked":
        assert weigh_gradients(model, lambda: loader.weight)
    mean, errors, q = TokenMean(model, loader), [], 0
    for x, tokens in loader:
        if kind == "fsdp":
            model.set_requires_gradient_sync(loader.step_ends)
        with contextlib.nullcontext() if kind == "fsdp" or loader.step_ends else model.no_sync():
            each = model(x).square().squeeze(1)
            loss = each.mean() * loader.mean_scale if by == "samples" else mean.add((each * tokens).sum(), tokens.sum())
            loss.backward()
        if not loader.step_ends:
            continue
        ids = loader.sampler.order.indices(0, torch.arange(q, min(q + G, n)).numpy())
        q += G
        exact = alone(inputs[ids]).square().squeeze(1)
        (exact.mean() if by == "samples" else (exact * lengths[ids]).sum() / lengths[ids].sum()).backward()
        if by == "tokens":
            assert mean.divide() == int(lengths[ids].sum())
        found = [p.grad.full_tensor() if kind == "fsdp" else p.grad for p in model.parameters()]
        ours, right = torch.cat([grad.flatten() for grad in found]), _flat(alone)
        errors.append(float((ours - right).norm() / right.norm()))
        model.zero_grad()
        alone.zero_grad()
        loader.sampler.mark()
    assert q >= n
    return max(errors)


def _flat(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


class Crossed(torch.nn.Module):
    """Parameters are used in an order unlike that of their definition, and have a buffer and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(96, 96) for _ in range(6))
        self.norm = torch.nn.BatchNorm1d(96)
        self.drop = torch.nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, turn: int = 1) -> torch.Tensor:
        for i in (3, 0, 5, 1, 4, 2)[::turn]:
            x = self.drop(torch.tanh(self.layers[i](x)))
        return self.norm(x)


def buckets(world: int) -> Any:
    """Parameters after 4 steps: undisturbed, restarted at every step with and without replay."""
    rank = dist.get_rank()
    whole = _run(0, 4, None, (), rank, lambda order: order.record())
    state, names = whole["states"], whole["names"]
    found: dict[str, Any] = {"names": names, "silent": True}
    for k in (1, 2, 3):
        with_replay = _run(k, 4, state[k], names, rank, lambda order: _silent(order, names, found))
        without = _run(k, 4, state[k], names, rank, lambda order: None)
        found[f"replayed{k}"] = _same(with_replay["last"], whole["last"])
        found[f"plain{k}"] = _same(without["last"], whole["last"])
    found["not_reverse_order"] = names != [n for n, _ in reversed(list(Crossed().named_parameters()))]
    return found


def _run(k: int, end: int, state: Any, names: Any, rank: int, prepare: Callable[[BucketOrder], Any]) -> dict[str, Any]:
    torch.manual_seed(1)
    net = Crossed()
    if state is not None:
        net.load_state_dict(state["model"])
    ddp = DDP(net, bucket_cap_mb=0.08, gradient_as_bucket_view=rank < 0)
    weigh_gradients(ddp, lambda: 1 / 3)
    torch.manual_seed(100 + rank)
    if state is not None:
        torch.set_rng_state(state["rng"])
    order = BucketOrder(ddp)
    outcome = prepare(order)
    assert outcome is None or outcome.done, outcome
    optimizer = torch.optim.SGD(ddp.parameters(), 0.5)
    states = {}
    for step in range(k, end):
        states[step] = {"model": copy.deepcopy(net.state_dict()), "rng": torch.get_rng_state()}
        x = torch.randn(8, 96, generator=torch.Generator().manual_seed(1000 * step + rank))
        if step == 0:
            with ddp.no_sync():  # accumulation: only the synchronised backward counts
                ddp(x, -1).square().mean().backward()
        ddp(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    last = [t.clone() for t in net.state_dict().values()]
    return {"states": states, "last": last, "names": list(order.names)}


def _silent(order: BucketOrder, names: list[str], found: dict[str, Any]) -> Any:
    ddp = order.ddp
    before, rng = [t.clone() for t in ddp.state_dict().values()], torch.get_rng_state()
    outcome = order.replay(names)
    found["silent"] &= _same(before, list(ddp.state_dict().values())) and bool((rng == torch.get_rng_state()).all())
    found["silent"] &= all(p.grad is None for p in ddp.parameters())
    return outcome


def _same(ours: Tensors, theirs: Tensors) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def skipped(world: int) -> Any:
    """Why replay is not done, for the DDPs and models it must leave alone."""
    names = ["weight", "bias"]
    hooked = torch.nn.Linear(2, 2)
    hooked.weight.register_hook(lambda grad: grad)
    foreign = DDP(torch.nn.Linear(2, 2))
    foreign.register_comm_hook(None, _foreign)
    found = {
        "unused": BucketOrder(DDP(torch.nn.Linear(2, 2), find_unused_parameters=True)).replay(names),
        "static": BucketOrder(DDP(torch.nn.Linear(2, 2), static_graph=True)).replay(names),
        "hooked": BucketOrder(DDP(hooked)).replay(names),
        "foreign": BucketOrder(foreign).replay(names),
        "other": BucketOrder(DDP(torch.nn.Linear(2, 2))).replay(["weight"]),
        "fits": BucketOrder(DDP(torch.nn.Linear(2, 2))).replay(names),
    }
    found["second hook"] = weigh_gradients(foreign, lambda: 1.0)
    return {key: [outcome.done, outcome.reason] for key, outcome in found.items()}


def lazily(world: int) -> Any:
    """Three equal DDPs: one has the hook from the beginning, the gradients of one are views. In one step rank 0 has
    another weight than the others.
    """
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    late, early, view = DDP(net), DDP(copy.deepcopy(net)), DDP(copy.deepcopy(net), gradient_as_bucket_view=True)
    weight = [1 / world]
    early.register_comm_hook(None, ddp_module._weighted_sum(early.process_group, lambda: weight[0]))
    assert weigh_gradients(late, lambda: weight[0])
    assert weigh_gradients(view, lambda: weight[0])
    torch.manual_seed(dist.get_rank())
    equal, hooked = [], [len(late._comm_hooks)]
    for number in range(6):
        weight[0] = 0.7 if number == 3 and dist.get_rank() == 0 else 1 / world
        x = torch.randn(5, 6)
        for one in (late, early, view):
            one.zero_grad()
            one(x).square().mean().backward()
        equal.append(torch.equal(_flat(late), _flat(early)) and torch.equal(_flat(view), _flat(early)))
        hooked.append(len(late._comm_hooks))
    return {"equal": equal, "hooked": hooked, "twice": _hooked_later(world)}


class _Membership:
    """Notes when `regroup.binds` is called, in the place of an `elastic_run`'s."""

    ended, _here = False, True

    def __init__(self) -> None:
        self.draws, self.calls = self, list[str]()

    def ahead(self) -> None:
        self.calls.append("note")

    def replicate(self, ranks: int) -> None:
        self.calls.append(f"tell {ranks}")


def binding(world: int) -> Any:
    """What is called in each backward under `elastic_run`: as it is, in `no_sync`, with an uneven weight."""
    membership: Any = _Membership()
    regroup._active.append(membership)
    found: dict[str, Any] = {}
    weight = [1 / world]
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    for name, options in {"bare": {}, "unused": {"find_unused_parameters": True}}.items():
        model = DDP(copy.deepcopy(net), **options)
        assert weigh_gradients(model, lambda: weight[0])
        for number in range(4):
            weight[0] = 0.7 if number == 3 else 1 / world
            membership.calls.clear()
            with model.no_sync() if number == 1 else contextlib.nullcontext():
                model(torch.ones(5, 6)).square().mean().backward()
            found[f"{name} {number}"] = [*membership.calls]
        found[f"{name} hooks"] = len(model._comm_hooks)
    regroup._active.remove(membership)
    return found


def _hooked_later(world: int) -> str:
    model = DDP(torch.nn.Linear(2, 2))
    weigh_gradients(model, lambda: 1 / world)
    model.register_comm_hook(None, _foreign)
    try:
        model(torch.ones(1, 2))
    except UsageError as error:
        return str(error)
    return ""


def _foreign(state: object, bucket: Any) -> Any:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda reduced: reduced.value()[0])


_foreign.__annotations__ = {}  # DDP compares them with classes


def _worker(rank: int, world: int, case: str, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    found = globals()[case](world)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, found)
    if rank == 0:
        print(json.dumps(everyone), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.pop("WORLD_SIZE", None)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _worker, (int(sys.argv[2]), sys.argv[1], f"{folder}/store"), int(sys.argv[2]), start_method="fork"
        )
