"""`sft`: a job of two roles, ready to be submitted, or to be changed first."""

import os
from pathlib import Path

from dlrover_hooks.job import DLJobBuilder


def sft(
    *,
    model: str = "models:GPT",
    dataset: str = "dataset:dataset",
    workers: int = 2,
    epochs: int = 2,
    save_to: str | None = None,
    cpu: float = 0.25,
) -> DLJobBuilder:
    """`workers` workers train `model` on the samples that `dataset` serves.

    Args:
        model: a class without arguments whose forward returns the loss, see models.py.
        dataset: a function that serves `count()` and `tokens(positions)`, see dataset.py.
        workers: number of workers of the role `trainer`. If one is lost, the others keep their processes.
        epochs: how often each sample is used.
        save_to: URL for durable checkpoints; None keeps them in memory.
        cpu: cores for each worker.

    Modules are imported from this folder or PYTHONPATH.
    """
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent.absolute()), os.environ.get("PYTHONPATH")]))
    job = DLJobBuilder("sft").config(model=model, epochs=epochs, save_to=save_to)
    job.env(PYTHONPATH=path, OMP_NUM_THREADS="1")
    job.role("dataset").run(dataset).resource(cpu=cpu).not_driver().restarts(on_failure="replace")
    job.role("trainer").train("trainer:trainer").workers(workers).resource(cpu=cpu).restarts(on_failure="rejoin")
    return job
