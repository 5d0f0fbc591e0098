"""A tiny run and data set, and what a command prints."""

import json

import pytest
import tiny_run

from de_jax import cli


@pytest.fixture(scope="module")
def dataset_dir(tmp_path_factory):
    return tiny_run.write_dataset(tmp_path_factory.mktemp("data") / "tiny")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return tiny_run.write_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("DE_JAX_CACHE", str(folder))
    return folder


@pytest.fixture
def printed(capsys):
    """Runs a command and gives the one JSON object it printed; a list is the values of one flag."""

    def run(verb, *argv, **flags):
        argv = [*argv]
        for name, value in flags.items():
            values = value if isinstance(value, list | tuple) else [] if value is True else [value]
            argv += [f"--{name}", *map(str, values)]
        cli.call(verb, argv)
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1
        return json.loads(lines[0])

    return run
