"""`recover="process"`: leaves a fit and enters it again, in the same process, whenever its round ends.

Lightning leaves it through its error handling (`on_exception`, teardown of the strategy) and enters it as when a
Trainer fits twice. State that is fresh in a new process, but not in a second fit of an old one, is restored here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy

from dlrover_hooks.config import Config
from dlrover_hooks.elastic.adapter_recovery import AdapterRecovery
from dlrover_hooks.elastic.in_process_recovery import Recovery, elastic_run
from dlrover_hooks.errors import RoundEnded, UsageError
from dlrover_hooks.integrations.lightning import _private_api as private, output_names as names
from dlrover_hooks.integrations.lightning.fresh_attributes import FreshAttributes
from dlrover_hooks.integrations.lightning.state_beside_optimizer import StateBesideOptimizer
from dlrover_hooks.session import Restored, Session
from dlrover_hooks.worker import surviving_process

Told = Callable[[Recovery], object]
RECOVER = ("process", "restart")


class FitRounds:
    """Runs one fit, once per round. Training thread.

    Args:
        config: of the callback.
        recover: one of `RECOVER`.
        on_recover, on_resize: as for `elastic_run`.
        checkpoint: False: there is no checkpoint to continue from.

    Raises:
        UsageError: an unknown value of `recover`.
    """

    def __init__(
        self, config: Config, recover: str, on_recover: Told | None, on_resize: Told | None, *, checkpoint: bool
    ) -> None:
        if recover not in RECOVER:
            raise UsageError(f"recover={recover!r}", hint=f"one of {', '.join(map(repr, RECOVER))}")
        self._recover, self._on_recover, self._on_resize = recover, on_recover, on_resize
        self._checkpoint, self._life = checkpoint, 0
        self._fresh: FreshAttributes | None = None
        self._survivor: AdapterRecovery | None = None
        self._stepped = False
        if recover == "process" and config.master is not None and not config.disable:
            _wrap_fit()

    @property
    def again(self) -> bool:
        """True if this fit has been left before."""
        return self._life > 1

    def run(self, trainer: Trainer, fit: Callable[[], None]) -> None:
        """Call `fit()`, again in each round, until it returns or fails."""
        if self._recover != "process":
            return fit()

        def live() -> None:
            self._life += 1
            private.follow_world(trainer)
            if self.again:
                names.leave_folders(trainer)
            try:
                fit()
            finally:
                if self._fresh is not None:
                    self._fresh.let_go()

        try:
            elastic_run(live, on_recover=self._on_recover, on_resize=self._on_resize)()
        finally:
            if (
                surviving_process.current() is None
            ):  # otherwise the next round of an enclosing `elastic_run` may use the same Trainer
                self._life, self._fresh, self._survivor, self._stepped = 0, None, None, False

    def begin(self, trainer: Trainer, module: LightningModule, session: Session) -> None:
        """Called in `setup` in each round, before the session joins: the restore comes later."""
        if session.membership is None:
            return
        if (reason := self._why_not(trainer)) is not None:
            session.membership.refuse(reason)
        if self._fresh is None:
            self._fresh = FreshAttributes(trainer, module)
        elif self.again:
            self._fresh.put_back(trainer)

    def check(self, trainer: Trainer, session: Session, restored: Restored | None) -> None:
        """Ensure that nothing is trained twice. Raises RoundEnded if nothing is restored into changed weights."""
        self._stepped |= self._survivor is not None and self._survivor.stepped
        if session.membership is None or not self.again or not self._stepped:
            return
        if restored is None and trainer.ckpt_path is None:
            session.membership.refuse("a fit that lost a worker before anything was saved")
            raise RoundEnded(
                "a worker was lost when steps were made and none was saved yet: the weights of this process have them",
                hint="the launcher restarts all workers; save_every= says how often to save",
            )

    def _why_not(self, trainer: Trainer) -> str | None:
        """What prevents this Trainer from surviving a round; None if nothing does."""
        if self._recover != "process":
            return f"a Trainer with recover={self._recover!r}"
        if not self._checkpoint:
            return "a Trainer with checkpoint=False"
        if not isinstance(trainer.strategy, DDPStrategy):
            return f"a Trainer that began alone ({type(trainer.strategy).__name__}; strategy='ddp' lets it grow)"
        if not isinstance(trainer.strategy.cluster_environment, TorchElasticEnvironment):
            return f"a Trainer with {type(trainer.strategy.cluster_environment).__name__}, which keeps its rank"
        return None

    def survivor(
        self,
        trainer: Trainer,
        session: Session,
        beside: StateBesideOptimizer,
        state: Callable[[], dict[str, Any]],
        ends: Sequence[Callable[[], object]],
    ) -> AdapterRecovery | None:
        """Recovery support for a round that may be survived; None for any other.

        Call in `on_train_start`, after the restore. `state` makes a cut; `ends` as for `AdapterRecovery`.
        """
        if session.membership is None or session.membership.unsupported:
            return None
        wrapped = trainer.strategy.model
        self._survivor = AdapterRecovery(
            session,
            [trainer.lightning_module],
            trainer.optimizers,
            beside.take,
            lambda kept: beside.put_over(state(), kept),
            ends,
            passing=[wrapped] if wrapped is not None else [],
            lost=beside.lost,
        )
        return self._survivor


def _wrap_fit() -> None:
    """Wrap `Trainer.fit`: a callback runs too late to enter a fit again, or to track its process group."""
    fit = Trainer.fit
    if getattr(fit, "elastic", False):
        return

    @functools.wraps(fit)
    def elastic(self: Trainer, *args: Any, **kwargs: Any) -> None:
        kept = (getattr(one, "fits", None) for one in private.callbacks(self))
        fits = next((one for one in kept if isinstance(one, FitRounds)), None)
        if fits is None or private.tunes(self):
            return fit(self, *args, **kwargs)
        return fits.run(self, lambda: fit(self, *args, **kwargs))

    elastic.elastic = True  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
    Trainer.fit = elastic
