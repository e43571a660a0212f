"""Preemption under Lightning 2.6: replaces its own signal handlers once it has registered them.

Its SIGTERM handler broadcasts inside the signal handler, and so waits forever when only one rank gets the signal. Its
SLURM handler saves inside the signal handler, where ranks are at different steps, and requeues. Here the job leaves at
an agreed step. After that rank 0 requeues it, unless a dlrover-hooks launcher does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from lightning.pytorch import Trainer

from dlrover_hooks.integrations.lightning import _private_api as private
from dlrover_hooks.launcher.requeue import here, requeue
from dlrover_hooks.session import Preempted, Session

log = logging.getLogger("dlrover_hooks")


def take_over(trainer: Trainer, session: Session, on_preempt: Callable[[Preempted], object] | None) -> None:
    """Call in `on_train_start`, after Lightning has registered its handlers. The user's own handlers are kept."""
    environment = private.requeueing_environment(trainer)
    signals = session.parting.signals
    if environment is not None and environment.requeue_signal is not None:
        signals.add(environment.requeue_signal)
    for number in signals.numbers:
        private.put_back_handlers(trainer, number)
    signals.take()

    def gone(what: Preempted) -> None:
        if on_preempt is not None:
            on_preempt(what)
        job = here()
        if environment is not None and job is not None and session.place.rank == 0 and not session.place.incarnation:
            requeue(job)

    session.parting.on_preempt = gone
