"""`ppo`: a job of four roles, ready to be submitted, or to be changed first."""

import os
from pathlib import Path

from dlrover_hooks.job import DLJobBuilder


def ppo(
    *,
    trainer: str = "roles:trainer",
    rollout: str = "roles:rollout",
    prompts: str = "environment:prompts",
    reward: str = "environment:reward",
    trainers: int = 2,
    rollouts: int = 2,
    cpu: float = 0.25,
) -> DLJobBuilder:
    """Trainers form a process group and keep their processes after a failure; the other roles serve calls.

    The job is done when its trainers are. Roles are imported from this folder or PYTHONPATH. Call `config(folder=,
    prompts=, epochs=, updates=)` on the result: the folder for records, the number of prompts, how often each is used,
    and the number of optimizer steps for each batch of answers.
    """
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent.absolute()), os.environ.get("PYTHONPATH")]))
    job = DLJobBuilder("ppo").env(PYTHONPATH=path, OMP_NUM_THREADS="1")
    for name, entry, workers in (("prompts", prompts, 1), ("rollout", rollout, rollouts), ("reward", reward, 1)):
        job.role(name).run(entry).workers(workers).resource(cpu=cpu).not_driver().restarts(on_failure="replace")
    job.role("trainer").train(trainer).workers(trainers).resource(cpu=cpu).restarts(on_failure="rejoin")
    return job
