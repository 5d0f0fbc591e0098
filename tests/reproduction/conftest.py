"""A tiny run and data set, and what a command prints."""

import json

import pytest
import tiny_run

from reproduction import verbs


@pytest.fixture(scope="module")
def dataset_dir(tmp_path_factory):
    return tiny_run.write_dataset(tmp_path_factory.mktemp("data") / "tiny")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return tiny_run.write_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("DE_JAX_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def printed(capsys):
    """Runs a command and gives the one JSON object it printed; a list is the values of one flag."""

    def run(verb, **flags):
        argv = []
        for name, value in flags.items():
            argv += [f"--{name}", *map(str, value if isinstance(value, list | tuple) else [value])]
        verbs.call(verb, argv)
        (line,) = capsys.readouterr().out.splitlines()
        return json.loads(line)

    return run
