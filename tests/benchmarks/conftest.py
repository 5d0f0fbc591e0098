"""Benchmarks run in this process with the smallest towers, and what they print."""

import importlib
import json

import pytest
import smallest_towers


@pytest.fixture(scope="module", autouse=True)
def smallest(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DE_JAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        smallest_towers.use(patch)
        yield


@pytest.fixture
def printed(capsys):
    """The JSON objects, one a line, that a benchmark prints with these arguments."""

    def run(benchmark, *arguments):
        importlib.import_module(f"benchmarks.{benchmark}").main([*map(str, arguments)])
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run
