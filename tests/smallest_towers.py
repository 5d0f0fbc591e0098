"""Towers of benchmarks, as small as they can be: most of what a small program costs is compiling it."""

from benchmarks import measure
from de_jax.models.t5 import T5Config
from de_jax.tools import doc2query

SIZES = {"vocab_size": 1000, "model_dim": 32, "num_layers": 2, "num_heads": 2, "head_dim": 8, "mlp_dim": 32, "dropout_rate": 0.0}


def use(patch):
    """Whatever model file a benchmark is asked for, it is this model; a folder's model stays."""
    sizes = ["TowerConfig.projection_dim=16", *(f"T5Config.{name}={value}" for name, value in SIZES.items())]
    read_model = measure.read_model
    patch.setitem(doc2query.SIZES, "tiny", T5Config(**SIZES))

    def read_small(model, recipe, bindings):
        return read_model(model, recipe, [*([] if measure.is_folder(model) else sizes), *bindings])

    patch.setattr(measure, "read_model", read_small)
