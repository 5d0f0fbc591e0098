"""Folders that stand in for models and runs that are missing: sizes without parameters, enough to plan a run, not to train it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from de_jax.configurables import read_recipe
from de_jax.data.sources.options import PairsOptions
from de_jax.data.text.tokenizing import Side, load_tokenizer
from de_jax.interop.pretrained import FILE, save
from de_jax.models.bert import BertConfig
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.tower import TowerConfig
from de_jax.recipe import Recipe
from de_jax.training.run.run_folder import describe_run
from reproduction.needs import Needs, Run, Source, Sources

MOST_LAYERS = 24
_TOWER = TowerConfig(BertConfig(vocab_size=30522), pooling="first", projection_dim=None, normalize=False)
DPR = DualEncoder(_TOWER, _TOWER, ())
"""The published runs that recipes start from: two BERTs, their first tokens (Karpukhin et al. 2020)."""


class StandIns:
    """Stands in for all models and runs of the papers.

    Args:
        folder: an empty one, which gets them.
    """

    def __init__(self, folder: Path) -> None:
        self._sources = Sources(folder, folder / "runs")
        write_models(self._sources.weights.values())

    def needs_of(self, run: Run, settings: Sequence[str]) -> Needs:
        """The needs of a run with these settings of gin, its models and first runs being stand-ins."""
        needs = self._sources.needs_of(run)
        for first in needs.first:
            if not (run_dir := self._sources.run_dir(first)).exists():
                recipe = read(self.needs_of(first, settings), settings)
                describe(run_dir, recipe.model, recipe.options)
        return needs


def read(needs: Needs, settings: Sequence[str]) -> Recipe:
    """The recipe of a run; training warns about assumptions on its models."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*so these are assumed")
        return read_recipe([needs.gin_file], [*needs.bindings, *settings])


def write_models(models: Iterable[Source]) -> None:
    """Writes the config.json of each model, with a file of weights that only names its layers, and describes published runs."""
    arrays = {f"encoder.layer.{number}": np.zeros(1, np.float32) for number in range(MOST_LAYERS)}
    for model in models:
        if model.sizes:
            model.put.mkdir(parents=True)
            (model.put / "config.json").write_text(model.sizes)
            save(model.put / FILE, arrays)
        else:
            describe(model.put, DPR)


def describe(run_dir: Path, model: DualEncoder, options: PairsOptions | None = None) -> None:
    """Describes a run of a model, with the lengths of its options and a vocabulary of two words."""
    vocabulary = run_dir / "vocabulary"
    vocabulary.mkdir(parents=True)
    (vocabulary / "tokenizer.json").write_text(json.dumps(_TOKENIZER))
    (vocabulary / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[PAD]", "unk_token": "[UNK]"}))
    lengths = (options.max_query_length, options.max_doc_length) if options else (512, 512)
    query, doc = (Side(load_tokenizer(vocabulary), length) for length in lengths)
    describe_run(run_dir, model=model, query=query, doc=doc)
    (run_dir / "checkpoints" / "0").mkdir(parents=True)


_TOKENIZER = {
    "version": "1.0",
    "added_tokens": [
        {"id": number, "content": piece, "special": True} | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for number, piece in enumerate(("[PAD]", "[UNK]"))
    ],
    "model": {"type": "WordLevel", "vocab": {"[PAD]": 0, "[UNK]": 1, "dense": 2, "retrieval": 3}, "unk_token": "[UNK]"},
}
