"""A trace of some updates is written whenever it began, and a run that comes too late for it says so."""

import jax
import pytest

from de_jax.training.run.loop import ProfileSteps


@pytest.fixture
def calls(monkeypatch):
    found = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: found.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: found.append("stop"))
    return found


def test_a_run_that_stops_within_the_trace_keeps_it(calls, tmp_path):
    profile = ProfileSteps(tmp_path, first=3, count=9, num_steps=50)
    for step in range(1, 6):
        profile(step, {}, {})
    profile.close()
    profile.close()
    assert calls == ["start", "stop"]


def test_a_run_that_continues_beyond_the_first_update_of_the_trace_says_so(calls, tmp_path):
    with pytest.warns(UserWarning, match="begins at update 3, but the run continues after update 2, .* from 4 on"):
        profile = ProfileSteps(tmp_path / "profile", first=3, count=2, num_steps=50, start_step=2)
    for step in range(3, 9):
        profile(step, {}, {})
    profile.close()
    assert calls == []
    ProfileSteps(tmp_path / "profile", first=3, count=2, num_steps=50, start_step=1)
    ProfileSteps(tmp_path / "profile", first=3, count=2, num_steps=50, start_step=50)  # complete
    ProfileSteps(tmp_path, first=3, count=2, num_steps=50, start_step=9)  # traced before
