"""Texts per second of encoding on MS MARCO-like lengths, beside torch in the same run; prints one JSON line.

python -m benchmarks.encode_throughput --model small --num_passages 1000 --num_queries 4000 --repeats 5
python -m benchmarks.encode_throughput --model all-MiniLM-L6-v2/ --dataset_dir data/beir/nfcorpus --max_doc_length 256 --parts

Ours is de_jax.retrieval.encode with its defaults. The peer is sentence-transformers' encode where it is installed, else
transformers with the texts sorted by length as sentence-transformers sorts them; both hold the same parameters, and the cosine of
its embeddings with ours is reported. On a CPU, ONNX Runtime and OpenVINO run the same model on texts sorted in the same way, where
they are installed (see benchmarks/runtimes.py). Runs alternate; a speed-up is the median of the ratios within one repeat. On a
machine that others use, put `taskset -c 0` before the command and add `--clock cpu`. Tokenization is left out on both sides.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import lengths, measure, model_parts, peers, runtimes
from de_jax import command
from de_jax.interop.fine_tuning import TowerName
from de_jax.models.bert import BertConfig
from de_jax.models.dual_encoder import DualEncoder
from de_jax.retrieval import encode
from de_jax.retrieval.encode import Store
from de_jax.training.mesh import plan
from de_jax.types import InputError

TEXTS: dict[TowerName, str] = {"doc": "passages", "query": "queries"}


def main(argv: list[str] | None = None) -> None:
    """The command."""
    print(json.dumps(measured(argv)))


def measured(argv: list[str] | None = None) -> dict[str, Any]:
    """The report that the command prints."""
    args = _parse_args(argv)
    settings = [f"{measure.encoder_settings(args.model)}.dtype='{args.dtype}'", *args.gin]
    recipe = measure.read_model(args.model, "recipes/sde.gin", settings)
    model, max_length = recipe.model, {"doc": args.max_doc_length, "query": args.max_query_length}
    for kind in TEXTS:
        model.check_length(kind, max_length[kind])
    params = measure.params_of(recipe, args.seed)
    if args.parts and not isinstance(model.doc.encoder, BertConfig):
        raise InputError("--parts needs a model of BERT's kind; benchmarks.encoder_parts times those of T5's.")
    peak = args.peak_tflops or measure.peak_tflops(args.dtype, args.clock)
    report: dict[str, Any] = {"benchmark": "encode_throughput", "model": args.model, "dtype": args.dtype, "clock": args.clock}
    report["peak_tflops"] = round(peak, 4)
    reason = "--no_peer was given" if args.no_peer else measure.why_no_torch()
    report["peer"], report["peer_batch_size"] = None, args.peer_batch_size
    for kind in TEXTS:
        texts = _texts(model, kind, args)
        drawn = texts.lengths(max_length[kind])
        encode_by = _encoding(texts, max_length[kind], args)
        tower_params = model.inference_params(params, kind)
        runs = {"ours": functools.partial(encode_by, _tower(model, tower_params, kind))}
        if reason is None:
            report["peer"], theirs = _theirs(model, params, lengths.ids_of(texts, max_length[kind]), kind, args)
            runs |= theirs
        parts = model_parts.of_encoding(model.doc.encoder, tower_params, encode_by) if args.parts else {}
        timed = measure.in_turns({**runs, **parts}, args.repeats, args.clock)
        report[TEXTS[kind]] = _report(runs, {name: timed[name] for name in runs}, drawn, model, peak)
        if parts:
            names = {"ours": "ours", **dict(zip(parts, parts, strict=True)), "peer": f"peer_{args.dtype}"}
            medians = {ours: statistics.median(timed[name]) for ours, name in names.items() if name in timed}
            report[TEXTS[kind]]["parts"] = model_parts.shares(medians)
    return report | {"no_peer_because": reason, "sizes": measure.describe_model(model), **measure.environment()}


def _texts(model: DualEncoder, kind: TowerName, args: argparse.Namespace) -> Store:
    num_texts = {"doc": args.num_passages, "query": args.num_queries}[kind]
    if args.dataset_dir:
        return lengths.real_texts(args.dataset_dir, args.model, kind, num_texts)
    drawn = lengths.msmarco_like(kind, num_texts, args.seed)
    return lengths.RandomTexts(drawn, vocab_size=model.doc.encoder.vocab_size, seed=args.seed)


def _tower(model: DualEncoder, params: Any, kind: str) -> encode.EncodeFn:
    return functools.partial(
        jax.jit(lambda params, tokens, lengths: model.encode_rows(kind, params, tokens, lengths=lengths)), params
    )


def _encoding(texts: Store, max_length: int, args: argparse.Namespace) -> Callable[[encode.EncodeFn], np.ndarray]:
    """A function that encodes the texts by a tower."""
    batching = {"tokens_per_batch": args.tokens_per_batch, "length_multiple": args.length_multiple}
    return lambda encode_fn: encode.encode(encode_fn, texts, max_length=max_length, **batching)


def _theirs(
    model: DualEncoder, params: Any, texts: list[np.ndarray], kind: TowerName, args: argparse.Namespace
) -> tuple[str, dict[str, Callable[[], np.ndarray]]]:
    runs, name = {}, ""
    for dtype in args.peer_dtypes:
        for compiled in (False, True) if args.peer_compiled else (False,):
            name, peer = peers.encoder_peer(peers.same_tower(args.model, model, params, kind, dtype, compiled=compiled))
            run = f"peer_{dtype}_compiled" if compiled else f"peer_{dtype}"
            runs[run] = functools.partial(peer, texts, args.peer_batch_size)
    return name, runs | _in_runtimes(model, params, texts, kind, args)


def _in_runtimes(
    model: DualEncoder, params: Any, texts: list[np.ndarray], kind: TowerName, args: argparse.Namespace
) -> dict[str, Callable[[], np.ndarray]]:
    """The peer's model in the runtimes that are asked for."""
    if not args.peer_runtimes:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        runtimes.export(peers.same_tower(args.model, model, params, kind, "float32"), file := Path(folder) / "tower.onnx")
        opened = {name: runtimes.opened(name, file) for name in args.peer_runtimes}
    return {name: functools.partial(peers.encode_sorted, run, texts, args.peer_batch_size) for name, run in opened.items()}


