"""Folders that stand in for the weights of the papers' recipes, which cannot be had everywhere: sizes without parameters.

A recipe of `recipes/paper/` can be read in such a folder, dry-run and planned, but not trained.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import tokenizers
import transformers
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing

from de_jax.configurables import read_recipe
from de_jax.data.text.sides import Side
from de_jax.data.text.tokenizing import load_tokenizer
from de_jax.gin_settings import RECIPES_DIR
from de_jax.models.bert import BertConfig
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.tower import TowerConfig
from de_jax.recipe import Recipe
from de_jax.training.run.run_folder import describe_run

PAPERS = "recipes/paper/"
BERT_SIZES: dict[str, Any] = {"num_attention_heads": 12, "hidden_size": 768, "intermediate_size": 3072}


def rows() -> list[str]:
    """The names of all rows, such as "samtone/base_sde"."""
    folder = RECIPES_DIR / PAPERS
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.glob("*/*.gin"))


def t5(**sizes: int) -> transformers.PretrainedConfig:
    """A T5 1.1."""
    return transformers.T5Config(vocab_size=32128, d_kv=64, feed_forward_proj="gated-gelu", **sizes)


def bert(num_layers: int = 12) -> transformers.PretrainedConfig:
    """A BERT as wide as BERT base."""
    return transformers.BertConfig(num_hidden_layers=num_layers, **BERT_SIZES)


PUBLISHED: dict[str, transformers.PretrainedConfig] = {
    "google/t5-v1_1-base": t5(d_model=768, num_layers=12, num_heads=12, d_ff=2048),
    "google/t5-v1_1-large": t5(d_model=1024, num_layers=24, num_heads=16, d_ff=2816),
    "google/t5-v1_1-xxl": t5(d_model=4096, num_layers=24, num_heads=64, d_ff=10240),
    "FacebookAI/roberta-base": transformers.RobertaConfig(
        vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5, **BERT_SIZES
    ),
    "microsoft/mpnet-base": transformers.MPNetConfig(vocab_size=30527, max_position_embeddings=514, layer_norm_eps=1e-5),
    **dict.fromkeys(("google-bert/bert-base-uncased", "nghuyong/ernie-2.0-base-en"), bert()),
    **dict.fromkeys(("Luyu/condenser", "Luyu/co-condenser-marco"), bert()),
    **{f"google/bert_uncased_L-{layers}_H-768_A-12": bert(layers) for layers in (2, 4, 6, 8, 10)},
}
"""As the config.json of the models on the Hugging Face hub has them."""


def write_models(folder: Path) -> None:
    """Writes each model of the hub under its own name: its config.json, and a file of weights without any."""
    for name, config in PUBLISHED.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config.to_dict()))
        arrays = {f"encoder.layer.{number}": np.zeros(1, np.float32) for number in range(24)}
        safetensors.numpy.save_file(arrays, folder / name / "model.safetensors")
    _write_tokenizer(folder / "vocabulary")


def read_row(row: str, settings: Sequence[str] = ()) -> Recipe:
    """A row's recipe, with settings beside its own, in a working directory with the models; describes the runs that it starts from.

    Each of these runs has the name of the row that makes it, except DPR's.
    """
    text = (RECIPES_DIR / PAPERS / f"{row}.gin").read_text(encoding="utf-8")
    for run in re.findall(r'^MODEL = "runs/(.*)"', text, re.MULTILINE):
        if not Path("runs", run).exists():
            _write_run(run, None if run.startswith("dpr/") else read_row(run).model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*holds an encoder alone")
        return read_recipe([f"{PAPERS}{row}.gin"], settings)


def _write_run(name: str, model: DualEncoder | None) -> None:
    """Describes a run without parameters; without a model it is DPR's."""
    tower = TowerConfig(BertConfig(vocab_size=30522), pooling="first", projection_dim=None, normalize=False)
    side = Side(load_tokenizer("vocabulary"), 512)
    run = Path("runs", name)
    describe_run(run, model=model or DualEncoder(tower, tower, ()), query=side, doc=side)
    (run / "checkpoints" / "0").mkdir(parents=True)


def _write_tokenizer(folder: Path) -> None:
    """A vocabulary of two words, as BERT's."""
    folder.mkdir()
    pieces = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "dense", "retrieval")
    tokenizer = tokenizers.Tokenizer(WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(list(pieces[:4]))
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
