"""The last save of each launch is durable, and the next launch goes on there, however often it is launched.

Only the end of a launch makes anything durable here: in between storage has an hour.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.launched import Launched

TRAIN = """
    import torch
    from dlrover_hooks import AsyncCheckpointer, elastic_loader
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(net.parameters())
    data = torch.utils.data.TensorDataset(torch.arange(1e5).reshape(-1, 1))
    loader = elastic_loader(torch.utils.data.DataLoader(data, shuffle=True), optimizer=optimizer)
    with AsyncCheckpointer("saved", model=net, optimizer=optimizer, loader=loader, persist_every="1h", save_every=1):
        for _ in loader.epochs(1):
            for (inputs,) in loader:
                net(inputs).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                note(step=int(optimizer.state[net.weight]["step"]), launch=os.environ["LAUNCH"])
                threading.Event().wait(0.01)
    """
STEPS = 20


@pytest.mark.deep
@pytest.mark.parametrize(
    "ends",
    [(signal.SIGINT, signal.SIGKILL, signal.SIGINT), (signal.SIGINT, signal.SIGINT)],
    ids=["three", "two"],
)
def test_each_launch_goes_on_at_the_last_save_of_the_one_before(
    launch: Callable[..., Launched], tmp_path: Path, ends: tuple[signal.Signals, ...]
) -> None:
    """By Ctrl-C no step is lost; where the launcher is killed the keeper makes durable what is whole in memory."""
    job, saved = "", 0
    for number, end in enumerate(ends):
        run = launch(TRAIN, job=job, LAUNCH=str(number))
        job, this = run.job, str(number)
        run.wait_for(lambda lives, this=this: sum(one["launch"] == this for one in lives) >= STEPS)
        run.process.send_signal(end)
        code, errors = run.end()
        assert code == (130 if end is signal.SIGINT else -signal.SIGKILL), errors
        steps = [one["step"] for one in run.read() if one["launch"] == this]
        assert steps == list(range(saved + 1, saved + 1 + len(steps))), errors
        before, saved = saved, json.loads((tmp_path / "saved" / "latest.json").read_text())["generation"]["step"]
        assert before < saved <= steps[-1], errors
        if end is signal.SIGINT:
            assert saved == steps[-1], errors
            assert f"saved step {saved} at {tmp_path / 'saved'}" in errors