def _report(
    runs: dict[str, Callable[[], np.ndarray]], seconds: dict[str, list[float]], drawn: np.ndarray, model: DualEncoder, peak: float
) -> dict[str, Any]:
    """Speeds, model FLOP utilisation on real tokens, speed-ups, and the least cosine between ours and each peer."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    flops = plan.forward_flops(model.doc.encoder, drawn)
    ours = np.asarray(runs["ours"]())
    others = [name for name in runs if name != "ours"]
    return {
        "num_texts": len(drawn),
        "mean_length": round(float(drawn.mean()), 2),
        "texts_per_second": {name: round(len(drawn) / median, 1) for name, median in medians.items()},
        "mfu_useful": round(flops / medians["ours"] / (peak * 1e12), 4),
        "speedup": {name: measure.speedup(seconds, "ours", name) for name in others},
        "min_cosine": {name: round(float(np.sum(ours * np.asarray(runs[name]()), axis=1).min()), 5) for name in others},
    }


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="small", help=measure.MODEL_HELP)
    parser.add_argument("--gin", action="append", default=[], metavar="NAME=VALUE", help="another setting of the model")
    parser.add_argument("--dataset_dir", help="a BEIR folder, whose texts are encoded; needs a model in a folder")
    parser.add_argument("--max_doc_length", type=int, default=256, help="tokens of a passage (default 256)")
    parser.add_argument("--max_query_length", type=int, default=64, help="tokens of a query (default 64)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="ours computes in it")
    parser.add_argument("--num_passages", type=int, default=1000, help="passages of a run (default 1000)")
    parser.add_argument("--num_queries", type=int, default=4000, help="queries of a run (default 4000)")
    parser.add_argument("--repeats", type=int, default=5, help="measured runs of each side (default 5)")
    parser.add_argument("--tokens_per_batch", type=int, help="ours: tokens of a micro-batch; default by device")
    parser.add_argument("--length_multiple", type=int, help="ours: lengths are padded to multiples of it")
    parser.add_argument("--peer_dtypes", nargs="*", default=["bfloat16", "float32"], help="the peer's parameters and arithmetic")
    parser.add_argument("--peer_batch_size", type=int, default=32, help="the peer's texts per batch (default 32, as it has it)")
    parser.add_argument("--peer_compiled", action="store_true", help="time the peer by torch.compile too")
    at_hand = runtimes.installed() if jax.default_backend() == "cpu" else []
    parser.add_argument(
        "--peer_runtimes", nargs="*", default=at_hand, choices=runtimes.RUNTIMES, help="runtimes of CPUs; default those installed"
    )
    parser.add_argument("--no_peer", action="store_true", help="time ours alone")
    parser.add_argument("--parts", action="store_true", help="time the parts of ours alone too, for BERT's kind")
    parser.add_argument("--peak_tflops", type=float, help="what MFU is relative to (H200: 790); default: measured by a matmul")
    parser.add_argument("--clock", default="wall", choices=tuple(measure.CLOCKS), help="wall, or cpu seconds of one core")
    parser.add_argument("--seed", type=int, default=0, help="of lengths, tokens and parameters")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
