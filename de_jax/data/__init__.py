"""Sources of training pairs for `Recipe.data`, and how pairs become batches. Each name loads its module on first use.

table_pairs    a csv, tsv, jsonl, parquet or Arrow file, a data set of Hugging Face, or rows of Python
beir_pairs     a folder in the BEIR layout
stored_pairs   a folder of tokenized pairs
seqio_pairs    a seqio task or mixture
mixed_pairs    several of these
PairsOptions   what all of them take: tokenizer, lengths, batch size, negatives; `Curriculum` is one of its settings
"""

from typing import TYPE_CHECKING, Any

_MODULES = {
    "Curriculum": "expansion.curriculum",
    "PairsOptions": "sources.options",
    "beir_pairs": "sources.training_set",
    "mixed_pairs": "sources.mixture",
    "seqio_pairs": "sources.seqio_batches",
    "stored_pairs": "sources.pair_store",
    "table_pairs": "sources.pair_store",
}

if TYPE_CHECKING:
    from de_jax.data.expansion.curriculum import Curriculum as Curriculum
    from de_jax.data.sources.mixture import mixed_pairs as mixed_pairs
    from de_jax.data.sources.options import PairsOptions as PairsOptions
    from de_jax.data.sources.pair_store import stored_pairs as stored_pairs
    from de_jax.data.sources.pair_store import table_pairs as table_pairs
    from de_jax.data.sources.seqio_batches import seqio_pairs as seqio_pairs
    from de_jax.data.sources.training_set import beir_pairs as beir_pairs
else:

    def __getattr__(name: str) -> Any:
        from importlib import import_module

        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
