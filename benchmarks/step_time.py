"""Pairs per second, model FLOP utilisation and memory of one training step, beside torch in the same run; prints one JSON line.

python -m benchmarks.step_time --model small --batch_size 32 --real_lengths --repeats 3
python -m benchmarks.step_time --model all-MiniLM-L6-v2/ --dataset_dir data/beir/scifact --optimizer adamw --repeats 3
python -m benchmarks.step_time --model base --batch_size 512 --query_length 64 --doc_length 256 --peak_tflops 790 --no_peer

A step is what `de-jax train` compiles: both towers, the loss, the gradient, clipping and the optimizer. The peer is the same
model in torch (transformers' encoder, dropout, autocast for bfloat16, clipping, the optimizer of the same name), padded to the
longest text of each batch; ours is packed, as in `beir_pairs`. Useful FLOPs count only real tokens, computed FLOPs all tokens of
the rows. Before anything is timed, both sides compute the loss of the first batch without dropout, and the report has its relative
difference. Runs alternate; the speed-up is the median of the ratios within one repeat. On a machine that others use, put
`taskset -c 0` before the command and add `--clock cpu`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import lengths, measure, model_parts, peers
from de_jax import command
from de_jax.data.batches import layout
from de_jax.interop.fine_tuning import TowerName
from de_jax.models.dual_encoder import DualEncoder
from de_jax.recipe import Recipe
from de_jax.training.mesh import plan, sharding
from de_jax.types import Batch, InputError, Packed, Params

REAL_LENGTH: dict[TowerName, int] = {"query": 64, "doc": 256}
LONGEST = 2**20  # tokens; none is cut
LOSSES = ("in_batch_softmax", "samtone")


def main(argv: list[str] | None = None) -> None:
    """The command."""
    print(json.dumps(measured(argv)))


def measured(argv: list[str] | None = None) -> dict[str, Any]:
    """The report that the command prints."""
    args = _parse_args(argv)
    if not args.real_lengths and not args.dataset_dir and not (args.query_length and args.doc_length):
        raise InputError("no lengths are given; add --real_lengths, --dataset_dir, or both --query_length and --doc_length.")
    recipe = measure.read_model(args.model, args.recipe, _bindings(args))
    peak = args.peak_tflops or measure.peak_tflops(args.dtype, args.clock)
    batches = _batches(recipe.model, args, recipe.devices.num_chunks)
    params = measure.params_of(recipe)
    runs: dict[str, Any] = {} if args.no_ours else {"ours": Ours(recipe, params, [drawn.ours for drawn in batches])}
    if args.compile_only:
        return {"compile_seconds": runs["ours"].compile_seconds}
    pairs, reason = dict.fromkeys(runs, args.batch_size), _why_no_peer(args)
    if reason is None:
        options = {name: getattr(args, name) for name in ("optimizer", "loss", "temperature", "dtype")}
        options["rates"] = recipe.optimization.rates()
        for name in ("peer", "peer_compiled") if args.peer_compiled else ("peer",):
            padded = [drawn.padded for drawn in batches]
            compiled = name == "peer_compiled"
            module = peers.same_tower(args.model, recipe.model, params, "query", "float32", compiled=compiled)
            runs[name] = peers.TorchStep(module, padded, **options)
    # Its program is compiled where there is something to compare with.
    first_loss = {name: run.first_loss() for name, run in runs.items()} if len(runs) > 1 else {}
    pairs |= {name: run.fit() for name, run in runs.items() if name != "ours"}
    parts = model_parts.of_step(recipe.model, params, [drawn.ours for drawn in batches]) if args.parts else {}
    timed = measure.in_turns({**runs, **parts}, args.repeats, args.clock)
    seconds = {name: timed[name] for name in runs}
    report: dict[str, Any] = {"benchmark": "step_time", "model": args.model, "dtype": args.dtype, "clock": args.clock}
    report |= {"loss": args.loss, "optimizer": args.optimizer, "batch_size": pairs, "peak_tflops": round(peak, 4)}
    report |= _lengths(batches) | _speed(seconds, recipe.model, batches, pairs, args.batch_size, peak)
    report |= {"memory_gib": {name: run.memory_gib() for name, run in runs.items()}, "first_loss": first_loss}
    if not args.no_ours:
        apart = {name: loss / first_loss["ours"] - 1 for name, loss in first_loss.items() if name != "ours"}
        report |= {"compile_seconds": runs["ours"].compile_seconds, "first_loss_apart": apart}
    if args.parts:
        needed = [name for name in timed if name != "peer_compiled"]
        report["parts"] = model_parts.shares({name: statistics.median(timed[name]) / len(batches) for name in needed})
    report |= {"peer": None if reason else "torch, transformers", "no_peer_because": reason}
    return report | {"sizes": measure.describe_model(recipe.model), **measure.environment()}


class Ours:
    """Our step over the batches in turn; one call is one pass over all of them."""

    def __init__(self, recipe: Recipe, params: Params, batches: list[Batch]) -> None:
        self.state = jax.jit(recipe.init)(params)
        self._batches = batches
        step = recipe.train_step(jax.eval_shape(recipe.init).params)
        jitted = jax.jit(step, donate_argnums=0, compiler_options=sharding.options_of_compiler(jax.default_backend()))
        start = time.perf_counter()
        self._compiled = {_shape(batch): jitted.lower(self.state, batch).compile() for batch in batches}
        self.compile_seconds = round(time.perf_counter() - start, 2)
        self._loss_of = jax.jit(lambda params, batch: recipe.loss(recipe.model.embed(params, batch))[0])

    def __call__(self) -> None:
        for batch in self._batches:
            self.state, _ = self._compiled[_shape(batch)](self.state, batch)
        jax.block_until_ready(self.state)

    def first_loss(self) -> float:
        """The loss of the first batch without dropout."""
        return float(self._loss_of(self.state.params, self._batches[0]))

    def memory_gib(self) -> dict[str, float]:
        """Arguments and temporaries of the largest step by the compiler, and the device's own peak where it keeps one."""
        sizes = [compiled.memory_analysis() for compiled in self._compiled.values()]
        found = {
            "arguments": max(size.argument_size_in_bytes for size in sizes),
            "temporaries": max(size.temp_size_in_bytes for size in sizes),
        }
        if stats := jax.local_devices()[0].memory_stats():
            found["device_peak"] = stats["peak_bytes_in_use"]
        return {name: round(size / 2**30, 3) for name, size in found.items()}


