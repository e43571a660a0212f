"""A slow rank runs fewer of the micro-batches of each step."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.launched import Launched

COMMON = """
    from pathlib import Path

    import torch
    import torch.distributed as dist
    from dlrover_hooks import AsyncCheckpointer, elastic_loader, elastic_run
    from dlrover_hooks.worker import step_clock
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    step_clock.WINDOW_S = 0.5
    STEPS, AFTER = int(os.environ["STEPS"]), 40  # of a slow job: so many steps after the change

    def record(step, loader, samples):
        shares = ",".join(map(str, loader.sampler.plan.shares))
        fd = os.open("batches", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        line = f"{step} {shares} {time.time()} {dist.get_rank()} " + " ".join(map(str, samples.tolist()))
        os.write(fd, (line + chr(10)).encode())
        os.close(fd)

    def last_step(step, loader):
        return step + AFTER if len(set(loader.sampler.plan.shares)) > 1 else STEPS

    def write_weights(net):
        if dist.get_rank() == 0:
            Path("weights").write_text(json.dumps(torch.cat([one.flatten() for one in net.parameters()]).tolist()))

    def work():
        seconds = float(os.environ["SLOW_S"]) if dist.get_rank() == 1 else float(os.environ["FAST_S"])
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            pass

    class Samples(Dataset):
        def __len__(self):
            return 600

        def __getitem__(self, index):
            row = torch.randn(4, generator=torch.Generator().manual_seed(index))
            return {"ids": index, "batch": row.double()}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(5)
            self.one = nn.Linear(4, 1, dtype=torch.float64)

        def forward(self, ids, batch):
            work()
            return {"loss": self.one(batch).square().mean()}
"""

LOOP = """
    from torch.nn.parallel import DistributedDataParallel

    def main():
        dist.init_process_group("gloo")
        net = DistributedDataParallel(Model())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        batches = DataLoader(Samples(), batch_size=2, shuffle=True)
        loader = elastic_loader(batches, optimizer=optimizer, global_batch_size=16)
        with AsyncCheckpointer(model=net, optimizer=optimizer, loader=loader) as saves:
            last = last_step(saves.step, loader)
            for epoch in loader.epochs(1 << 30):
                for batch in loader:
                    record(saves.step, loader, batch["ids"])
                    optimizer.zero_grad()
                    net(**batch)["loss"].backward()
                    optimizer.step()
                    if saves.step == last:
                        break
                if saves.step == last:
                    break
        write_weights(net)

    RUN
"""

LIGHTNING = """
    from lightning.pytorch import Callback, LightningModule, Trainer
    from dlrover_hooks.integrations.lightning import ElasticCallback

    class Net(LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.last = Model(), None

        def training_step(self, batch, number):
            record(self.global_step, self.trainer.train_dataloader, batch["ids"])
            return self.model(**batch)

        def on_train_start(self):
            self.last = last_step(self.global_step, self.trainer.train_dataloader)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    class Ends(Callback):
        def on_train_batch_end(self, trainer, net, outputs, batch, number):
            assert outputs["loss"].ndim == 0, "of a ghost, too"
            trainer.should_stop = trainer.global_step == net.last

    def main():
        net = Net()
        trainer = Trainer(
            accelerator="cpu", strategy="ddp", devices=2, max_epochs=-1, accumulate_grad_batches=4, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, callbacks=[ElasticCallback(), Ends()],
        )
        trainer.fit(net, DataLoader(Samples(), batch_size=2, shuffle=True))
        write_weights(net.model)

    RUN
"""

TRANSFORMERS = """
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from dlrover_hooks.integrations.transformers import elastic_trainer

    class Told(Trainer):
        def training_step(self, model, inputs, *more):
            record(self.state.global_step, self.elastic._loader, inputs["ids"])
            return super().training_step(model, inputs, *more)

    class Ends(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            self.last = None

        def on_step_end(self, args, state, control, **_):
            if self.last is None:
                self.last = last_step(state.global_step - 1, self.trainer.elastic._loader)
            control.should_training_stop = state.global_step == self.last

    def main():
        arguments = TrainingArguments(
            "out", per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=1 << 20, use_cpu=True,
            report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True, optim="sgd",
            remove_unused_columns=False, learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=0.0,
        )
        net, ends = Model(), Ends()
        trainer = elastic_trainer(Told(net, arguments, train_dataset=Samples(), callbacks=[ends]))
        ends.trainer = trainer
        trainer.train()
        write_weights(net)

    RUN
"""


class Batch(NamedTuple):
    step: int
    shares: tuple[int, ...]
    at: float
    rank: int
    samples: tuple[int, ...]


def shared(folder: Path) -> list[Batch]:
    lines = [line.split() for line in (folder / "batches").read_text().splitlines()]
    return [
        Batch(int(step), tuple(map(int, shares.split(","))), float(at), int(rank), tuple(map(int, samples)))
        for step, shares, at, rank, *samples in lines
    ]


def samples_of_steps(batches: list[Batch]) -> dict[int, list[int]]:
    """The samples that the last attempt at each step trained on."""
    found: dict[int, tuple[tuple[int, ...], list[int]]] = {}
    for one in batches:
        shares, samples = found.setdefault(one.step, (one.shares, []))
        if shares != one.shares:  # it was interrupted, and is made again with other shares
            found[one.step] = one.shares, list(one.samples)
        else:
            samples += one.samples
    return {step: sorted(samples) for step, (_, samples) in found.items()}


@pytest.mark.deep
@pytest.mark.timeout(290)
@pytest.mark.parametrize(
    ("script", "run"),
    [
        (LOOP, "elastic_run(main)()"),
        (LOOP, "main()"),
        (LIGHTNING, "main()"),
        (LIGHTNING.replace("ElasticCallback()", 'ElasticCallback(recover="restart")'), "main()"),
        (TRANSFORMERS, "main()"),
    ],
    ids=["loop", "loop, restarted", "Lightning", "Lightning, restarted", "Transformers"],
)
def test_a_slow_rank_gets_fewer_micro_batches(
    launch: Callable[..., Launched], tmp_path: Path, script: str, run: str, request: pytest.FixtureRequest
) -> None:
    """Each step trains on the same samples as in a job without a slow rank, and the final weights are equal."""
    two = ("--nproc-per-node", "2", "--max-restarts", "0", "--standby", "0")
    times = {"FAST_S": "0.01", "SLOW_S": "0.04"}
    whole = COMMON + script.replace("RUN", run)
    job = launch(whole, *two, STEPS="-1", DLROVER_HOOKS_ON_STRAGGLER="rebalance", **times)
    code, said = job.end(150.0)
    assert code == 0, said
    reason = r"rank 1 \(.*\) is slow: its compute takes .* A micro-batch takes it \S+ times as long as the others"
    done = r"it runs [123] of 8 in a step now, was 4 \(1 of 3 actions because of slow ranks\)"
    assert re.search(f"{reason}: {done}", said), said
    batches = shared(tmp_path)
    uneven = batches[-1].shares
    assert (sum(uneven), uneven[1] < 4, batches[0].shares) == (8, True, (4, 4))
    if "restarted" not in request.node.callspec.id:
        assert "recovered in round 2 as rank 0 of 2" in said
        assert said.count(" has pid ") == 2, "no process was replaced"
    slow_weights = json.loads((tmp_path / "weights").read_text())
    for name in ("batches", "weights"):
        (tmp_path / name).unlink()
    steps = str(max(one.step for one in batches) + 1)
    calm = launch(COMMON + script.replace("RUN", "main()"), *two, STEPS=steps, SLOW_S="0", FAST_S="0")
    code, said = calm.end(120.0)
    assert code == 0, said
    assert samples_of_steps(batches) == samples_of_steps(shared(tmp_path))
    assert json.loads((tmp_path / "weights").read_text()) == pytest.approx(slow_weights, rel=1e-9)


@pytest.mark.deep
@pytest.mark.timeout(180)
def test_nothing_is_done_if_a_training_step_makes_collective_calls(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    """Such as a log that is reduced over the ranks: they would wait for a micro-batch that another rank leaves out."""
    calls = 'self.log("rank", float(self.global_rank), sync_dist=True)'
    script = LIGHTNING.replace("return self.model(**batch)", f"{calls}\n            return self.model(**batch)")
    script = script.replace("accumulate_grad_batches=4", "accumulate_grad_batches=2").replace("RUN", "main()")
    two = ("--nproc-per-node", "2", "--max-restarts", "0", "--standby", "0")
    times = {"STEPS": "-1", "FAST_S": "0.005", "SLOW_S": "0.04"}
    job = launch(COMMON + script, *two, DLROVER_HOOKS_ON_STRAGGLER="rebalance", **times)
    assert job.says("Nothing is done: its ranks cannot run different numbers of micro-batches", 90.0)
    job.process.send_signal(signal.SIGINT)
    code, said = job.end(60.0)
    assert code == 130, said
    assert {one.shares for one in shared(tmp_path)} == {(2, 2)}
