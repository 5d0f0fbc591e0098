"""An alarm for towers that collapse: to one vector, or to few dimensions. It reads the log, so it costs the device nothing."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping

from de_jax.settings import NonNegativeFloat, PositiveInt, check_fields
from de_jax.training.fit import Stop
from de_jax.types import Metrics, TrainState

TOWERS = {"query": "query tower", "doc": "document tower"}


@dataclasses.dataclass(frozen=True)
class CollapseAlarm:
    """What counts as a collapse; `losses.spread` says what is measured, and on which part of it dropout acts.

    Attributes:
        min_variance: a tower whose embeddings, brought to length 1, vary less has collapsed to one vector. Such a pair's loss is
            log(1 + number of negatives).
        min_effective_rank: a tower that uses fewer dimensions has collapsed to them (dimensional collapse).
        chance_share: a loss above this share of log(1 + number of negatives) is no better than chance.
        patience: lines of the log in a row before it is said; random parameters begin with something like it.
        stop: whether the run ends then.
    """

    min_variance: NonNegativeFloat = 0.01
    min_effective_rank: NonNegativeFloat = 2.0
    chance_share: NonNegativeFloat = 0.98
    patience: PositiveInt = 3
    stop: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


class WatchForCollapse:
    """Takes a run's lines as a sink, and warns once for each kind of collapse; as a hook it ends the run, if that is asked for."""

    def __init__(self, alarm: CollapseAlarm) -> None:
        self._alarm = alarm
        self._counts: dict[str, int] = {}
        self._stop: Stop | None = None

    def line(self, step: int, scalars: Mapping[str, float]) -> None:
        """A line of the log; see `run_log.Sink`."""
        if "query_variance" not in scalars:
            return
        found = diagnoses(self._alarm, scalars)
        self._counts = {what: self._counts.get(what, 0) + 1 for what in found}
        for what, sentence in found.items():
            if self._counts[what] == self._alarm.patience:
                warnings.warn(f"step {step}: {sentence}", stacklevel=2)
                if self._alarm.stop:
                    self._stop = Stop(f"collapsed at step {step}: {sentence}")

    def reason(self) -> str | None:
        """Why the run is over, or None."""
        return self._stop.reason if self._stop else None

    def __call__(self, step: int, state: TrainState, metrics: Metrics) -> Stop | None:
        return self._stop


def diagnoses(alarm: CollapseAlarm, scalars: Mapping[str, float]) -> dict[str, str]:
    """What is wrong with a run by one line of its log: a sentence for each kind of collapse."""
    found = {}
    for tower, name in TOWERS.items():
        variance, rank = scalars[f"{tower}_variance"], scalars[f"{tower}_effective_rank"]
        cosine = scalars[f"{tower}_mean_cosine"]
        if variance < alarm.min_variance:
            found[f"{tower} complete"] = (
                f"the {name} has collapsed: it gives nearly the same vector for every text (variance {variance:.2g}, mean cosine "
                f"{cosine:.3f}); align it first (recipes/daft_stage1.gin), or lower the learning rate."
            )
        elif rank < alarm.min_effective_rank:
            found[f"{tower} dimensional"] = (
                f"the {name} has collapsed to {rank:.2g} dimensions (dimensional collapse; mean cosine {cosine:.3f}); align it "
                "first (recipes/daft_stage1.gin), or lower the learning rate."
            )
    chance, loss = scalars.get("loss_of_chance", 0.0), scalars.get("loss_query_to_doc", 0.0)
    if chance and loss > alarm.chance_share * chance:
        found["chance"] = f"the loss, {loss:.3f}, is no better than chance, log(1 + number of negatives) = {chance:.3f}."
    return found