class Drawn(NamedTuple):
    """One batch, as ours is laid out and as padded to each side's longest text; the lengths of its texts."""

    ours: Batch
    padded: Batch
    lengths: dict[str, np.ndarray]


def _batches(model: DualEncoder, args: argparse.Namespace, num_chunks: int) -> list[Drawn]:
    """The batches of a run, in our layout and in the peer's."""
    rows = np.arange(args.batch_size, dtype=np.int32)
    texts = {kind: _texts(model, kind, fixed, args) for kind, fixed in (("query", args.query_length), ("doc", args.doc_length))}
    sizes = {kind: [np.array([len(text) for text in batch], np.int32) for batch in of] for kind, of in texts.items()}
    for kind, of in sizes.items():
        model.check_length(kind, max(int(size.max()) for size in of))
    padded = {kind: [peers.pad(batch).astype(np.int32) for batch in of] for kind, of in texts.items()}
    ours = padded if args.pad else _packed(texts, num_chunks)
    return [
        Drawn(
            Batch(ours["query"][i], ours["doc"][i], rows, rows),
            Batch(padded["query"][i], padded["doc"][i], rows, rows),
            {kind: sizes[kind][i] for kind in sizes},
        )
        for i in range(args.num_batches)
    ]


def _texts(model: DualEncoder, kind: TowerName, length: int | None, args: argparse.Namespace) -> list[list[np.ndarray]]:
    """The token ids of each text of each batch."""
    if args.dataset_dir:
        store = lengths.real_pairs(args.dataset_dir, args.model, args.batch_size * args.num_batches)[kind]
        texts = lengths.ids_of(store, length or REAL_LENGTH[kind])
        return [texts[start : start + args.batch_size] for start in range(0, len(texts), args.batch_size)]
    batches, vocab_size = [], getattr(model, kind).encoder.vocab_size
    for seed in range(args.seed, args.seed + args.num_batches):
        drawn = lengths.msmarco_like(kind, args.batch_size, seed) if args.real_lengths else np.full(args.batch_size, length)
        batches.append(lengths.RandomTexts(drawn, vocab_size=vocab_size, seed=seed).texts)
    return batches


def _packed(texts: dict[TowerName, list[list[np.ndarray]]], num_chunks: int) -> dict[TowerName, list[Packed]]:
    """The batches as a run packs them, in equal chunks."""
    stores = {kind: lengths.Texts([text for batch in of for text in batch]) for kind, of in texts.items()}
    rows = np.arange(stores["query"].num_texts).reshape(len(texts["query"]), -1)
    samples = {kind: layout.Sample(store, LONGEST, list(rows)) for kind, store in stores.items()}
    shapes = layout.packings(samples, row_multiple=num_chunks)
    laid_out = {kind: layout.packed_as(shapes[kind], one.store, one.max_length) for kind, one in samples.items()}
    return {kind: [lay_out(own, 0) for own in rows] for kind, lay_out in laid_out.items()}


