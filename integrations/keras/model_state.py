"""The variables of a compiled model, its optimizer and its metrics, as arrays and back. All backends."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import keras
import msgspec
import numpy as np

from dlrover_hooks.errors import Corrupt, UsageError
from dlrover_hooks.protocol import Step
from dlrover_hooks.protocol.restored_value_check import own_state, require

_COUNTER = re.compile(r"_\d+(?=[/_]|$)")


class KerasStateForm(msgspec.Struct):
    """The form of the `state` part of a cut."""

    keras_backend: str
    step: Step
    epoch: Step
    variables: dict[str, dict[str, Any]]
    callbacks: dict[str, dict[str, Any]]


def variables_of(model: keras.Model) -> dict[str, list[Any]]:
    """The variables by kind: `model` (weights, and the seeds of its random layers), `optimizer`, `metrics`."""
    metrics = {id(one) for one in model.metrics_variables}
    optimizer = model.optimizer.variables if model.optimizer is not None else []
    return {
        "model": [one for one in model.variables if id(one) not in metrics],
        "optimizer": list(optimizer),
        "metrics": list(model.metrics_variables),
    }


def seeds_of(model: keras.Model) -> list[Any]:
    """The variables with the seeds of random layers."""
    return [one for one in model.non_trainable_variables if _is_seed(one)]


def arrays_of(model: keras.Model, seed_offset: int = 0) -> dict[str, dict[str, Any]]:
    """Their values by name. On the torch backend the model's own tensors, elsewhere arrays that may share memory.

    seed_offset: what was added to the seeds of random layers on this rank; they are returned without it.
    """
    if (sync := getattr(model, "jax_state_sync", None)) is not None:
        sync()  # during `fit` the JAX backend keeps the values beside the variables
    return {
        kind: {
            name: _value(one) - seed_offset if seed_offset and _is_seed(one) else _value(one)
            for name, one in zip(_names(found), found, strict=True)
        }
        for kind, found in variables_of(model).items()
    }


def assign(model: keras.Model, saved: dict[str, dict[str, Any]], kinds: Sequence[str]) -> None:
    """Write the saved values of `kinds` into the variables.

    Raises:
        UsageError: names or shapes differ; nothing is changed then.
    """
    for kind in kinds:
        _check(kind, variables_of(model)[kind], saved.get(kind, {}))
    for kind in kinds:
        for one, value in zip(variables_of(model)[kind], saved[kind].values(), strict=True):
            one.assign(value)


def _check(kind: str, here: Sequence[Any], saved: dict[str, Any]) -> None:
    """Raises UsageError with the first difference between the variables and what was saved of them."""
    names = _names(here)
    if names != list(saved):
        other = sorted(set(names) ^ set(saved)) or ["their order"]
        raise UsageError(
            f"the {kind} has {len(names)} variables, the checkpoint {len(saved)}; different: {', '.join(other[:5])}",
            hint="build and compile the model of the first start, or start over (resume='never')",
        )
    for name, one in zip(names, here, strict=True):
        if tuple(one.shape) != tuple(saved[name].shape):
            raise UsageError(
                f"{kind} variable {name} has shape {tuple(one.shape)}, in the checkpoint {tuple(saved[name].shape)}",
                hint="build the model of the first start, or start over (resume='never')",
            )


def check_state(state: Any) -> None:
    """Raises UsageError if another adapter or backend saved `state`, Corrupt if no adapter saves such a state."""
    own_state(state, "keras_backend", "the Keras callback")
    require(state, KerasStateForm, "the state")
    for kind, found in state["variables"].items():
        for name, value in found.items():
            if not hasattr(value, "shape"):
                raise Corrupt(f"the state: {kind} variable {name} is a {type(value).__name__}, not an array")
    if state["keras_backend"] != keras.backend.backend():
        raise UsageError(
            f"the checkpoint was saved on the {state['keras_backend']} backend, this is {keras.backend.backend()}",
            hint=f"set KERAS_BACKEND={state['keras_backend']}, or start over (resume='never')",
        )


def _names(variables: Sequence[Any]) -> list[str]:
    """Their numbers and names, without the counters of layers, which differ for a second model in the process.

    Not their whole paths: those of an optimizer depend on when it is built.
    """
    return [f"{at}.{_COUNTER.sub('', one.path.rpartition('/')[2])}" for at, one in enumerate(variables)]


def _is_seed(variable: Any) -> bool:
    return variable.path.endswith("seed_generator_state")


def _value(variable: Any) -> Any:
    value = variable.value
    if keras.backend.backend() == "torch":
        return value.detach()
    return np.asarray(value)
