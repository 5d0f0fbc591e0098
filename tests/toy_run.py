"""A small data set and the settings of a tiny model for it: a whole run takes seconds."""

import re
import shutil

import numpy as np

from de_jax.data.text import beir, vocabulary_training

TOPICS = ("apple", "river", "engine", "violin", "castle", "pepper", "comet", "ladder")
SETTINGS = {
    "T5Config.vocab_size": 160,
    "T5Config.model_dim": 16,
    "T5Config.num_layers": 1,
    "T5Config.num_heads": 2,
    "T5Config.head_dim": 8,
    "T5Config.mlp_dim": 16,
    "T5Config.dtype": "float32",
    "TowerConfig.projection_dim": 16,
    "samtone.temperature": 0.05,
    "Optimization.learning_rate": 0.02,
    "Optimization.num_steps": 20,
    "Logging.log_every_steps": 5,
    "Logging.save_every_steps": 10,
    "Logging.evaluate_every_steps": 10,
    "PairsOptions.batch_size": 16,
    "PairsOptions.max_query_length": 16,
    "PairsOptions.max_doc_length": 32,
    "PairsOptions.dev_split": "dev",
}


ALL_DEVICES = {"make_mesh__data": -1}
"""For a run that shows something of several devices; the others take one, which is cheaper."""
NO_DROPOUT = {"T5Config__dropout_rate": 0.0}
"""For a run that shows nothing of random numbers, which take a third of its time."""


def word(rng):
    return "".join(c + v for c, v in zip(rng.choice(list("bdfgklmnprst"), 3), rng.choice(list("aeiou"), 3), strict=True))


def sentence(topic, number, rng):
    return f"{topic} {number} " + " ".join(word(rng) for _ in range(6))


def write_dataset(folder):
    """96 documents, a query to each: 80 to train on, 16 for the dev set; and a vocabulary of 160 pieces."""
    rng = np.random.default_rng(0)
    docs = [(f"d{i}", "", sentence(TOPICS[i % 8], i, rng)) for i in range(96)]
    queries = [(f"q{i}", f"{TOPICS[i % 8]} {i}") for i in range(96)]
    qrels = {"train": {f"q{i}": {f"d{i}": 1} for i in range(80)}, "dev": {f"q{i}": {f"d{i}": 1} for i in range(80, 96)}}
    beir.write(folder, docs, queries, qrels)
    vocabulary_training.train_sentencepiece([*(doc[2] for doc in docs)], folder / "spiece.model", vocab_size=160)
    return folder


def arguments(dataset_dir, run_dir, recipe="recipes/samtone_query.gin", **changes):
    """The command line of `de-jax train`; `Optimization__num_steps=3` changes a setting."""
    settings = {
        **SETTINGS,
        "make_mesh.data": 1,
        "beir_pairs.dataset_dir": dataset_dir,
        "PairsOptions.tokenizer": dataset_dir / "spiece.model",
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    return [f"--gin_file={recipe}", *(f"--gin.{name}={value}" for name, value in settings.items()), f"--run_dir={run_dir}"]


DAMAGED_TOKENIZER = r"tokenizers/\w+ is damaged: it is not the tokenizer that the run was trained with"


def with_another_tokenizer(run_dir, copied):
    """A copy of a run in which the vocabulary of a tokenizer differs in one character of a piece."""
    shutil.copytree(run_dir, copied)
    for file in (path for path in (copied / "tokenizers").rglob("*") if path.suffix in (".json", ".model")):
        content = file.read_bytes()
        pieces = re.compile(rb'(?<=")[a-z]{2,}(?=": ?\d)') if file.suffix == ".json" else re.compile(b"fox|the|and|a")
        place = [found.start() for found in pieces.finditer(content)][-1]
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    return copied