def _speed(
    seconds: dict[str, list[float]],
    model: DualEncoder,
    batches: list[Drawn],
    pairs: dict[str, int],
    batch_size: int,
    peak: float,
) -> dict[str, Any]:
    """Times, speeds and speed-ups a pair; `pairs` of each run's batch, fewer than `batch_size` if a whole one did not fit."""
    medians = {name: statistics.median(values) / len(batches) for name, values in seconds.items()}
    a_pair = {name: [value / pairs[name] for value in values] for name, values in seconds.items()}
    useful, computed, padded = (
        3 * sum(_forward_flops(model, *sides(batch)) for batch in batches) / len(batches)
        for sides in (
            lambda drawn: (drawn.lengths["query"], drawn.lengths["doc"]),
            lambda drawn: (_row_lengths(drawn.ours.query), _row_lengths(drawn.ours.doc)),
            lambda drawn: (_row_lengths(drawn.padded.query), _row_lengths(drawn.padded.doc)),
        )
    )
    return {
        "seconds_per_step": {name: round(value, 4) for name, value in medians.items()},
        "pairs_per_second": {name: round(pairs[name] / value, 2) for name, value in medians.items()},
        "computed_over_useful": {"ours": round(computed / useful, 3), "peer": round(padded / useful, 3)},
        "mfu_useful": {
            name: round(useful * pairs[name] / batch_size / value / (peak * 1e12), 4) for name, value in medians.items()
        },
        "mfu_computed": round(computed / medians["ours"] / (peak * 1e12), 4) if "ours" in medians else None,
        "speedup": {name: measure.speedup(a_pair, "ours", name) for name in seconds if name != "ours" and "ours" in seconds},
    }


def _forward_flops(model: DualEncoder, query_lengths: np.ndarray, doc_lengths: np.ndarray) -> float:
    return sum(
        plan.forward_flops(tower.encoder, sizes) for tower, sizes in ((model.query, query_lengths), (model.doc, doc_lengths))
    )


def _row_lengths(texts: np.ndarray | Packed) -> np.ndarray:
    """The computed tokens of each row: all of them, padding included."""
    tokens = texts.tokens if isinstance(texts, Packed) else texts
    return np.full(len(tokens), tokens.shape[1])


def _lengths(batches: list[Drawn]) -> dict[str, Any]:
    return {
        f"{kind}_length": {
            "mean": round(float(np.mean([batch.lengths[kind].mean() for batch in batches])), 2),
            "longest": max(int(batch.lengths[kind].max()) for batch in batches),
            "rows": [jax.tree.leaves(getattr(batch.ours, kind))[0].shape for batch in batches],
        }
        for kind in ("query", "doc")
    }


def _shape(batch: Batch) -> tuple[Any, ...]:
    return tuple(leaf.shape for leaf in jax.tree.leaves(batch))


def _why_no_peer(args: argparse.Namespace) -> str | None:
    return "--no_peer was given" if args.no_peer else measure.why_no_torch()


def _bindings(args: argparse.Namespace) -> list[str]:
    encoder = measure.encoder_settings(args.model)
    settings = [f"{encoder}.dtype='{args.dtype}'", f"{encoder}.remat='{args.remat}'", f"Recipe.loss=@{args.loss}"]
    settings += [f"Optimization.optimizer=@{args.optimizer}", f"{args.loss}.temperature={args.temperature}", *args.gin]
    return [*settings, "DualEncoder.shared=('embedder', 'encoder', 'projection')"]


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="small", help=measure.MODEL_HELP)
    parser.add_argument("--recipe", default="recipes/sde.gin", help="the recipe of the step; its towers are shared here")
    parser.add_argument("--gin", action="append", default=[], metavar="NAME=VALUE", help="another setting of the recipe")
    parser.add_argument("--batch_size", type=int, default=32, help="pairs (default 32)")
    parser.add_argument("--num_batches", type=int, default=2, help="different batches in one run (default 2)")
    parser.add_argument("--real_lengths", action="store_true", help="MS MARCO-like lengths, see benchmarks/lengths.py")
    parser.add_argument("--dataset_dir", help="a BEIR folder, whose pairs are trained on; needs a model in a folder")
    parser.add_argument("--query_length", type=int, help="tokens of every query; of real texts the most (default 64)")
    parser.add_argument("--doc_length", type=int, help="tokens of every document; of real texts the most (default 256)")
    parser.add_argument("--pad", action="store_true", help="ours: pad each text instead of packing several in a row")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of the products, on both sides")
    parser.add_argument("--remat", default="none", choices=("none", "dots", "full"), help="ours: recomputation")
    parser.add_argument("--loss", default="in_batch_softmax", choices=LOSSES, help="default in_batch_softmax, both directions")
    parser.add_argument("--temperature", type=float, default=0.01, help="of the loss (default .01)")
    parser.add_argument("--optimizer", default="adafactor", choices=("adafactor", "adamw"), help="default adafactor")
    parser.add_argument("--repeats", type=int, default=3, help="measured runs of each side (default 3)")
    parser.add_argument("--peer_compiled", action="store_true", help="time the peer by torch.compile too")
    parser.add_argument("--no_peer", action="store_true", help="time ours alone")
    parser.add_argument("--compile_only", action="store_true", help="compile our step, which JAX keeps for later runs")
    parser.add_argument("--no_ours", action="store_true", help="time the peer alone; its batch is halved until it fits")
    parser.add_argument("--parts", action="store_true", help="time products and attention alone too, for BERT's and T5's kinds")
    parser.add_argument("--peak_tflops", type=float, help="what MFU is relative to (H200: 790); default: measured by a matmul")
    parser.add_argument("--clock", default="wall", choices=tuple(measure.CLOCKS), help="wall, or cpu seconds of one core")
    parser.add_argument("--seed", type=int, default=0, help="of lengths and tokens")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
