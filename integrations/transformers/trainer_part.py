"""The part of a cut that is the Trainer's own: its `TrainerState`, callbacks, and counters for the next log."""

from __future__ import annotations

import json
import logging
import os
from typing import Any, cast

import msgspec
import torch
from transformers import Trainer

from dlrover_hooks import protocol as p
from dlrover_hooks.integrations.transformers import _private_api as private
from dlrover_hooks.protocol.restored_value_check import require

log = logging.getLogger("dlrover_hooks")

_KEPT = (
    "epoch", "global_step", "num_input_tokens_seen", "total_flos", "best_metric", "best_global_step",
    "best_model_checkpoint",
)  # fmt: skip


class _DueForm(msgspec.Struct):
    """What is due after a step, or at the end of an epoch (`over`)."""

    epoch: p.Step
    over: bool
    should_evaluate: bool
    should_save: bool
    should_epoch_stop: bool
    should_training_stop: bool


class _PartForm(msgspec.Struct):
    state: dict[str, Any]
    log_history: str
    callbacks: list[list[Any]]
    counters: dict[str, Any]
    step: p.Step
    limits: list[int] | None
    due: _DueForm | None = None


_FLAGS = ("should_evaluate", "should_save", "should_epoch_stop", "should_training_stop")


class TrainerPart:
    """One `Trainer`'s state beside model, optimizer and scheduler. Training thread."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._restored: dict[str, Any] | None = None
        self.ended = False
        """True once the training is over."""
        self._logged: tuple[int, str] = 0, "[]"
        """The log as text, which a step snapshot need not copy."""

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        state = trainer.state
        counters = private.loss_counters(trainer)
        if trainer.args.world_size > 1:  # each rank has its own
            counters = {name: value for name, value in counters.items() if name not in ("loss", "logged", "flos")}
        return {
            "state": {name: getattr(state, name) for name in _KEPT},
            "log_history": self._log(),
            "callbacks": [[type(one).__name__, one.state()["attributes"]] for one in self._callbacks()],
            "counters": counters,
            "step": state.global_step,
            "limits": self._limits() if self.ended else None,
            "due": None,
        }

    def due(self, epoch: int, *, over: bool) -> dict[str, Any] | None:
        """What is due now, for the state of a cut before it; None if nothing is. Arguments as in `_DueForm`."""
        control: Any = self._trainer.control
        if not (control.should_log or control.should_evaluate or control.should_save):
            return None
        return {"epoch": epoch, "over": over} | {name: getattr(control, name) for name in _FLAGS}

    def _log(self) -> str:
        history = self._trainer.state.log_history
        if self._logged[0] != len(history):
            self._logged = len(history), json.dumps(history)
        return self._logged[1]

    def load_state_dict(self, found: dict[str, Any]) -> None:
        """Restore the `TrainerState` that `train` has just made, and the callbacks. Counters: see `epoch_begins`."""
        require(found, _PartForm, "the state of the Trainer")
        state = self._trainer.state
        for name in _KEPT:
            if name in found["state"]:
                setattr(state, name, found["state"][name])
        state.log_history = json.loads(found["log_history"])
        if state.best_model_checkpoint is not None and not os.path.isdir(state.best_model_checkpoint):
            log.warning("the best checkpoint %s does not exist any more", state.best_model_checkpoint)
            state.best_model_checkpoint = None
        left = list(found["callbacks"])
        for one in self._callbacks():
            mine = next((entry for entry in left if entry[0] == type(one).__name__), None)
            if mine is not None:
                left.remove(mine)
                for name, value in mine[1].items():
                    setattr(one, name, value)
        private.refresh_callback_states(self._trainer)
        self._restored = found

    @property
    def over(self) -> bool:
        """True if what was restored is the end of a training with the limits that there are now."""
        return self._restored is not None and self._restored["limits"] == self._limits()

    @property
    def owed(self) -> dict[str, Any] | None:
        """What `due` was in the restored state: it has to be done before the epoch continues."""
        return self._restored.get("due") if self._restored is not None else None

    def epoch_begins(self, given: dict[str, Any]) -> None:
        """`train` has reset its counters, and the first epoch begins: `given` are the arguments of `_run_epoch`."""
        trainer, owed, restored = self._trainer, self.owed, self._restored
        self._restored = None
        if restored is not None:
            private.set_loss_counters(trainer, restored["counters"])
        if owed is None:
            return
        for name in _FLAGS:
            setattr(trainer.control, name, owed[name])
        if not owed["over"]:
            private.evaluate_and_save(trainer, given)
        if owed["over"] or trainer.control.should_epoch_stop or trainer.control.should_training_stop:
            steps = given["num_update_steps_per_epoch"]
            given["steps_trained_in_current_epoch"] = steps * trainer.args.gradient_accumulation_steps

    def _limits(self) -> list[int]:
        state = self._trainer.state
        return [state.max_steps, state.num_train_epochs]

    def _callbacks(self) -> list[Any]:
        return private.stateful_callbacks(self._trainer)


class FreshState:
    """What a new process has and a survivor has not: callbacks and buffers as they were before the first round."""

    def __init__(self, trainer: Trainer) -> None:
        self._callbacks = [(one, dict(one.state()["attributes"])) for one in private.stateful_callbacks(trainer)]
        self._model = cast(torch.nn.Module, trainer.model)
        self._buffers = {name: one.detach().clone() for name, one in self._model.named_buffers()}

    @torch.no_grad()
    def put_back(self) -> None:
        for one, attributes in self._callbacks:
            for name, value in attributes.items():
                setattr(one, name, value)
        for name, buffer in self._model.named_buffers():
            buffer.copy_(self._buffers[name])
