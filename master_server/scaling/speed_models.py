"""Models of a job's speed, fitted to what was measured.

Parameter servers: the form of Optimus (Peng et al., EuroSys 2018), by non-negative least squares. All-reduce: the form
of Pollux' step time (Qiao et al., OSDI 2021), by least squares of the logarithms. Both need scipy, which is imported
at the fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from dlrover_hooks.errors import MissingExtra

PS_TERMS = 4
"""Parameters of the model for parameter servers: so many configurations determine it."""


class PsSpeedModel(msgspec.Struct, frozen=True):
    """Asynchronous training, p servers, w workers: `w / speed = a + b w/p + c w + d p`, terms of at least 0."""

    terms: tuple[float, float, float, float]

    def speed(self, ps: Any, workers: Any) -> Any:
        """Steps per second, summed over the workers. Numbers or arrays."""
        a, b, c, d = self.terms
        return workers / np.maximum(a + b * workers / ps + c * workers + d * ps, 1e-9)


def fit_ps_speed(points: Sequence[Sequence[float]]) -> PsSpeedModel:
    """Fit (servers, workers, steps per second); every speed above 0. Relative errors count, not absolute ones."""
    nnls = scipy_optimize().nnls
    ps, workers, speed = np.array(points, dtype=float).T
    seconds = workers / speed
    columns = np.stack([np.ones_like(ps), workers / ps, workers, ps], axis=1) / seconds[:, None]
    terms, _ = nnls(columns, np.ones_like(seconds))
    return PsSpeedModel(tuple(float(term) for term in terms))  # pyright: ignore[reportArgumentType]


class StepTime(msgspec.Struct, frozen=True):
    """One measured step of an all-reduce job: replicas, hosts, samples per replica, seconds."""

    replicas: int
    hosts: int
    batch: float
    seconds: float


class AllReduceModel(msgspec.Struct, frozen=True):
    """Seconds of a step: `(grad^g + net^g)^(1/g)`, where g = 1 means one after the other and large g at the same time.

    `grad = a + b m` of m samples per replica; `net = a + b (K - 2)` of K replicas, with other parameters between hosts
    than within one. One replica does not communicate.
    """

    gradient: tuple[float, float]
    between: tuple[float, float]
    within: tuple[float, float]
    overlap: float

    def seconds(self, replicas: Any, hosts: Any, batch: Any) -> Any:
        """Of one step. Numbers or arrays."""
        parameters = (*self.gradient, *self.between, *self.within, self.overlap)
        return _step_seconds(parameters, np.asarray(replicas), np.asarray(hosts), np.asarray(batch))

    def throughput(self, replicas: Any, hosts: Any, batch: Any) -> Any:
        """Samples per second. At a fixed global batch this is the goodput, too: each sample is worth the same."""
        return replicas * batch / self.seconds(replicas, hosts, batch)


def fit_all_reduce(steps: Sequence[StepTime]) -> AllReduceModel:
    """Fit measured steps. Parameters of what no step did (between hosts, within one) stay near the start: optimistic.

    The priors are those of Pollux: little overlap, little growth with the replicas.
    """
    least_squares = scipy_optimize().least_squares
    replicas, hosts, batch, seconds = (
        np.array([getattr(step, name) for step in steps], dtype=float)
        for name in ("replicas", "hosts", "batch", "seconds")
    )
    shortest = float(seconds.min())
    start = np.log([shortest / 2, shortest / 2 / float(batch.mean()), *[shortest, shortest / 10] * 2])

    def residuals(x: Any) -> Any:
        parameters = np.concatenate([np.exp(x[:6]), x[6:]])
        off = np.log(_step_seconds(parameters, replicas, hosts, batch)) - np.log(seconds)
        growth = [3e-2 * parameters[3] / parameters[2], 3e-2 * parameters[5] / parameters[4]]
        return np.concatenate([off, [1e-2 * (x[6] - 1), *growth]])

    bounds = ([-18.0] * 6 + [1.0], [6.0] * 6 + [10.0])
    x = least_squares(residuals, np.append(np.clip(start, -17, 5), 1.5), bounds=bounds).x
    a, b, c, d, e, f = (float(value) for value in np.exp(x[:6]))
    return AllReduceModel((a, b), (c, d), (e, f), float(x[6]))


def _step_seconds(parameters: Any, replicas: Any, hosts: Any, batch: Any) -> Any:
    """Within a power of g: scaled by the longer of the two parts, so that neither overflows."""
    a, b, between, between_each, within, within_each, g = parameters
    more, gradient = np.maximum(replicas - 2, 0), a + b * batch
    net = np.where(hosts > 1, between + between_each * more, within + within_each * more)
    net = np.where(replicas <= 1, 0.0, net)
    longer = np.maximum(gradient, net)
    return longer * ((gradient / longer) ** g + (net / longer) ** g) ** (1 / g)


def smallest_that_pays(choices: Any, speed: Callable[..., Any], share: float) -> tuple[int, ...]:
    """The row of `choices` with the fewest nodes that has at least `share` of the best speed; ties: the fastest."""
    speeds = speed(*choices.T)
    enough = speeds >= share * speeds.max()
    choices, speeds = choices[enough], speeds[enough]
    best = np.lexsort((-speeds, choices.sum(axis=1)))[0]
    return tuple(int(number) for number in choices[best])


def scipy_optimize() -> Any:
    """The module. Raises `MissingExtra`."""
    try:
        import scipy.optimize
    except ImportError as error:
        raise MissingExtra(
            "choosing the resources of a job by a model needs scipy", hint="pip install 'dlrover-hooks[scaling]'"
        ) from error
    return scipy.optimize
