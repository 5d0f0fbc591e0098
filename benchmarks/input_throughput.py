"""Speed of each source of training batches, compared with a training step; prints one JSON line.

taskset -c 0 python -m benchmarks.input_throughput --model small --batch_size 32 --clock cpu

All sources read one data set of random words, in texts as long as MS MARCO's: `beir_pairs` (token stores), `seqio_pairs` (the same
folder as a seqio task, if seqio is installed) and `stored_pairs` (that task exported). The command checks that their batches are
equal, and measures the step on these batches. `times_faster` is the time of a step divided by the time of a batch: the median of
the ratios within one repeat. `opening` is the time before the first step, in which texts are tokenized; the export already holds
tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import lengths, measure
from benchmarks.step_time import Ours
from de_jax import command
from de_jax.data.sources.options import PairsOptions
from de_jax.data.sources.pair_store import stored_pairs
from de_jax.data.sources.seqio_batches import seqio_pairs
from de_jax.data.sources.seqio_tasks import import_seqio
from de_jax.data.sources.training_set import TrainingSet, beir_pairs
from de_jax.data.text import beir, tokenizing, vocabulary_training

NUM_WORDS = 500


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        os.environ["DE_JAX_CACHE"] = str(folder / "cache")
        _write_dataset(folder, args.num_pairs, args.seed)
        sources, opening = _open_sources(folder, args)
        batches = {name: list(itertools.islice(data.batches(0), args.num_batches)) for name, data in sources.items()}
        for made in batches.values():
            jax.tree.map(np.testing.assert_array_equal, made, batches["beir_pairs"])
        runs: dict[str, Callable[[], Any]] = {name: _Input(data, args.num_input_batches) for name, data in sources.items()}
        settings = [f"T5Config.dtype='{args.dtype}'", "T5Config.vocab_size=32128"]
        recipe = measure.read_model(args.model, "recipes/sde.gin", settings)
        runs["step"] = Ours(recipe, measure.params_of(recipe), batches["beir_pairs"])
        seconds = measure.in_turns(runs, args.repeats, args.clock)
        seconds = {name: [one / _count(name, args) for one in values] for name, values in seconds.items()}
        tokens = float(np.mean([_num_tokens(batch.query) + _num_tokens(batch.doc) for batch in batches["beir_pairs"]]))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    report = {
        "benchmark": "input_throughput",
        "model": args.model,
        "clock": args.clock,
        "batch_size": args.batch_size,
        "num_pairs": args.num_pairs,
        "tokens_per_batch": round(tokens, 1),
        "opening_seconds": opening,
        "seconds_per_batch": {name: round(value, 6) for name, value in medians.items()},
        "batches_per_second": {name: round(1 / value, 2) for name, value in medians.items()},
        "tokens_per_second": {name: round(tokens / value) for name, value in medians.items()},
        "times_faster": {name: measure.speedup(seconds, name, "step") for name in sources},
        "no_seqio_because": None if "seqio_pairs" in sources else "seqio is not installed",
    }
    print(json.dumps(report | {"sizes": measure.describe_model(recipe.model), **measure.environment()}))


class _Input:
    """Makes batches; each call continues where the previous one ended."""

    def __init__(self, data: TrainingSet, num_batches: int) -> None:
        self._batches = data.batches(0)
        self._num_batches = num_batches

    def __call__(self) -> None:
        for _ in range(self._num_batches):
            next(self._batches)


def _open_sources(folder: Path, args: argparse.Namespace) -> tuple[dict[str, TrainingSet], dict[str, float]]:
    """The sources by name, and the seconds that each took to open."""
    now = measure.CLOCKS[args.clock]
    options = PairsOptions(batch_size=args.batch_size, seed=args.seed)
    dataset, tokenizer = {"dataset_dir": str(folder / "data")}, {"tokenizer": str(folder)}
    with_tokenizer = dataclasses.replace(options, **tokenizer)
    makers: dict[str, Callable[[], TrainingSet]] = {"beir_pairs": lambda: beir_pairs(**dataset, options=with_tokenizer)}
    if importlib.util.find_spec("seqio") is not None:
        import_seqio()  # its seconds are not those of the data

        arguments = {"task": "benchmark", "module": "de_jax.tasks.beir", "module_args": dataset | tokenizer}
        makers["seqio_pairs"] = lambda: seqio_pairs(**arguments, options=options)
        makers["stored_pairs"] = lambda: stored_pairs(str(next(folder.glob("cache/pair_stores/benchmark-*"))), options=options)
    sources, opening = {}, {}
    for name, make in makers.items():
        start = now()
        sources[name] = make()
        opening[name] = round(now() - start, 3)
    return sources, opening


def _write_dataset(folder: Path, num_pairs: int, seed: int) -> None:
    """A BEIR folder of pairs, and a vocabulary whose pieces are its words."""
    rng = np.random.default_rng(seed)
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    words = np.array(["".join(rng.choice(syllables, 3)) for _ in range(NUM_WORDS)])
    texts = {
        kind: [" ".join(rng.choice(words, size - 1)) for size in lengths.msmarco_like(kind, num_pairs, seed).tolist()]
        for kind in ("query", "doc")
    }
    beir.write(
        folder / "data",
        [(f"d{row}", "", doc) for row, doc in enumerate(texts["doc"])],
        [(f"q{row}", query) for row, query in enumerate(texts["query"])],
        {"train": {f"q{row}": {f"d{row}": 1} for row in range(num_pairs)}},
    )
    vocabulary_training.train_sentencepiece(texts["doc"][:2000], folder / tokenizing.SENTENCEPIECE_FILE, vocab_size=NUM_WORDS + 20)


def _count(name: str, args: argparse.Namespace) -> int:
    return args.num_batches if name == "step" else args.num_input_batches


def _num_tokens(texts: Any) -> int:
    return int(np.count_nonzero(texts.tokens))


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="small", help="a model file: tiny, small, ... (default small)")
    parser.add_argument("--batch_size", type=int, default=32, help="pairs (default 32)")
    parser.add_argument("--num_pairs", type=int, default=20000, help="of the data set (default 20000)")
    parser.add_argument("--num_batches", type=int, default=2, help="steps in one run (default 2)")
    parser.add_argument("--num_input_batches", type=int, default=100, help="batches made in one run of a source (default 100)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of the step's products")
    parser.add_argument("--repeats", type=int, default=3, help="measured runs of each (default 3)")
    parser.add_argument("--clock", default="wall", choices=tuple(measure.CLOCKS), help="wall, or cpu seconds of one core")
    parser.add_argument("--seed", type=int, default=0, help="of the texts and of the shuffling")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
