"""A tiny run and data set."""

import pytest
import tiny_run


@pytest.fixture(scope="module")
def dataset_dir(tmp_path_factory):
    return tiny_run.write_dataset(tmp_path_factory.mktemp("data") / "tiny")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return tiny_run.write_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("DE_JAX_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
