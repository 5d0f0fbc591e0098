"""Readers of adapters, of an exported tower that is served, of FAISS's index, of YAML, and of a run's records."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
import safetensors.numpy
import yaml
from fuzz.models import BERT, SHARE, TOKENIZER, encoder_files, shown
from fuzz.outputs import GUARDED
from fuzz.reader import Reader, naive_text, one_file, plain, written
from fuzz.vocabularies import json_vocabulary

from de_jax.interop import any_model, served_encoder
from de_jax.retrieval import faiss_index
from de_jax.training.run import loop, recipe_file
from de_jax.types import InputError

LORA = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["query"], "bias": "none"}
ENVIRONMENT = {"from_step": 0, "de_jax": "0.2.0", "python": "3.11.7", "jax": "0.10.2", "device": "cpu", "num_devices": 1}
TABLE = "paper: a\ntables:\n  - {name: one, rows: [1, 2.5, null]}\n  - name: two\n    on: 2026-11-27\n"


def readers(folder: Path) -> list[Reader]:
    return [_adapters(folder), _served(folder), _faiss(folder), *_records(folder)]


def _adapters(folder: Path) -> Reader:
    """Adapters of one kernel; the base beside them is whole, and a value is compared where the change is harmless."""
    words = {"tokenizer.json": json_vocabulary(), "tokenizer_config.json": json.dumps(TOKENIZER)}
    base, rng = written(folder, "base_of_adapters", {**encoder_files(BERT), **words}), np.random.default_rng(3)
    name = "base_model.model.encoder.layer.0.attention.self.query.lora_"
    arrays = {f"{name}{side}.weight": rng.normal(size=shape).astype(np.float32) for side, shape in (("A", (2, 4)), ("B", (4, 2)))}
    config = json.dumps({**LORA, "base_model_name_or_path": str(base)})
    files = {"adapter_config.json": config, "adapter_model.safetensors": safetensors.numpy.save(arrays)}
    return Reader(
        "adapters", written(folder, "adapters", files), tuple(files), lambda one: shown(any_model.read(one)), None, (), SHARE
    )


def _served(folder: Path) -> Reader:
    """A tower that sums the rows of a table; its program is a file that no naive reader has."""
    table = np.arange(24, dtype=np.float32).reshape(12, 2)
    shapes = {"table": jax.ShapeDtypeStruct(table.shape, table.dtype)}, jax.ShapeDtypeStruct((1, 16), np.int32)
    function = jax.export.export(jax.jit(lambda params, tokens: params["table"][tokens].sum(axis=1)))(*shapes).serialize()
    settings = {"prompt": "", "pad_id": 0, "prefix_ids": [2], "suffix_ids": [3], "max_length": 16, "dim": 2}
    settings |= {"tokenizer": "tokenizers/a", "parameters": ["table"], "function": "query.bin"}
    files = {"serving.json": json.dumps({"query": settings, "doc": settings}), "query.bin": bytes(function)}
    kept = written(folder, "served", {**files, "tokenizers/a/tokenizer.json": json_vocabulary()})
    np.savez(kept / "parameters.npz", table=table)

    def read(one: Path) -> Any:
        try:
            found = served_encoder.Encoder(one, "query")
        except served_encoder.InputError as error:  # the file is copied into exports, without the library
            raise InputError(" ".join(str(error).split())) from None
        return plain([found._settings, {name: np.asarray(array) for name, array in found._params.items()}])

    names = ("serving.json", "query.bin", "parameters.npz", "tokenizers/a/tokenizer.json")
    return Reader("served tower", kept, names, read, None, names[1:], SHARE)


def _faiss(folder: Path) -> Reader:
    """Checksums guard it: FAISS's own reader ends the process at some damage."""
    docs, kept = np.eye(4, dtype=np.float32), folder / GUARDED / "faiss"
    faiss_index.FaissIndex.build(docs, list("abcd"), factory="IVF2,Flat", train_size=4).save(kept)

    def read(one: Path) -> Any:
        return plain(faiss_index.FaissIndex.load(one).search(docs, 1).doc_rows)

    whole, names = read(kept), tuple(sorted(path.name for path in kept.iterdir()))
    return Reader("faiss index", kept, names, read, lambda one: whole, names, SHARE)


def _records(folder: Path) -> list[Reader]:
    recipe = {"format": 1, "initialization": {"seed": 3, "init_from": None}, "loss": {"function": "samtone"}}
    kept = written(folder, "records", {"recipe.json": json.dumps(recipe), "environment.json": json.dumps([ENVIRONMENT])})
    # By its file: beside the tests lies a folder of that name.
    read_yaml = runpy.run_path(str(Path(__file__).resolve().parents[2] / "reproduction" / "yaml_files.py"))["read_yaml"]
    return [
        Reader("recipe.json", kept, ("recipe.json",), lambda one: plain(recipe_file.read_recipe_file(one)), None),
        Reader(
            "environment.json",
            kept,
            ("environment.json",),
            lambda one: plain(loop.environments(one)),
            None,
        ),
        one_file(
            folder,
            "yaml",
            "a.yaml",
            TABLE,
            lambda path: plain(read_yaml(path)),
            lambda path: plain(yaml.load(naive_text(path), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))),
        ),
    ]
