"""How far apart two towers' embeddings lie as distributions: DAFT's measure of when a query tower is aligned (Leonhardt et al.)."""

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from de_jax.settings import PositiveInt, check_fields
from de_jax.training.mesh import distributed
from de_jax.training.run.fit import Stop
from de_jax.training.run.run_log import Sink
from de_jax.types import InputError, Metrics, Params, TrainState

DELTA, DELTA_DIM = 250.0, 512
"""DAFT's threshold for the divergence, and the dimensions of the space that it was chosen in."""
_ROWS = 1024
"""Compared at a time."""
_CLOSEST = 1e-6
"""A distance below this counts as this."""
KL = "kl_divergence"


def threshold(dim: int) -> float:
    """DAFT's threshold in a space of another dimension: the divergence is `dim` times a mean of logarithms."""
    return DELTA * dim / DELTA_DIM


@dataclasses.dataclass(frozen=True)
class Alignment:
    """When a stage that aligns a query tower with a frozen document tower is over (Leonhardt et al., section 4.2).

    Attributes:
        measure: "kl_divergence" of the towers' embeddings of the same queries; or a score on the dev set, the slow alternative of
            section 4.2.1, "ndcg@10" for example.
        delta: the divergence below which the towers are aligned; None for the paper's 250, scaled to the dimensions, or for no
            threshold if the towers begin below it. Scores have no threshold; they stop on a plateau.
        patience: measurements in a row without a better one after which the stage is over; None for no end.
        every_steps: updates between two measurements; an epoch in the paper.
    """

    measure: Literal["kl_divergence", "ndcg@10", "mrr@10", "recall@100"] = "kl_divergence"
    delta: float | None = None
    patience: PositiveInt | None = 3
    every_steps: PositiveInt = 100

    def __post_init__(self) -> None:
        check_fields(self)
        if self.measure != KL and self.delta is not None:
            raise InputError(f"Alignment.delta is a divergence, but the measure is {self.measure!r}; leave delta out.")


