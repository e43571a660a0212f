"""Preemption under Lightning 2.6: replaces its own signal handlers once it has registered them.

Its SIGTERM handler broadcasts inside the signal handler, and so waits forever when only one rank gets the signal. Its
SLURM handler saves inside the signal handler, where ranks are at different steps, and requeues. Here the job leaves at
an agreed step. After that rank 0 requeues it, unless a dlrover-hooks launcher does.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose

from dlrover_hooks.launcher.requeue import here, requeue
from dlrover_hooks.session import Preempted, Session

log = logging.getLogger("dlrover_hooks")


def take_over(trainer: Trainer, session: Session, on_preempt: Callable[[Preempted], object] | None) -> None:
    """Call in `on_train_start`, after Lightning has registered its handlers. The user's own handlers are kept."""
    environment = _requeueing(trainer)
    signals = session.parting.signals
    if environment is not None and environment.requeue_signal is not None:
        signals.add(environment.requeue_signal)
    for number in signals.numbers:
        if isinstance(current := signal.getsignal(number), _HandlersCompose):
            _keep_others(number, current, trainer)
    signals.take()

    def gone(what: Preempted) -> None:
        if on_preempt is not None:
            on_preempt(what)
        job = here()
        if environment is not None and job is not None and session.place.rank == 0 and not session.place.incarnation:
            requeue(job)

    session.parting.on_preempt = gone


def _keep_others(number: signal.Signals, composed: _HandlersCompose, trainer: Trainer) -> None:
    """Restore the handlers that Lightning composed its own with."""
    own = trainer._signal_connector
    theirs = (own._sigterm_notifier_fn, own._sigterm_handler_fn, own._slurm_sigusr_handler_fn)
    kept: list[Any] = [one for one in composed.signal_handlers if one not in theirs]
    before: Any = kept[0] if len(kept) == 1 else _HandlersCompose(kept) if kept else signal.SIG_DFL
    signal.signal(number, before)


def _requeueing(trainer: Trainer) -> SLURMEnvironment | None:
    """The SLURM environment in which Lightning would requeue the job itself; else None."""
    environment: Any = trainer._accelerator_connector.cluster_environment
    return environment if isinstance(environment, SLURMEnvironment) and environment.auto_requeue else None
