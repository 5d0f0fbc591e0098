"""Benchmarks run in this process with the smallest towers, and what they print."""

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # benchmarks/ is beside the package, not in it

from benchmarks import measure  # noqa: E402
from de_jax.models.t5 import T5Config  # noqa: E402
from de_jax.tools import doc2query  # noqa: E402

SIZES = {"vocab_size": 1000, "model_dim": 32, "num_layers": 2, "num_heads": 2, "head_dim": 8, "mlp_dim": 32, "dropout_rate": 0.0}


@pytest.fixture(scope="module", autouse=True)
def smallest(tmp_path_factory):
    sizes = ["TowerConfig.projection_dim=16", *(f"T5Config.{name}={value}" for name, value in SIZES.items())]
    read_model = measure.read_model
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DE_JAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setitem(doc2query.SIZES, "tiny", T5Config(**SIZES))
        patch.setattr(measure, "read_model", lambda model, recipe, bindings: read_model(model, recipe, [*sizes, *bindings]))
        yield


@pytest.fixture
def printed(capsys):
    """The JSON objects, one a line, that a benchmark prints with these arguments."""

    def run(benchmark, *arguments):
        importlib.import_module(f"benchmarks.{benchmark}").main([*map(str, arguments)])
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run
