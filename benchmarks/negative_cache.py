"""Cost of a negative cache: steps per second with and without it, and its memory; prints one JSON line.

python -m benchmarks.negative_cache --model=base --batch_size=48 --capacity=512000 --num_negatives=64
python -m benchmarks.negative_cache --model=tiny --batch_size=16 --query_length=8 --doc_length=16 --capacity=32768 --num_negatives=4

Three steps take turns: `plain` has only in-batch negatives, `mined` gets its negatives with the batch, and `cached` draws them from
a full cache, encodes them and keeps them. So cached - mined is the cost of the cache, and mined - plain the cost of negatives. All
have the same towers, AdamW and padded texts of random tokens, each of the full length. `predicted_gib` is the size of the cache as
`de-jax plan` counts it, without running anything. `arguments_gib` is how much larger the arguments of the
compiled step, except its batch, are with the cache. On a machine that others use, put `taskset -c 0` before the command and add
`--clock cpu`.
"""

from __future__ import annotations

import argparse
import json
import statistics

import jax
import numpy as np

from benchmarks import measure
from de_jax import command
from de_jax.recipe import Recipe
from de_jax.training.mesh import plan, sharding
from de_jax.types import Batch, CachedDocs

GIB = 2**30
STEPS = {
    "plain": ("Recipe.loss=@in_batch_softmax", "in_batch_softmax.directions='query_to_doc'", "in_batch_softmax.temperature=0.05"),
    "mined": ("Recipe.loss=@ance", "ance.temperature=0.05"),
    "cached": ("Recipe.loss=@ance", "ance.temperature=0.05", "HardNegatives.negative_cache=@NegativeCache()"),
}
"""The settings that differ between the steps."""


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    steps = {name: Step(args, name) for name in STEPS}
    seconds = measure.in_turns(steps, args.repeats, args.clock)
    medians = {name: statistics.median(values) / args.num_steps for name, values in seconds.items()}
    sizes = ("model", "batch_size", "query_length", "doc_length", "embedding_dim", "capacity", "num_negatives", "refresh_fraction")
    report = {"benchmark": "negative_cache", "clock": args.clock, **{name: getattr(args, name) for name in sizes}}
    report |= {"seconds_per_step": {name: round(value, 4) for name, value in medians.items()}}
    report |= {"steps_per_second": {name: round(1 / value, 3) for name, value in medians.items()}}
    report |= {"slowdown": {name: measure.speedup(seconds, name, "cached") for name in ("plain", "mined")}}
    report |= {"predicted_gib": steps["cached"].cache_gib, "arguments_gib": round(_more_arguments(steps), 6)}
    report |= {"temporaries_gib": {name: round(step.memory.temp_size_in_bytes / GIB, 4) for name, step in steps.items()}}
    print(json.dumps(report | {"sizes": measure.describe_model(steps["cached"].recipe.model), **measure.environment()}))


class Step:
    """A compiled step over one batch; a call is `num_steps` updates."""

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        self.recipe, self._num_steps = _recipe(args, name), args.num_steps
        mesh, rng = self.recipe.devices.mesh(), np.random.default_rng(args.seed)
        abstract = jax.eval_shape(self.recipe.init)
        shardings = sharding.state_shardings(abstract, mesh)
        like = sharding.with_shardings(abstract, shardings)
        self.cache_gib = round(plan.bytes_per_device(like.cache) / GIB, 6)
        self._state = jax.jit(self.recipe.init, out_shardings=shardings)()
        if name == "cached":
            self._state = self._state._replace(cache=_full(like.cache, self.recipe.model.doc.encoder.vocab_size, args.seed))
        self._batch = sharding.place(_batch(args, name, self.recipe.model.doc.encoder.vocab_size, rng), mesh)
        step = sharding.compiled_step(self.recipe.train_step(abstract.params), shardings, mesh)
        self._step = step._replace(program=step.lower(self._state, self._batch).compile())
        self.memory = self._step.program.memory_analysis()
        self.batch_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._batch)) / mesh.size

    def __call__(self) -> None:
        for _ in range(self._num_steps):
            self._state, metrics = self._step(self._state, self._batch)
        jax.block_until_ready((self._state, metrics))


