"""One rank that saves by `save_state`: `python -m ... FOLDER JOB`. Prints what it was when it saved."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from accelerate import Accelerator

from dlrover_hooks.integrations.accelerate import ElasticAccelerator
from tests.contracts.trial import Given, Setup, loss_of


def main() -> None:
    folder, job = sys.argv[1:]
    made = Setup(Given(job=job, samples=24, noise=False))
    accelerator: Any = ElasticAccelerator(Accelerator(cpu=True), job=job)
    model, optimizer, loader = accelerator.prepare(made.net, made.optimizer, made.train)
    saved: dict[str, Any] = {}
    for number, batch in enumerate(loader, 1):
        accelerator.backward(loss_of(model, *batch))
        optimizer.step()
        optimizer.zero_grad()
        if number == 3:
            saved = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
            saved["random"] = torch.get_rng_state().tolist()
            accelerator.save_state(folder)
            torch.rand(1)
    accelerator.wait_for_saves()
    sys.stdout.write(json.dumps({"rank": accelerator.process_index} | saved) + "\n")
    accelerator.end_training()


if __name__ == "__main__":
    main()
