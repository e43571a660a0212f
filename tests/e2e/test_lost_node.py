"""A whole node is lost, and another one comes: the run ends as one that nobody touched."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.launched import Launched, all_gone

STEPS, EPOCHS, LOST_AT = 12, 2, 6
SCRIPT = """
    import hashlib
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset
    from dlrover_hooks import AsyncCheckpointer, elastic_loader, elastic_run

    torch.set_num_threads(1)

    @elastic_run
    def train():
        dist.init_process_group()
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        model, data = DistributedDataParallel(net), TensorDataset(torch.randn(96, 4), torch.randn(96, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        loader = elastic_loader(DataLoader(data, batch_size=4, shuffle=True), optimizer=optimizer)
        with AsyncCheckpointer(model=model, optimizer=optimizer, loader=loader, save_every=1000) as checkpoints:
            for _ in loader.epochs(EPOCHS):
                for x, y in loader:
                    nn.functional.mse_loss(model(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    note(step=checkpoints.step, node=os.environ["DLROVER_HOOKS_NODE"])
                    if (os.environ["DLROVER_HOOKS_NODE"], checkpoints.step) == ("b", LOST_AT):
                        threading.Event().wait(600)
        end = hashlib.sha256(b"".join(one.numpy().tobytes() for one in net.state_dict().values())).hexdigest()
        if dist.get_rank() == 0:
            note(end=end, step=checkpoints.step)
        dist.destroy_process_group()

    train()
    """.replace("EPOCHS", str(EPOCHS)).replace("LOST_AT", str(LOST_AT))


def ends(run: Launched) -> list[tuple[str, int]]:
    return [(line["end"], line["step"]) for line in run.read() if "end" in line]


@pytest.mark.requirement("ED-2", "ED-7")
@pytest.mark.deep
def test_another_node_in_its_place_makes_it_the_undisturbed_run(
    launch: Callable[..., Launched], node: Callable[..., Launched]
) -> None:
    """With one rank of two, with dropout and batch norm; the undisturbed run had one node. No step is lost."""
    calm = launch(SCRIPT, "-n", "2", "--standby", "0")
    code, said = calm.end(timeout_s=120)
    assert code == 0, said
    (undisturbed,) = ends(calm)
    calm.lives.write_text("")
    flags = ("--nnodes", "2", "--standby", "0")
    a = node("a", SCRIPT, *flags)
    a.child("dlrover_hooks.master")
    b = node("b", SCRIPT, *flags)
    at = {"node": "b", "step": LOST_AT}
    lives = a.wait_for(lambda lives: any(life.items() >= at.items() for life in lives), timeout_s=120)
    lost = {life["pid"] for life in lives if life["node"] == "b"}
    b.process.kill()
    b.end()
    assert all_gone(list(lost))
    c = node("c", SCRIPT, *flags)
    for one in (a, c):
        code, said = one.end(timeout_s=120)
        assert code == 0, said
    assert len({life["pid"] for life in a.read() if life.get("node") == "a"}) == 1, "it keeps its process"
    assert ends(a) == [undisturbed]
    assert undisturbed[1] == STEPS * EPOCHS