def _recipe(args: argparse.Namespace, name: str) -> Recipe:
    settings = {
        "Optimization.optimizer": "@adamw",
        "TowerConfig.projection_dim": args.embedding_dim,
        "T5Config.dtype": args.dtype,
        "PairsOptions.max_doc_length": args.doc_length,
    }
    if name == "cached":
        settings |= {f"NegativeCache.{size}": getattr(args, size) for size in ("capacity", "num_negatives", "refresh_fraction")}
    bindings = [f"{setting}={value}" for setting, value in settings.items()]
    return measure.read_model(args.model, "recipes/sde.gin", [*bindings, *STEPS[name], *args.gin])


def _batch(args: argparse.Namespace, name: str, vocab_size: int, rng: np.random.Generator) -> Batch:
    draw = lambda *shape: rng.integers(1, vocab_size, shape).astype(np.int32)  # noqa: E731
    num_rows, ids = args.batch_size, np.arange(args.batch_size, dtype=np.int32)
    batch = Batch(draw(num_rows, args.query_length), draw(num_rows, args.doc_length), ids, ids)
    if name != "mined":
        return batch
    neg_doc_ids = draw(num_rows, args.num_negatives) + num_rows
    return batch._replace(neg_docs=draw(num_rows, args.num_negatives, args.doc_length), neg_doc_ids=neg_doc_ids)


def _full(like: CachedDocs, vocab_size: int, seed: int) -> CachedDocs:
    """A cache without an empty slot, of documents that no batch has."""

    def make() -> CachedDocs:
        keys = jax.random.split(jax.random.key(seed))
        embedding = jax.random.normal(keys[0], like.embedding.shape)
        number = lambda first: jax.numpy.arange(first, first + len(like.doc_id), dtype=np.int32)  # noqa: E731
        return CachedDocs(
            tokens=jax.random.randint(keys[1], like.tokens.shape, 1, vocab_size, np.int32),
            query_id=number(10**8),
            doc_id=number(10**8),
            embedding=embedding / jax.numpy.linalg.norm(embedding, axis=1, keepdims=True),
            entered=number(-len(like.doc_id)),
            encoded=number(-len(like.doc_id)),
        )

    return jax.jit(make, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, like))()


def _more_arguments(steps: dict[str, Step]) -> float:
    plain, cached = (steps[name].memory.argument_size_in_bytes - steps[name].batch_bytes for name in ("plain", "cached"))
    return (cached - plain) / GIB


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="base", help="a model file: tiny, small, ..., or t5_1_0_small (default base)")
    parser.add_argument("--batch_size", type=int, default=48, help="pairs (default 48)")
    parser.add_argument("--query_length", type=int, default=32, help="tokens of every query (default 32)")
    parser.add_argument("--doc_length", type=int, default=160, help="tokens of every document (default 160)")
    parser.add_argument("--embedding_dim", type=int, default=512, help="dimensions of an embedding (default 512)")
    parser.add_argument("--capacity", type=int, default=512_000, help="documents in the cache (default 512000)")
    parser.add_argument("--num_negatives", type=int, default=64, help="negatives of a query (default 64)")
    parser.add_argument("--refresh_fraction", type=float, default=0.0, help="share encoded again after a step (default 0)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of the towers' products")
    parser.add_argument("--num_steps", type=int, default=3, help="updates in one measured run (default 3)")
    parser.add_argument("--repeats", type=int, default=3, help="measured runs of each step (default 3)")
    parser.add_argument("--clock", default="wall", choices=tuple(measure.CLOCKS), help="wall, or cpu seconds of one core")
    parser.add_argument("--gin", action="append", default=[], metavar="NAME=VALUE", help="another setting of the recipe")
    parser.add_argument("--seed", type=int, default=0, help="of the tokens")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
