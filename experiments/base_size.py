"""SamToNe's and DAFT's designs from an encoder of base size, many runs of few compiled programs (experiments/base_size.yaml).

python -m experiments.judge_tuning --prepare --data_dir=../shared/data/beir --out_dir=runs/tuning
python -m experiments.base_size --design=samtone --model=all-mpnet-base-v2 --data_dir=runs/tuning/data --out_dir=runs/base_size

A run is the library's own training step (`make_train_step` over `DualEncoder`, its losses and its optimizer), repeated inside one
program that takes the first parameters, the order of the pairs, the rate and the temperature. So all seeds and settings of an arm
share a compilation. Each finished run is a line of <out_dir>/<design>.jsonl with its test score for each query; the same command
continues after a stop.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import csv
import functools
import itertools
import json
import os
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import de_jax
from de_jax import command, losses
from de_jax.data.stores.corpus import TokenStore, tokenized
from de_jax.data.text import beir
from de_jax.evaluation import metrics
from de_jax.files import outputs
from de_jax.interop.fine_tuning import pretrained_tower
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.tower import PARTS
from de_jax.training.optim import optimizer, paths
from de_jax.training.step.as_trained import FrozenModel
from de_jax.training.step.train_step import init_state, make_train_step, update_step
from de_jax.types import Array, Batch, Embeddings, Metrics, Params, Ranking

MEASURE = "nDCG@10"
MOST_PAIRS = 20_000
NUM_DEV, MOST_DOCS = 700, 6_000
SEEDS, CHOOSING_SEED = (0, 1, 2, 3, 4), 9
RATES, FACTOR, MOST_RATES = (1e-5, 3e-5, 1e-4), 10**0.5, 6
TEMPERATURES = (0.05, 0.02, 0.1)


class Sizes(NamedTuple):
    """Sizes of the runs; a rehearsal makes them smaller."""

    num_steps: int = 64
    batch_size: int = 128
    query_length: int = 24
    doc_length: int = 64
    encode_rows: int = 256


class Set(NamedTuple):
    """Texts on the device, int32."""

    pair_rows: Array  # [MOST_PAIRS, 2] of the training pairs, of which the first `num_pairs` are real
    queries: Array  # [MOST_PAIRS, Lq]
    docs: Array  # [MOST_PAIRS, Ld]
    num_pairs: int
    corpus_docs: Array  # [n, Ld]
    asked: dict[str, Array]  # [q, Lq] by split
    qrels: dict[str, beir.Qrels]


class Arm(NamedTuple):
    """A way to train: stages of (frozen patterns, updates), each with a new optimizer."""

    model: DualEncoder
    start: Params
    stages: tuple[tuple[tuple[str, ...], int], ...]
    loss: Callable[[Embeddings], tuple[Array, Metrics]]
    rates: tuple[float, ...] = RATES
    teacher: tuple[DualEncoder, Params] | None = None  # the query tower learns its query embeddings


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    sizes = Sizes(*args.sizes) if args.sizes else Sizes()
    runs = Runs(args, sizes)
    outputs.write_json(args.out_dir / "registered.json", {"design": Path("experiments/base_size.yaml").read_text(encoding="utf-8")})
    DESIGNS[args.design](runs)
    print(json.dumps({"design": args.design, "runs": len(runs.done), "seconds": round(time.monotonic() - runs.began, 1)}))


class Runs:
    """The runs of a design, each done once.

    Attributes:
        done: by name, the record of each finished run.
    """

    def __init__(self, args: argparse.Namespace, sizes: Sizes) -> None:
        self.began, self.args, self.sizes = time.monotonic(), args, sizes
        self.whole = de_jax.load(args.model, dtype=None)
        self._path = args.out_dir / f"{args.design}.jsonl"
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        self.done: dict[str, dict[str, Any]] = {line["run"]: line for line in map(json.loads, lines)}
        self.set = functools.cache(self._set)
        self._programs: dict[str, concurrent.futures.Future[Any]] = {}
        self._pool = concurrent.futures.ThreadPoolExecutor(self.args.threads)

    def tower(self, **changes: Any) -> Any:
        """A tower of the model in bfloat16."""
        return pretrained_tower(
            source=str(self.args.model), dtype="bfloat16", dropout_rate=0.0, scan_layers=self.args.scan, **changes
        )

    def left(self) -> float:
        """Seconds until the design has to stop."""
        return float(self.args.seconds - (time.monotonic() - self.began))

    def compile(self, arms: dict[str, Arm], of_set: str) -> None:
        """Begins to compile the programs of all arms, in their order; those of other sets are the same."""
        self.set(of_set)
        for name, arm in arms.items():
            self._programs[name] = self._pool.submit(self._compile, name, arm, of_set)

    def choose(
        self, arms: dict[str, Arm], of_set: str, temperatures: Sequence[float] = TEMPERATURES
    ) -> dict[str, tuple[float, float]]:
        """The rate and temperature of each arm by the dev score."""
        found = {}
        for name, arm in arms.items():
            score = lambda rate, temperature: self._dev(name, arm, of_set, rate, temperature)  # noqa: B023, E731
            rates = {rate: score(rate, temperatures[0]) for rate in arm.rates}
            while len(rates) < MOST_RATES and (best := max(rates, key=rates.__getitem__)) in (min(rates), max(rates)):
                more = float(f"{best / FACTOR if best == min(rates) else best * FACTOR:.1g}")
                rates[more] = score(more, temperatures[0])
            rate = max(rates, key=rates.__getitem__)
            by_temperature = {one: score(rate, one) for one in temperatures}
            found[name] = rate, max(by_temperature, key=by_temperature.__getitem__)
            self._say(f"{name}: rates {rates}, temperatures {by_temperature}")
        return found

    def test(self, arms: dict[str, Arm], chosen: dict[str, tuple[float, float]], sets: Sequence[str], seeds: Sequence[int]) -> None:
        """Trains and scores all arms on the test splits, seed by seed."""
        for seed, of_set, (name, arm) in itertools.product(seeds, sets, arms.items()):
            rate, temperature = chosen[name]
            self._once(
                f"test-{of_set}-{name}-{seed}",
                lambda: self._scored(name, arm, of_set, rate, temperature, seed, "test"),  # noqa: B023
                {"set": of_set, "arm": name, "seed": seed, "rate": rate, "temperature": temperature},
            )

    def trained(self, name: str, arm: Arm, of_set: str, rate: float, temperature: float, seed: int) -> tuple[Params, Array]:
        """The parameters after a run, and the loss of each update."""
        data, total = self.set(of_set), sum(steps for _, steps in arm.stages)
        rng = np.random.default_rng([seed, 1])
        size, pairs = self.sizes.batch_size, data.num_pairs
        epochs = -(-total * size // (pairs // size * size))
        places = np.concatenate([rng.permutation(pairs)[: pairs // size * size] for _ in range(epochs)])[: total * size]
        if name not in self._programs:
            self.compile({name: arm}, of_set)
        program = self._programs[name].result()
        teacher = arm.teacher[1] if arm.teacher else {}
        order = jnp.asarray(places.reshape(total, size), jnp.int32)
        return program(arm.start, teacher, order, jnp.float32(rate), jnp.float32(temperature), data[:3])

    def record(self, name: str, **fields: Any) -> None:
        """Keeps a line."""
        self.done[name] = {"run": name, **fields}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "a") as file:
            file.write(json.dumps(self.done[name]) + "\n")

    def scores(self, model: DualEncoder, params: Params, of_set: str, split: str) -> dict[str, float]:
        """nDCG@10 by query."""
        data = self.set(of_set)
        docs = self._embedded(model, "doc", params, data.corpus_docs)
        queries = self._embedded(model, "query", params, data.asked[split])
        rows = np.asarray(jax.lax.top_k(queries @ docs.T, 10)[1])
        ids, doc_ids = [*data.qrels[split]], [str(row) for row in range(len(docs))]
        ranking = Ranking(rows, np.tile(-np.arange(10.0, dtype=np.float32), (len(rows), 1)))
        results = metrics.results_of(ranking, ids, doc_ids, drop_identical_ids=False)
        return metrics.scores_by_query(results, data.qrels[split], MEASURE)

    def _scored(self, name: str, arm: Arm, of_set: str, rate: float, temperature: float, seed: int, split: str) -> dict[str, Any]:
        params, values = self.trained(name, arm, of_set, rate, temperature, seed)
        by_query = self.scores(arm.model, params, of_set, split)
        report = {
            "mean": round(statistics.fmean(by_query.values()), 5),
            "loss": [round(float(values[0]), 4), round(float(values[-1]), 4)],
        }
        return report | ({"by_query": [round(value, 4) for value in by_query.values()]} if split == "test" else {})

    def _dev(self, name: str, arm: Arm, of_set: str, rate: float, temperature: float) -> float:
        run = f"dev-{of_set}-{name}-{rate:g}-{temperature:g}"
        score = lambda: self._scored(name, arm, of_set, rate, temperature, CHOOSING_SEED, "dev")  # noqa: E731
        return float(self._once(run, score, {})["mean"])

    def _once(self, run: str, make: Callable[[], dict[str, Any]], fields: dict[str, Any]) -> dict[str, Any]:
        if run not in self.done:
            if self.left() < 5:
                self._say("no time is left")
                os._exit(0)  # compilations would be waited for
            start = time.monotonic()
            self.record(run, **fields, **make(), seconds=round(time.monotonic() - start, 2))
        return self.done[run]

    def _compile(self, name: str, arm: Arm, of_set: str) -> Any:
        data, teacher = self.set(of_set), arm.teacher[1] if arm.teacher else {}
        order = jax.ShapeDtypeStruct((sum(steps for _, steps in arm.stages), self.sizes.batch_size), jnp.int32)
        number = jax.ShapeDtypeStruct((), jnp.float32)
        program = jax.jit(functools.partial(_train, arm)).lower(arm.start, teacher, order, number, number, data[:3]).compile()
        self._say(f"compiled {name}")
        return program

    def _embedded(self, model: DualEncoder, tower: str, params: Params, tokens: Array) -> Array:
        rows = min(self.sizes.encode_rows, len(tokens))
        padded = jnp.pad(tokens, [(0, -len(tokens) % rows), (0, 0)], constant_values=1)
        return _embed(model, tower, params, padded.reshape(-1, rows, tokens.shape[1])).reshape(len(padded), -1)[: len(tokens)]

    def _set(self, name: str) -> Set:
        folder, sizes = self.args.data_dir / name, self.sizes
        test = beir.read(folder, "test", skip_empty=True)
        with open(self.args.data_dir / f"{name}.csv", newline="", encoding="utf-8") as file:
            pairs = [(row["query"], row["doc"]) for row in csv.DictReader(file)]
        text_of = dict(zip(test.docs.ids, test.docs.texts, strict=True))
        judged = {
            "test": {query: {text_of[doc]: grade for doc, grade in own.items()} for query, own in test.qrels.items()},
            "dev": {},
        }
        for query, doc in pairs[:NUM_DEV]:
            judged["dev"].setdefault(query, {})[doc] = 1
        first = dict.fromkeys(doc for split in judged.values() for own in split.values() for doc in own)
        order = np.random.default_rng(0).permutation(len(test.docs.texts))
        others = [test.docs.texts[place] for place in order if test.docs.texts[place] not in first]
        corpus = [*first, *others[: max(0, MOST_DOCS - len(first))]]
        row_of = {text: str(row) for row, text in enumerate(corpus)}
        queries, docs = (list(dict.fromkeys(pair[side] for pair in pairs[NUM_DEV:])) for side in (0, 1))
        asked = {
            "test": dict(zip(test.queries.ids, test.queries.texts, strict=True)),
            "dev": {query: query for query in judged["dev"]},
        }
        places = [{text: place for place, text in enumerate(texts)} for texts in (queries, docs)]
        tokens = functools.partial(_tokens, self.whole.run.query.tokenizer)
        return Set(
            pair_rows=_filled(jnp.asarray([[places[0][query], places[1][doc]] for query, doc in pairs[NUM_DEV:]], jnp.int32)),
            queries=_filled(tokens(queries, sizes.query_length)),
            docs=_filled(tokens(docs, sizes.doc_length)),
            num_pairs=len(pairs) - NUM_DEV,
            corpus_docs=tokens(corpus, sizes.doc_length),
            asked={split: tokens([asked[split][query] for query in judged[split]], sizes.query_length) for split in judged},
            qrels={
                split: {query: {row_of[doc]: grade for doc, grade in own.items()} for query, own in of_split.items()}
                for split, of_split in judged.items()
            },
        )

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:.0f} s: {text}", file=sys.stderr, flush=True)


def _filled(rows: Array) -> Array:
    """Sets of one size share a program."""
    return jnp.pad(rows, [(0, MOST_PAIRS - len(rows)), (0, 0)])


def _tokens(tokenizer: Any, texts: Sequence[str], length: int) -> Array:
    store: TokenStore = tokenized(texts, tokenizer)
    return jnp.asarray(store.pad(np.arange(len(texts)), length, length))


@functools.partial(jax.jit, static_argnames=("model", "tower"))
def _embed(model: DualEncoder, tower: str, params: Params, tokens: Array) -> Array:
    encode = model.encode_query if tower == "query" else model.encode_doc
    return jax.lax.map(lambda rows: encode(params, rows), tokens)


def _train(
    arm: Arm, params: Params, teacher: Params, order: Array, rate: Array, temperature: Array, texts: tuple[Array, ...]
) -> tuple[Params, Array]:
    """All updates of a run; `texts` are the first three fields of a `Set`."""
    values, first = [], 0
    for frozen, num_steps in arm.stages:
        params, of_stage = _stage(arm, params, teacher, order[first : first + num_steps], rate, temperature, texts, frozen)
        values.append(of_stage)
        first += num_steps
    return params, jnp.concatenate(values)


def _stage(
    arm: Arm,
    params: Params,
    teacher: Params,
    order: Array,
    rate: Array,
    temperature: Array,
    texts: tuple[Array, ...],
    frozen: tuple[str, ...],
) -> tuple[Params, Array]:
    shape = optimizer.linear(peak=1.0, num_steps=len(order), warmup_steps=len(order) // 10)
    make_tx = functools.partial(optimizer.make_optimizer, optimizer.adamw, lambda step: rate * shape(step), frozen=frozen)
    model: Any = FrozenModel(arm.model, frozen) if frozen else arm.model
    state = init_state(types.SimpleNamespace(init=lambda rng: params), make_tx, jax.random.key(0))
    if arm.teacher:
        step = update_step(functools.partial(_imitation, model, arm.teacher[0], teacher), make_tx(params))
    else:
        loss = lambda e: arm.loss(e._replace(scale=1.0 / temperature))  # noqa: E731
        step = make_train_step(model, loss, make_tx(params))

    def update(state: Any, rows: Array) -> tuple[Any, Array]:
        pair_rows, queries, docs = texts
        own = pair_rows[rows]
        batch = Batch(query=queries[own[:, 0]], doc=docs[own[:, 1]], query_id=own[:, 0], doc_id=own[:, 1])
        state, found = step(state, batch)
        return state, found["loss"]

    state, values = jax.lax.scan(update, state, order)
    return state.params, values


def _imitation(
    model: Any, teacher: DualEncoder, teacher_params: Params, params: Params, batch: Batch, rng: Array
) -> tuple[Array, Metrics]:
    """1 - the cosine of each query's embedding with the teacher's; embeddings have length 1."""
    theirs = jax.lax.stop_gradient(teacher.encode_query(teacher_params, batch.query))
    own = model.embed(params, batch._replace(doc=None, doc_id=None)).query
    return 1.0 - (own * theirs).sum(-1).mean(), {}


def samtone(runs: Runs) -> None:
    """{own, fresh} x sharing x loss."""
    scaled: Any = {"temperature": None}
    by_name = {
        "none": functools.partial(losses.in_batch_softmax, **scaled),
        "query": functools.partial(losses.samtone, same_tower="query", **scaled),
        "both": functools.partial(losses.samtone, same_tower="both", **scaled),
        "pair": functools.partial(losses.pair, form="samtone_eq3", alpha=0.1, **scaled),
    }
    own, fresh = runs.tower(), runs.tower(projection_dim=256, projection_init="lecun_normal")
    sharings: dict[str, Any] = {
        "own_sde": (own, ("embedder", "encoder")),
        "own_ade": (own, ()),
        "fresh_sde": (fresh, PARTS),
        "fresh_spl": (fresh, ("projection",)),
    }
    arms = {}
    for (sharing, (tower, shared)), (name, loss) in itertools.product(sharings.items(), by_name.items()):
        model = DualEncoder(query=tower, doc=tower, shared=shared)
        arms[f"{sharing}_{name}"] = Arm(model, _start(model, runs.whole.run), (((), runs.sizes.num_steps),), loss)
    sets = ("medquad", "arxiv-title-abstract")
    for one in sets:
        by_query = runs.scores(arms["own_sde_none"].model, arms["own_sde_none"].start, one, "test")
        runs.record(f"start-{one}", set=one, arm="start", mean=statistics.fmean(by_query.values()), by_query=[*by_query.values()])
    runs.compile(arms, "medquad")
    runs.test(arms, runs.choose(arms, "medquad"), sets, SEEDS)


def daft(runs: Runs) -> None:
    """Depths of a query tower x ways to train it, under a document tower that was fine-tuned once."""
    steps, whole = runs.sizes.num_steps, runs.tower()
    loss = functools.partial(losses.in_batch_softmax, temperature=None, directions="query_to_doc")
    both = DualEncoder(query=whole, doc=whole, shared=("embedder", "encoder"))
    tuning = {"whole": Arm(both, _start(both, runs.whole.run), (((), 2 * steps),), loss)}
    chosen = runs.choose(tuning, "medquad")
    sets, apart = ("medquad", "nfcorpus"), DualEncoder(query=whole, doc=whole, shared=())
    arms: dict[str, dict[str, Arm]] = {}
    for one in sets:
        params, _ = runs.trained("whole", tuning["whole"], one, *chosen["whole"], seed=0)
        tuned = _apart(params)
        by_query = runs.scores(apart, tuned, one, "test")
        runs.record(
            f"test-{one}-whole-0",
            set=one,
            arm="whole",
            seed=0,
            mean=statistics.fmean(by_query.values()),
            by_query=[*by_query.values()],
        )
        arms[one] = dict(_light(runs, loss, apart, tuned, steps))
    runs.compile(arms["medquad"], "medquad")
    found = runs.choose(arms["medquad"], "medquad", temperatures=(0.05,))
    for seed, one in itertools.product(SEEDS[:3], sets):
        runs.test({f"{name}": arm for name, arm in arms[one].items()}, found, (one,), (seed,))


def _light(runs: Runs, loss: Any, apart: DualEncoder, tuned: Params, steps: int) -> Iterator[tuple[str, Arm]]:
    alone = ("doc/.*",)
    ways = {
        "at_once": (((), 2 * steps),),
        "aligned": ((alone, steps), ((), steps)),
        "frozen": ((alone, 2 * steps),),
        "imitate": ((alone, 2 * steps),),
    }
    for depth in (0, 1, 2, 4, 6):
        light = DualEncoder(query=runs.tower(layers=tuple(range(depth))), doc=apart.doc, shared=())
        start = {"query": paths.part_like(tuned["query"], light.shapes()["query"]), "doc": tuned["doc"]}
        rates = (1e-3, 3e-3, 1e-2) if not depth else (3e-5, 1e-4, 3e-4)
        for way, stages in ways.items():
            teacher = (apart, tuned) if way == "imitate" else None
            yield f"{depth}_{way}", Arm(light, start, stages, loss, rates, teacher)


def _start(model: DualEncoder, run: Any) -> Params:
    """The run's parameters in this model's parts; parts that the run lacks are fresh."""
    fresh = model.init(jax.random.key(CHOOSING_SEED))
    known = paths.by_path(_apart(run.params))

    def first(path: str, leaf: Array) -> Array:
        tower, _, rest = path.partition("/")
        return known.get(f"{'query' if tower == 'shared' else tower}/{rest}", leaf)

    return paths.map_with_path(first, fresh)


def _apart(params: Params) -> Params:
    """The parameters with every part in both towers."""
    return {tower: {**params.get("shared", {}), **params.get(tower, {})} for tower in ("query", "doc")}


DESIGNS = {"samtone": samtone, "daft": daft}


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--design", choices=list(DESIGNS), required=True)
    parser.add_argument("--model", required=True, help="what both towers start from")
    parser.add_argument("--data_dir", type=Path, required=True, help="of experiments.judge_tuning --prepare")
    parser.add_argument("--out_dir", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1e9, help="no run begins later")
    parser.add_argument("--threads", type=int, default=4, help="compilations at once")
    parser.add_argument("--scan", action="store_true", help="compile one layer in place of all")
    parser.add_argument("--sizes", type=int, nargs=5, metavar="N", help=f"to rehearse: {', '.join(Sizes._fields)}")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
