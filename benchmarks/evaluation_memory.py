"""Peak memory of `evaluate beir`, BM25 and fusion included; prints one JSON line.

python -m benchmarks.evaluation_memory --num_docs 57638 --num_queries 648

The words of the corpus are drawn by Zipf's law, and 57,638 documents are as many as FiQA has. The tower is tiny, except for the
size of its embeddings, so the figure shows the memory that grows with the corpus; the memory of a large model comes on top. The
evaluation runs in a fresh child process.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from benchmarks import measure
from de_jax.data.text import beir, tokenizing, vocabulary_training
from de_jax.data.text.tokenizing import Side
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig
from de_jax.training.optim.optimizer import adafactor, linear, make_optimizer
from de_jax.training.run.checkpoint import Checkpoints
from de_jax.training.run.run_folder import CHECKPOINTS_DIR, describe_run
from de_jax.training.step.train_step import init_state

NUM_WORDS, VOCAB_SIZE = 200_000, 1000


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        docs = [(f"d{row}", "", line) for row, line in enumerate(_texts(args.num_docs, args.doc_words, seed=0))]
        queries = [(f"q{row}", line) for row, line in enumerate(_texts(args.num_queries, 10, seed=1))]
        beir.write(folder / "data", docs, queries, {"test": {query_id: {"d0": 1} for query_id, _ in queries}})
        vocabulary_training.train_sentencepiece(
            [line for _, _, line in docs[:2000]], folder / "spiece.model", vocab_size=VOCAB_SIZE
        )
        _write_run(folder, args.dim)
        start = time.monotonic()
        command = [
            sys.executable,
            "-m",
            "de_jax",
            "evaluate",
            "beir",
            f"--run_dir={folder / 'run'}",
            f"--dataset_dir={folder / 'data'}",
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "DE_JAX_CACHE": str(folder / "cache")})
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    sizes = {name: getattr(args, name) for name in ("num_docs", "num_queries", "doc_words", "dim")}
    seconds = round(time.monotonic() - start, 1)
    print(json.dumps({"peak_mib": round(peak, 1), "seconds": seconds, "sizes": sizes, **measure.environment()}))


def _texts(num_texts: int, num_words: int, *, seed: int) -> Iterator[str]:
    rng = np.random.default_rng(seed)
    for _ in range(num_texts):
        yield " ".join(_word(int(number)) for number in rng.zipf(1.1, num_words) % NUM_WORDS)


def _word(number: int) -> str:
    letters = ""
    while number or not letters:
        number, place = divmod(number, 100)
        letters += "bcdfghjklmnpqrstvwxz"[place // 5] + "aeiou"[place % 5]
    return letters


def _write_run(folder: Path, dim: int) -> None:
    encoder = T5Config(vocab_size=VOCAB_SIZE, model_dim=16, num_layers=1, num_heads=2, head_dim=8, mlp_dim=32, dtype="float32")
    model = DualEncoder(TowerConfig(encoder, projection_dim=dim), TowerConfig(encoder, projection_dim=dim))
    tokenizer = tokenizing.load_tokenizer(folder / "spiece.model")
    describe_run(folder / "run", model=model, query=Side(tokenizer, 64), doc=Side(tokenizer, 256))
    checkpoints = Checkpoints(folder / "run" / CHECKPOINTS_DIR, keep=1)
    tx = functools.partial(make_optimizer, adafactor, linear(peak=1.0, num_steps=1))
    checkpoints.save(0, init_state(model, tx, jax.random.key(0)))
    checkpoints.close()


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_docs", type=int, default=57638)
    parser.add_argument("--num_queries", type=int, default=648)
    parser.add_argument("--doc_words", type=int, default=130)
    parser.add_argument("--dim", type=int, default=768, help="of the embeddings")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
