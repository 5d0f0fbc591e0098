"""The log in W&B, against a stand-in for its package: what it is given."""

import sys
import types

import pytest

from de_jax.training.run import wandb_log
from de_jax.types import InputError


class FakeRun:
    """Takes lines."""

    def __init__(self, options):
        self.options, self.lines, self.exit_code = options, [], None
        self.error = None

    def log(self, scalars, *, step):
        if self.error:
            raise self.error
        self.lines.append((step, scalars))

    def finish(self, *, exit_code):
        self.exit_code = exit_code


class FakeWandb(types.ModuleType):
    """What the library uses of `wandb`."""

    def __init__(self, mode="online", is_logged_in=True):
        super().__init__("wandb")
        self.runs, self.mode, self.is_logged_in = [], mode, is_logged_in

    def setup(self):
        return types.SimpleNamespace(settings=types.SimpleNamespace(mode=self.mode))

    def login(self, *, prompt):
        assert not prompt
        return self.is_logged_in

    def init(self, **options):
        self.runs.append(FakeRun(options))
        return self.runs[-1]

    def Settings(self, **options):
        return options


@pytest.fixture
def wandb(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    return sys.modules["wandb"]


def test_lines_arrive_in_order_with_their_steps_in_a_run_that_is_named_and_described(wandb, tmp_path):
    (tmp_path / "sde").mkdir()
    (tmp_path / "sde" / "recipe.json").write_text('{"optimization": {"num_steps": 20}}')
    with wandb_log.wandb_sink(tmp_path / "sde", 0, "my-team/retrieval") as sink:
        for step in (5, 10):
            sink(step, {"loss": 1.0 / step})
        sink(10, {"dev/ndcg@10": 0.5})
    (run,) = wandb.runs
    assert run.lines == [(5, {"loss": 0.2}), (10, {"loss": 0.1}), (10, {"dev/ndcg@10": 0.5})]
    assert run.exit_code == 0
    assert run.options["settings"]["finish_timeout"] == wandb_log.FINISH_SECONDS
    named = {name: run.options[name] for name in ("entity", "project", "name", "config", "dir")}
    assert named == {
        "entity": "my-team",
        "project": "retrieval",
        "name": "sde",
        "config": {"optimization": {"num_steps": 20}},
        "dir": str(tmp_path / "sde"),
    }


def test_a_run_that_continues_keeps_its_id_and_one_that_begins_anew_gets_another(wandb, tmp_path):
    for start_step in (0, 10, 0):
        with wandb_log.wandb_sink(tmp_path, start_step, "retrieval"):
            pass
    first, continued, anew = (run.options["id"] for run in wandb.runs)
    assert first == continued != anew
    assert {run.options["resume"] for run in wandb.runs} == {"allow"}
    assert {run.options["entity"] for run in wandb.runs} == {None}


def test_a_run_that_fails_is_a_failed_run_there(wandb, tmp_path):
    with pytest.raises(ZeroDivisionError), wandb_log.wandb_sink(tmp_path, 0, "retrieval"):
        raise ZeroDivisionError
    assert wandb.runs[0].exit_code == 1


def test_an_error_of_the_service_is_a_warning(wandb, tmp_path):
    def log():
        with wandb_log.wandb_sink(tmp_path, 0, "retrieval") as sink:
            wandb.runs[0].error = OSError("the service is gone")
            sink(1, {"loss": 1.0})
            sink(2, {"loss": 1.0})

    with pytest.warns(UserWarning, match=r"W&B gets no more lines of this run \(the service is gone\)"):
        log()
    assert wandb.runs[0].lines == []


def test_what_would_fail_later_is_refused_at_once(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(is_logged_in=False))
    with pytest.raises(InputError, match=r"retrieval \(no API key is configured\); run `wandb login`.*WANDB_MODE=offline"):
        wandb_log.check("retrieval")
    with pytest.raises(InputError, match=r"Logging\.wandb is 'a/b/c'; it must be a project"):
        wandb_log.check("a/b/c")
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(mode="offline", is_logged_in=False))
    wandb_log.check("retrieval")
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it fails
    with pytest.raises(InputError, match=r"pip install 'de-jax-retrieval\[wandb\]'"):
        wandb_log.check("retrieval")


def test_a_service_that_takes_no_run_is_one_sentence(wandb, tmp_path, monkeypatch):
    def refuse(**options):
        raise RuntimeError("permission denied\nfor this entity.")

    monkeypatch.setattr(wandb, "init", refuse)
    with (
        pytest.raises(InputError, match=r"retrieval \(permission denied for this entity\); run"),
        wandb_log.wandb_sink(tmp_path, 0, "retrieval"),
    ):
        pass
