"""One small data set, and one undisturbed run on it, for all tests of whole commands."""

import contextlib
import json
import os
import random
import signal

import pytest
import toy_run

from de_jax import cli
from de_jax.training.run import run_log


@pytest.fixture(scope="session")
def dataset_dir(tmp_path_factory):
    return toy_run.write_dataset(tmp_path_factory.mktemp("beir") / "toy")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("DE_JAX_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


SOAK = json.loads(os.environ.get("DE_JAX_SOAK", "{}"))
"""What `tests/soak.sh` was asked for."""


@pytest.fixture(scope="session")
def num_kills():
    return SOAK.get("kills", 50)


@pytest.fixture
def rng(request):
    """The random choices of one test; the same `--seed` repeats them."""
    return random.Random(f"{SOAK.get('seed', 0)} {request.node.name}")


@pytest.fixture
def stop_at(monkeypatch):
    """Tells this process to stop, as a machine that is taken away does, with the update after one that is logged."""

    def stop_at(last, number=signal.SIGTERM):
        @contextlib.contextmanager
        def sink(*_):
            yield lambda step, scalars: os.kill(os.getpid(), number) if step == last and "loss" in scalars else None

        monkeypatch.setattr(run_log, "progress_sink", sink)

    return stop_at


@pytest.fixture(scope="session")
def finished_run(dataset_dir, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    os.environ.setdefault("DE_JAX_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    cli.call("train", toy_run.arguments(dataset_dir, run_dir))
    return run_dir
