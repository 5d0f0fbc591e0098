"""The alarm tells a tower that gives one vector from one that uses few dimensions, and says it once; a narrow start is no alarm."""

import warnings

import pytest

from de_jax.training.hooks.collapse import CollapseAlarm, WatchForCollapse, diagnoses
from de_jax.training.mesh import distributed
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
# As a language model's embeddings are before it learns to retrieve.
CONE = {
    f"{tower}_{name}": value
    for tower in ("query", "doc")
    for name, value in {"variance": 0.006, "effective_rank": 1.6, "mean_cosine": 0.994}.items()
} | {"loss_query_to_doc": 4.09, "loss_of_chance": 4.1}


@pytest.mark.parametrize(
    ("line", "kinds"),
    [(HEALTHY, []), (ONE_VECTOR, ["query complete"]), (ONE_LINE, ["doc dimensional"]), (CHANCE, ["chance"])],
)
def test_kinds_of_collapse_are_told_apart(line, kinds):
    assert list(diagnoses(CollapseAlarm(), line, HEALTHY)) == kinds


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({}, []),
        ({"query_variance": 0.004, "query_effective_rank": 1.4, "loss_query_to_doc": 4.05}, []),  # narrower still, but it learns
        ({"query_variance": 0.3, "query_effective_rank": 30.0, "loss_query_to_doc": 0.5}, []),
        ({"query_variance": 0.002}, ["query complete"]),
        ({"doc_effective_rank": 1.1}, ["doc dimensional"]),
        ({"loss_query_to_doc": 4.1}, ["chance"]),
        ({"query_variance": 0.0, "doc_variance": 0.0, "loss_query_to_doc": 4.1}, ["query complete", "doc complete", "chance"]),
    ],
)
def test_a_run_that_begins_in_a_narrow_cone_is_judged_by_where_it_began(change, kinds):
    cone_after_an_update = {"loss_query_to_doc": 4.08}
    assert list(diagnoses(CollapseAlarm(), CONE | cone_after_an_update | change, CONE)) == kinds


def test_a_loss_that_falls_to_chance_and_stays_there_is_no_better_than_chance():
    above = HEALTHY | {"loss_query_to_doc": 9.0}  # random towers at a low temperature
    assert list(diagnoses(CollapseAlarm(), CHANCE, above)) == ["chance"]


@pytest.mark.parametrize(
    "logged",
    [[], [{"step": step, **line} for step, line in enumerate([{"alignment/kl_divergence": 1.0}, CONE, HEALTHY])]],
    ids=["new run", "resumed run"],
)
def test_a_narrow_start_raises_no_alarm_and_is_known_to_a_run_that_goes_on(logged):
    watch = WatchForCollapse(CollapseAlarm(patience=1), logged)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(1, 6):
            watch.line(step, CONE | {"loss_query_to_doc": 4.09 - 0.01 * step})
        assert not said
        watch.line(6, CONE | {"query_variance": 0.0001, "loss_query_to_doc": 3.0})
    assert [str(warning.message).split(";")[0][:40] for warning in said] == ["step 6: the query tower has collapsed: i"]


@pytest.mark.parametrize("killed_after", range(8))
def test_it_is_said_once_after_as_many_lines_as_patience_asks_for_also_where_the_run_was_killed(killed_after):
    lines = [HEALTHY, ONE_VECTOR, HEALTHY, ONE_VECTOR, {"dev/ndcg@10": 0.1}, ONE_VECTOR, ONE_VECTOR]
    watch = WatchForCollapse(CollapseAlarm(patience=2), lines[:killed_after])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step, line in list(enumerate(lines))[killed_after:]:
            watch.line(step, line)
    assert [str(warning.message).split(":")[0] for warning in said] == ["step 5"] * (killed_after <= 5)
    assert all("the query tower has collapsed: it gives nearly the same vector" in str(warning.message) for warning in said)
    assert watch(6, STATE, {}) is None


def test_a_run_that_a_collapse_ended_has_its_patience_again():
    watch = WatchForCollapse(CollapseAlarm(patience=2, stop=True), [HEALTHY, ONE_LINE, ONE_LINE])
    watch.line(3, ONE_LINE)
    assert watch.reason() is None
    with pytest.warns(UserWarning, match="dimensional collapse"):
        watch.line(4, ONE_LINE)
    assert watch.reason().startswith("collapsed at step 4")


def test_all_processes_end_at_the_same_step_although_the_first_alone_has_the_log(monkeypatch):
    alarm, said = CollapseAlarm(patience=2, stop=True), []
    watches = {"first": WatchForCollapse(alarm, [{"step": 0, **HEALTHY}]), "other": WatchForCollapse(alarm)}
    stopped = []
    for step in range(3):
        for name, watch in watches.items():
            monkeypatch.setattr(distributed, "is_first", lambda name=name: name == "first")
            agreed = (lambda decision: said.append(decision) or decision) if name == "first" else (lambda decision: said[-1])
            monkeypatch.setattr(distributed, "agreed", agreed)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                watch.line(step, ONE_VECTOR)
            assert len(caught) == (name == "first" and step == 1)
        stopped.append([watch.reason() is not None for watch in watches.values()])
    assert stopped == [[False, False], [True, True], [True, True]]


def test_a_run_ends_by_it_where_that_is_asked_for():
    watch = WatchForCollapse(CollapseAlarm(patience=1, stop=True))
    watch.line(6, HEALTHY)
    with pytest.warns(UserWarning, match="dimensional collapse"):
        watch.line(7, ONE_LINE)
    assert watch(8, STATE, {}).reason.startswith("collapsed at step 7: the document tower")
    with pytest.raises(InputError, match="patience is 0"):
        CollapseAlarm(patience=0)
