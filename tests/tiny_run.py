"""Ten documents and a run with random parameters: what tools that load a run need, in a second."""

import functools

import jax
import numpy as np

from de_jax.data.text import beir
from de_jax.data.text.tokenizing import Side, load_tokenizer
from de_jax.data.text.vocabulary_training import train_sentencepiece
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.static import StaticConfig
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig
from de_jax.training.optim.optimizer import adafactor, linear, make_optimizer
from de_jax.training.run.checkpoint import Checkpoints
from de_jax.training.run.run_folder import CHECKPOINTS_DIR, describe_run
from de_jax.training.step.train_step import init_state

WORDS = ("fox", "whale", "wolf", "sea", "den", "red", "blue", "grey", "deep", "quick")
DOCS = [(f"d{i}", WORDS[i], f"the {WORDS[i]} and the {WORDS[(i + 3) % 10]} of {WORDS[(i * 7) % 10]}") for i in range(10)]
QUERIES = [("q0", "red fox"), ("d3", "deep blue sea"), ("q2", "grey wolf den")]
QRELS = {"test": {"q0": {"d0": 1, "d5": 2}, "d3": {"d6": 1}}, "train": {"q2": {"d2": 1}}}


def write_dataset(folder):
    beir.write(folder, DOCS, QUERIES, QRELS)
    return folder


def train_tokenizer(path):
    train_sentencepiece([f"{a} {b} the of and" for a in WORDS for b in WORDS], path, vocab_size=30)
    return load_tokenizer(path)


def write_run(folder, steps=(3, 7), num_layers=1, is_static=False, **of_tower):
    """A run with checkpoints of steps that differ; `is_static`: a table of vectors alone."""
    tokenizer = train_tokenizer(folder / "spiece.model")
    sizes = {"vocab_size": 30, "model_dim": 16, "num_layers": num_layers, "num_heads": 2, "head_dim": 8, "mlp_dim": 32}
    encoder = T5Config(**sizes, dropout_rate=0.0, dtype="float32")
    dim = None if is_static else 8
    tower = TowerConfig(StaticConfig(vocab_size=30, model_dim=8) if is_static else encoder, projection_dim=dim, **of_tower)
    model = DualEncoder(tower, tower)
    describe_run(folder / "run", model=model, query=Side(tokenizer, 16), doc=Side(tokenizer, 24))
    checkpoints = Checkpoints(folder / "run" / CHECKPOINTS_DIR, keep=len(steps))
    tx = functools.partial(make_optimizer, adafactor, linear(peak=1e-2, num_steps=10))
    init = jax.jit(lambda key: init_state(model, tx, key))
    for step in steps:
        checkpoints.save(step, init(jax.random.key(step))._replace(step=np.int32(step)))
    checkpoints.close()
    return folder / "run"
