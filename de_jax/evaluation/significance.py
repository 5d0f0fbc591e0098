"""How far chance moves a score: intervals of means over queries, and paired tests of two systems, corrected for their number."""

import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from de_jax.types import InputError

Scores = Mapping[str, float]
"""One measure of each query, by query id."""

TIE = 1e-9
"""Scores that differ by less are equal up to rounding."""
NUM_RESAMPLES = 9999
CONFIDENCE = 0.95


class Comparison(NamedTuple):
    """A system beside a baseline on the same queries; p-values are two-sided."""

    difference: float  # of the means, system - baseline
    wins: int
    ties: int
    losses: int
    p_t_test: float
    p_permutation: float
    holm_t_test: float  # corrected for the number of systems that are compared with the baseline
    holm_permutation: float


class Spread(NamedTuple):
    """A system trained several times."""

    mean: float
    std: float  # of the seeds' means, with n - 1; 0 for one seed
    num_seeds: int


class OverSeeds(NamedTuple):
    """A difference whose seeds and queries are both samples."""

    low: float  # of the confidence interval of the mean difference
    high: float
    p: float  # two-sided


def half_width(values: Sequence[float]) -> float:
    """Half the width of the `confidence_interval` of a mean before it is cut.

    Example:
        >>> round(half_width([0.0, 0.0, 1.0, 1.0]), 4)
        0.9187
    """
    from scipy import stats

    if len(values) < 2:
        raise InputError(f"{len(values)} query is too few for a significance test; score at least 2.")
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))


def confidence_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the mean of a measure over queries, by Student's t distribution (Sakai 2014, section 3).

    The queries are treated as a sample of users' queries. Where all values are in [0, 1], as with most measures, the interval is
    cut to that range.

    Example:
        >>> [round(end, 4) for end in confidence_interval([0.8, 0.9, 1.0, 1.0])]
        [0.7727, 1.0]
    """
    mean, half = math.fsum(values) / len(values), half_width(values)
    return _within_range(mean - half, mean + half, values)


def half_width_of_average(half_widths: Sequence[float]) -> float:
    """`half_width` of the average of several sets' means, given those of the sets, whose queries are independent.

    Example:
        >>> round(half_width_of_average([0.1, 0.1]), 4)
        0.0707
    """
    return math.hypot(*half_widths) / len(half_widths)


def interval_of_average(
    means: Sequence[float], intervals: Sequence[Sequence[float]], half_widths: Sequence[float]
) -> tuple[float, float]:
    """The confidence interval of the average of several sets' means; cut to [0, 1] where those of the sets are in that range.

    Example:
        >>> [round(end, 4) for end in interval_of_average([0.5, 0.8], [(0.4, 0.6), (0.7, 0.9)], [0.1, 0.1])]
        [0.5793, 0.7207]
    """
    mean, half = math.fsum(means) / len(means), half_width_of_average(half_widths)
    return _within_range(mean - half, mean + half, [end for interval in intervals for end in interval])


def _within_range(low: float, high: float, values: Sequence[float]) -> tuple[float, float]:
    """An interval, cut to [0, 1] where all values are in that range."""
    return (max(low, 0.0), min(high, 1.0)) if min(values) >= 0 and max(values) <= 1 else (low, high)


def compare_all(
    systems: Mapping[str, Scores], baseline: Scores, *, num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> dict[str, Comparison]:
    """How each system differs from the baseline over the queries, and how likely chance would make it differ as much.

    Args:
        systems: their scores by name.
        baseline: the scores of the same queries.
        num_resamples: see `permutation_test`.
        seed: of its sample.

    Raises:
        InputError: other queries than the baseline's, or fewer than 2.
    """
    differences = {name: paired_differences(scores, baseline) for name, scores in systems.items()}
    t_tests = [paired_t_test(values) for values in differences.values()]
    permutations = [permutation_test(values, num_resamples=num_resamples, seed=seed) for values in differences.values()]
    tests = zip(t_tests, permutations, holm(t_tests), holm(permutations), strict=True)
    found = {}
    for (name, values), p_values in zip(differences.items(), tests, strict=True):
        wins, losses = int(np.sum(values > TIE)), int(np.sum(values < -TIE))
        found[name] = Comparison(float(np.mean(values)), wins, len(values) - wins - losses, losses, *p_values)
    return found


def paired_differences(system: Scores, baseline: Scores) -> Float[np.ndarray, " q"]:
    """System minus baseline for each query, in the baseline's order."""
    if other := sorted(system.keys() ^ baseline.keys()):
        raise InputError(f"{len(other)} queries are scored for one system only ({other[0]}, ...); score both on the same queries.")
    if len(baseline) < 2:
        raise InputError(f"{len(baseline)} query is too few for a significance test; score at least 2.")
    return np.array([system[query_id] - baseline[query_id] for query_id in baseline], np.float64)