class StopWhenAligned:
    """A hook that measures how far a query tower is, and ends the run when it is aligned.

    Args:
        value_of: the measure of these parameters.
        dim: of the space that the embeddings lie in, as of `kl_divergence`.
        begun: the value of `progress` when the continued run was saved.
        sinks: who gets the values, by the measure's name under "alignment/".
        paused: surrounds each measurement, see `LogMetrics.paused`.
    """

    def __init__(
        self,
        alignment: Alignment,
        value_of: Callable[[Params], float],
        *,
        dim: int,
        begun: Mapping[str, Any] | None = None,
        sinks: Sequence[Sink] = (),
        paused: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._alignment, self._value_of, self._dim = alignment, value_of, dim
        self._begin: float | None = begun.get("begin") if begun else None
        self._values: list[float] = list(begun["values"]) if begun else []
        self._stop: Stop | None = Stop(begun["stop"]) if begun and begun["stop"] else None
        self._sinks, self._paused = sinks, paused

    def __call__(self, step: int, state: TrainState, metrics: Metrics) -> Stop | None:
        if step % self._alignment.every_steps == 0:
            self.measure(step, state.all_params)
        return self._stop

    def measure(self, step: int, params: Params) -> None:
        """Measures now; before the first update that is the start of the towers, which may undo the threshold."""
        with self._paused():
            value = self._value_of(params)
        self._begin = self._begin if step else value
        delta = self._delta()
        if not step and delta is None and self._alignment.measure == KL:
            warnings.warn(
                f"the towers begin at a divergence of {self._begin:.4g}, below the usual threshold of {threshold(self._dim):.4g}, "
                "which does not fit these queries; the stage ends by Alignment.patience or Optimization.num_steps. "
                "Alignment.delta gives another threshold.",
                stacklevel=2,
            )
        scalars = {f"alignment/{self._alignment.measure}": value}
        if delta is not None:
            scalars["alignment/threshold"] = delta
        for sink in self._sinks:
            sink(step, scalars)
        if step:
            self._values.append(value)
            reason = self._reason(step)
            if distributed.agreed(reason is not None):
                self._stop = Stop(reason or "the first process found the towers aligned")

    def reason(self) -> str | None:
        """Why the run is over, or None."""
        return self._stop.reason if self._stop else None

    def progress(self) -> dict[str, Any]:
        """The state that a continued run needs; JSON."""
        return {"begin": self._begin, "values": self._values, "stop": self.reason()}

    def _delta(self) -> float | None:
        """The threshold in force."""
        if self._alignment.measure != KL or self._alignment.delta is not None:
            return self._alignment.delta
        usual = threshold(self._dim)
        return None if self._begin is not None and self._begin < usual else usual

    def _reason(self, step: int) -> str | None:
        measure, patience = self._alignment.measure, self._alignment.patience
        if (delta := self._delta()) is not None and self._values[-1] < delta:
            return f"aligned: {measure} {self._values[-1]:.4g} is below {delta:.4g} at step {step}"
        worse = [-value if measure == KL else value for value in self._values]
        since_best = len(worse) - 1 - worse.index(max(worse))
        if patience is not None and since_best >= patience:
            return f"{measure} has not become better in {patience} measurements, up to step {step}"
        return None


def kl_divergence(x: Float[np.ndarray, "n D"], y: Float[np.ndarray, "m D"], *, dim: int | None = None) -> float:
    """The divergence KL(P || Q) of the distributions that two samples were drawn from, by nearest neighbours; in nats.

    DAFT, eq. 9, the estimator of Perez-Cruz (2008) with one neighbour:

        -(dim / n) sum_i log(r(x_i) / s(x_i)) + log(m / (n - 1))

    r(x_i) is the distance from x_i to the nearest other point of `x`, s(x_i) that to the nearest of `y`. Equal rows of a sample
    count once, and distances below 1e-6 as 1e-6, since a logarithm of 0 would decide everything. The estimate of a small
    divergence may be negative.

    Args:
        x: of P, in DAFT the document tower's embeddings of the validation queries.
        y: of Q, in DAFT the query tower's embeddings of the same queries.
        dim: of the space that both lie in, if they do not fill all D: a density falls with the dim-th power of the distance.

    Raises:
        InputError: fewer than two different rows in `x`, no row in `y`, or values that are not finite.
    """
    if not np.isfinite(x).all() or not np.isfinite(y).all():
        raise InputError("embeddings to compare hold values that are not finite; the run has diverged.")
    x, y = (np.unique(np.asarray(rows, np.float64), axis=0) for rows in (x, y))
    if len(x) < 2 or not len(y):
        raise InputError(f"{len(x)} and {len(y)} different embeddings cannot be compared; give at least 2 and 1.")
    within = np.maximum(_nearest(x, x, skip_self=True), _CLOSEST)
    between = np.maximum(_nearest(x, y), _CLOSEST)
    dim = x.shape[1] if dim is None else dim
    return float(dim * np.mean(np.log(between / within)) + math.log(len(y) / (len(x) - 1)))


def _nearest(x: Float[np.ndarray, "n D"], y: Float[np.ndarray, "m D"], *, skip_self: bool = False) -> Float[np.ndarray, " n"]:
    """The distance from each row of `x` to the nearest of `y`; with `skip_self`, which are the same rows, to the nearest other."""
    norms, found = np.einsum("mD,mD->m", y, y), np.empty(len(x))
    for start in range(0, len(x), _ROWS):
        rows = slice(start, start + _ROWS)
        products = norms[None, :] - 2 * x[rows] @ y.T  # of the squared distance what depends on y
        if skip_self:
            products[np.arange(len(products)), np.arange(len(x))[rows]] = np.inf
        # Computed once more from the difference, which loses nothing where the two are close.
        found[rows] = np.linalg.norm(x[rows] - y[np.argmin(products, axis=1)], axis=1)
    return found
