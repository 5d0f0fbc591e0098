"""Dual encoders for dense retrieval in JAX. Importing this package is fast: each name loads its module on first use.

lighten    trains a light query tower for an index that stays
load       opens a model from a run, a folder of another library or the Hugging Face hub
evaluate   scores a model on a data set
fine_tune  trains a model on a table of pairs, and says whether it helped
train      trains a run from a `Recipe`, in a folder
Recipe     model, data, loss, optimization and logging of a run; its parts are in `de_jax.recipe`
documents  makes pairs from documents alone
losses     functions for `Recipe.loss`
optim      optimizers and schedules for `Optimization`
tune       searches the settings of a fine-tuning, and says whether the best is better than the start
merge      the weighted mean of models
register_encoder   makes an encoder of your own known
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"
__all__ = [
    "Recipe", "documents", "evaluate", "fine_tune", "lighten", "load", "losses", "merge", "optim", "register_encoder", "train",
    "tune",
]  # fmt: skip

_MODULES = {
    "Recipe": "recipe",
    "evaluate": "scoring",
    "fine_tune": "tuning",
    "lighten": "lightening",
    "load": "model",
    "merge": "model",
    "register_encoder": "models.dual_encoder",
    "train": "trainer",
    "tune": "trials",
}

if TYPE_CHECKING:
    from de_jax import documents, losses, optim
    from de_jax.lightening import lighten
    from de_jax.model import load, merge
    from de_jax.models.dual_encoder import register_encoder
    from de_jax.recipe import Recipe
    from de_jax.scoring import evaluate
    from de_jax.trainer import train
    from de_jax.trials import tune
    from de_jax.tuning import fine_tune
else:

    def __getattr__(name: str) -> Any:
        from importlib import import_module

        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name in ("documents", "losses", "optim"):
            return import_module(f"{__name__}.{name}")  # which makes it an attribute of this package
        globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
