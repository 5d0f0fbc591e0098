"""The alarm tells a tower that gives one vector from one that uses few dimensions, and says it once."""

import warnings

import pytest

from de_jax.training.collapse import CollapseAlarm, WatchForCollapse, diagnoses
from de_jax.types import InputError, TrainState

STATE = TrainState(0, {}, {}, 0)
HEALTHY = {
    f"{tower}_{name}": value
    for tower in ("query", "doc")
    for name, value in {"variance": 0.8, "effective_rank": 40.0, "mean_cosine": 0.2}.items()
} | {"loss_query_to_doc": 0.3, "loss_of_chance": 4.1}
ONE_VECTOR = HEALTHY | {"query_variance": 0.001, "query_mean_cosine": 0.999}
ONE_LINE = HEALTHY | {"doc_effective_rank": 1.2}
CHANCE = HEALTHY | {"loss_query_to_doc": 4.1}


@pytest.mark.parametrize(
    ("line", "kinds"),
    [(HEALTHY, []), (ONE_VECTOR, ["query complete"]), (ONE_LINE, ["doc dimensional"]), (CHANCE, ["chance"])],
)
def test_kinds_of_collapse_are_told_apart(line, kinds):
    assert list(diagnoses(CollapseAlarm(), line)) == kinds


def test_it_is_said_once_after_as_many_lines_as_patience_asks_for():
    watch = WatchForCollapse(CollapseAlarm(patience=2))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step, line in enumerate([ONE_VECTOR, HEALTHY, ONE_VECTOR, {"dev/ndcg@10": 0.1}, ONE_VECTOR, ONE_VECTOR], start=1):
            watch.line(step, line)
    assert [str(warning.message).split(":")[0] for warning in said] == ["step 5"]
    assert "the query tower has collapsed: it gives nearly the same vector" in str(said[0].message)
    assert watch(6, STATE, {}) is None


def test_a_run_ends_by_it_where_that_is_asked_for():
    watch = WatchForCollapse(CollapseAlarm(patience=1, stop=True))
    with pytest.warns(UserWarning, match="dimensional collapse"):
        watch.line(7, ONE_LINE)
    assert watch(8, STATE, {}).reason.startswith("collapsed at step 7: the document tower")
    with pytest.raises(InputError, match="patience is 0"):
        CollapseAlarm(patience=0)
