"""The order of pairs that come from several tasks, each seen at its rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int64

from de_jax.types import InputError


def mixed_epochs(num_pairs: Sequence[int], rates: Sequence[float | int], seed: int) -> Callable[[int], Int64[np.ndarray, " P"]]:
    """The rows of each epoch, shuffled, where task t has the share `rates[t] / sum(rates)` of every epoch.

    An epoch has as many rows as there are pairs. A task's own pairs are all seen once before any is seen again, across epochs; a
    small task with a high rate is passed through several times in one epoch, a large one over several.

    Args:
        num_pairs: pairs of each task; the rows of a task follow those of the task before.
        rates: of each task, in any unit, above 0.
        seed: with the number of an epoch (or of a pass through a task) decides every shuffle.

    Returns:
        epoch number -> rows. Any epoch is computed without those before it.

    Raises:
        InputError: a rate of 0 or less, or one so small that no epoch would hold a pair of its task.
    """
    sizes, shares = np.asarray(num_pairs, np.int64), np.asarray(rates, np.float64)
    if (shares <= 0).any():
        raise InputError(f"a task's mixing rate is {shares.min():g}; rates are above 0, and a task without one is left out.")
    counts = _apportion(shares / shares.sum(), int(sizes.sum()))
    if not counts.all():
        smallest, share = int(np.argmin(counts)), (shares / shares.sum()).min()
        raise InputError(
            f"the rate of task {smallest + 1} of the mixture is a share of {share:.2g}, which is less than one pair in an epoch of "
            f"{sizes.sum()}; raise it, or leave the task out."
        )
    starts = np.cumsum(sizes) - sizes

    def epoch(number: int) -> np.ndarray:
        drawn = [
            _draws(seed, task, int(sizes[task]), number * count, count) + starts[task] for task, count in enumerate(counts.tolist())
        ]
        rows = np.concatenate(drawn)
        return rows[np.random.default_rng((seed, number, len(counts))).permutation(len(rows))]

    return epoch


def _draws(seed: int, task: int, size: int, first: int, count: int) -> np.ndarray:
    """Draws [first, first + count) of a task's endless stream of passes, each pass in an order of its own."""
    passes = range(first // size, (first + count - 1) // size + 1)
    orders = [np.random.default_rng((seed, task, number, 2)).permutation(size) for number in passes]
    start = first - passes[0] * size
    return np.concatenate(orders)[start : start + count].astype(np.int64)


def _apportion(shares: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers that sum to `total`, as near to `shares * total` as can be: the largest remainders are rounded up."""
    exact = shares * total
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: total - int(counts.sum())]] += 1
    return counts
