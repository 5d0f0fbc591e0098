"""Queries per second of generation, beside transformers' generate with the same weights in the same run; prints one JSON line.

python -m benchmarks.generate_throughput --model tiny --num_docs 64 --num_queries 10 --repeats 3

Both sides draw with the same top_k and temperature from documents of MS MARCO-like lengths, and both write --max_length tokens of
every query: random weights seldom end a text, and an end that comes sooner on one side would look like speed. Greedy texts of some
documents are compared before. Runs alternate; a speed-up is the median of the ratios within one repeat. On a machine that others
use, put `taskset -c 0` before the command and add `--clock cpu`. Tokenization is left out on both sides.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import lengths, measure
from de_jax import command
from de_jax.files.outputs import write_json
from de_jax.interop.architectures import t5
from de_jax.interop.pretrained import FILE, disassemble, save
from de_jax.models.decoding import Decoding, generate
from de_jax.models.generator import START_ID, Generator
from de_jax.tools.doc2query import SIZES

MAX_DOC_LENGTH = 256


def main(argv: list[str] | None = None) -> None:
    """The command."""
    print(json.dumps(measured(argv)))


def measured(argv: list[str] | None = None) -> dict[str, Any]:
    """The report that the command prints."""
    args = _parse_args(argv)
    model = Generator(dataclasses.replace(SIZES[args.model], dtype=args.dtype))
    params = jax.jit(model.init)(jax.random.key(args.seed))
    texts = lengths.RandomTexts(
        lengths.msmarco_like("doc", args.num_docs, args.seed), vocab_size=model.t5.vocab_size, seed=args.seed
    )
    order = np.argsort(-texts.lengths(MAX_DOC_LENGTH), kind="stable")
    batches = [order[start : start + args.docs_per_batch] for start in range(0, len(order), args.docs_per_batch)]
    docs = [texts.pad(rows, MAX_DOC_LENGTH, int(texts.lengths(MAX_DOC_LENGTH)[rows].max())) for rows in batches]
    runs = {"ours": _ours(model, params, docs, args)}
    reason = "--no_peer was given" if args.no_peer else measure.why_no_torch()
    same = None
    if reason is None:
        peer = _torch_model(model, params, args.peer_dtype)
        same = _same_greedy(model, params, peer, docs[-1][: args.num_compared], args.max_length)
        runs["transformers"] = _theirs(peer, docs, args)
    seconds = measure.in_turns(runs, args.repeats, args.clock)
    num_queries = args.num_docs * args.num_queries
    return {
        "benchmark": "generate_throughput",
        **{
            name: getattr(args, name) for name in ("model", "dtype", "peer_dtype", "clock", "num_docs", "num_queries", "max_length")
        },
        "docs_per_batch": args.docs_per_batch,
        "queries_per_second": {name: round(num_queries / statistics.median(own), 2) for name, own in seconds.items()},
        "speedup": {name: measure.speedup(seconds, "ours", name) for name in seconds if name != "ours"},
        "share_of_equal_greedy_texts": same,
        "no_peer_because": reason,
        "sizes": dataclasses.asdict(model.t5),
        **measure.environment(),
    }


def _ours(model: Generator, params: Any, docs: list[np.ndarray], args: argparse.Namespace) -> Callable[[], Any]:
    decoding = Decoding(num_queries=args.num_queries, max_length=args.max_length, top_k=args.top_k, ends=False)
    run = jax.jit(generate, static_argnums=(0, 5))
    rounded = model.inference_params(params)

    def write() -> list[np.ndarray]:
        waiting = [run(model, rounded, rows, np.arange(len(rows), dtype=np.uint32), np.uint32(0), decoding) for rows in docs]
        return [np.asarray(tokens) for tokens in waiting]

    return write


def _theirs(peer: Any, docs: list[np.ndarray], args: argparse.Namespace) -> Callable[[], Any]:
    import torch

    options = {"num_return_sequences": args.num_queries, "max_new_tokens": args.max_length, "min_new_tokens": args.max_length}

    def write() -> list[np.ndarray]:
        found = []
        for rows in docs:
            tokens = torch.tensor(rows)
            found.append(peer.generate(tokens, attention_mask=tokens != 0, do_sample=True, top_k=args.top_k, **options).numpy())
        return found

    return write


def _torch_model(model: Generator, params: Any, dtype: str) -> Any:
    import torch
    from transformers import T5ForConditionalGeneration

    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder) / FILE, disassemble(jax.device_get(params), t5.generator_origins(model)))
        own = {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True, "use_cache": True}
        sizes = {"num_decoder_layers": model.num_decoder_layers or model.t5.num_layers, "decoder_start_token_id": START_ID}
        is_scaled = model.tied_logits if model.scaled_logits is None else model.scaled_logits
        write_json(Path(folder) / "config.json", {**t5.json_of(model.t5), **own, **sizes, "tie_word_embeddings": is_scaled})
        return T5ForConditionalGeneration.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def _same_greedy(model: Generator, params: Any, peer: Any, docs: np.ndarray, max_length: int) -> float:
    """The share of documents for which both write the same, in float32 on our side."""
    import torch

    exact = dataclasses.replace(model, t5=dataclasses.replace(model.t5, dtype="float32"))
    seeds = np.zeros(len(docs), np.uint32)
    greedy = Decoding("greedy", max_length=max_length)
    ours = np.asarray(jax.jit(generate, static_argnums=(0, 5))(exact, params, docs, seeds, np.uint32(0), greedy))[:, 0]
    tokens = torch.tensor(docs)
    theirs = peer.generate(
        tokens, attention_mask=tokens != 0, do_sample=False, num_beams=1, max_new_tokens=max_length, suppress_tokens=[0]
    ).numpy()[:, 1:]
    theirs = np.pad(theirs, ((0, 0), (0, max_length - theirs.shape[1])))
    return float((ours == theirs).all(axis=1).mean())


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="tiny")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of our matrix products")
    parser.add_argument("--peer_dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--num_docs", type=int, default=64)
    parser.add_argument("--num_queries", type=int, default=10, help="of each document")
    parser.add_argument("--docs_per_batch", type=int, default=16)
    parser.add_argument("--max_length", type=int, default=16, help="tokens of a query")
    parser.add_argument("--num_compared", type=int, default=8, help="documents whose greedy texts are compared before")
    parser.add_argument("--top_k", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clock", choices=measure.CLOCKS, default="wall", help="cpu on a machine that others use")
    parser.add_argument("--no_peer", action="store_true")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