def paired_t_test(differences: Float[np.ndarray, " q"]) -> float:
    """p of Student's paired t-test, two-sided; 1 if nothing differs."""
    from scipy import stats

    if np.all(np.abs(differences) <= TIE):
        return 1.0
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # equal differences have no variance, and p is 0
        return float(stats.ttest_1samp(differences, 0.0).pvalue)


def permutation_test(differences: Float[np.ndarray, " q"], *, num_resamples: int = NUM_RESAMPLES, seed: int = 0) -> float:
    """p of the paired permutation test (Fisher's), two-sided: each query's systems are swapped or not.

    All ways to swap if there are no more than `num_resamples`, else a sample of them.
    """
    from scipy import stats

    if num_resamples < 1:
        raise InputError(f"{num_resamples} resamples are too few; give at least 1.")
    differing = differences[np.abs(differences) > TIE]  # swapping the others changes nothing
    if len(differing) < 2:
        return 1.0
    batch = max(1, 2**24 // len(differing))  # bounds memory
    options: dict[str, Any] = {"permutation_type": "samples", "vectorized": True, "n_resamples": num_resamples, "batch": batch}
    return float(stats.permutation_test((differing,), np.mean, rng=np.random.default_rng(seed), **options).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number, in the order given (Holm 1979): the chance of one false alarm stays below each.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    corrected, highest = [0.0] * len(p_values), 0.0
    for place, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - place) * p_values[index]))
        corrected[index] = highest
    return corrected


def mean_over_seeds(seeds: Sequence[Scores]) -> dict[str, float]:
    """Each query's mean over runs that differ only by seed, as input of a test over queries."""
    if not seeds:
        raise InputError("there is no seed to average; give the scores of at least one run.")
    if any(seed.keys() != seeds[0].keys() for seed in seeds):
        raise InputError("the seeds were scored on different queries; score all on the same.")
    return {query_id: math.fsum(seed[query_id] for seed in seeds) / len(seeds) for query_id in seeds[0]}


def spread_over_seeds(seeds: Sequence[Scores]) -> Spread:
    """Mean and standard deviation of the seeds' own means over queries."""
    means = [math.fsum(seed.values()) / len(seed) for seed in seeds]
    return Spread(statistics.fmean(means), statistics.stdev(means) if len(means) > 1 else 0.0, len(means))


def over_seeds(differences: Float[np.ndarray, "s q"]) -> OverSeeds:
    """Whether a difference holds for other seeds and other queries, by an analysis of variance with two crossed random factors.

    Each difference is the mean plus a part of its seed, a part of its query and a rest. The mean's variance is the sum of theirs,
    no estimate below 0, with Satterthwaite's degrees of freedom. A bootstrap of three or five seeds would be too narrow.

    Example:
        >>> round(over_seeds(np.array([[0.1, 0.2, 0.0, 0.1], [0.3, 0.1, 0.1, 0.2]])).p, 3)
        0.17
    """
    from scipy import stats

    num_seeds, num_queries = differences.shape
    if min(differences.shape) < 2:
        raise InputError(f"{num_seeds} seeds and {num_queries} queries; a test over both needs at least 2 of each.")
    mean = float(differences.mean())
    of_seeds = differences.mean(axis=1, keepdims=True) - mean
    of_queries = differences.mean(axis=0, keepdims=True) - mean
    freedoms = np.array([num_seeds - 1, num_queries - 1, (num_seeds - 1) * (num_queries - 1)])
    rest = differences - mean - of_seeds - of_queries
    squares = np.array([num_queries * np.sum(of_seeds**2), num_seeds * np.sum(of_queries**2), np.sum(rest**2)]) / freedoms
    weights = np.array([squares[0] > squares[2], squares[1] > squares[2], 0], np.float64)
    weights[2] = 1 - weights.sum()
    variance = float(weights @ squares)
    if variance <= TIE**2:
        return OverSeeds(mean, mean, float(abs(mean) <= TIE))
    freedom = variance**2 / float(weights**2 @ (squares**2 / freedoms))
    error = math.sqrt(variance / differences.size)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * error
    return OverSeeds(mean - half, mean + half, float(2 * stats.t.sf(abs(mean) / error, freedom)))
