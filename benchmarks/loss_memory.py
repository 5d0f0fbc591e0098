"""How much memory does a loss need beside its embeddings and their gradients? Prints one JSON object to stdout.

python -m benchmarks.loss_memory --loss=samtone --batch_sizes 1024 4096 16384 65536 --block_sizes 128 512 2048

python -m benchmarks.loss_memory --model=small --rows_a_chunk=256 --batch_sizes 1024 8192 65536 --block_sizes 512

Value and gradient of the loss alone, by embeddings [B, 768], are compiled and never run, so that a batch of 65,536 is no matter.
`temporary_mib` is what XLA sets aside on each device beyond arguments and outputs; block size null is the dense form. With
`--model` the towers are part of it, over texts of 64 and 256 tokens, whole and in chunks of `--rows_a_chunk` texts.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks import measure
from de_jax.files.outputs import progress_bar
from de_jax.losses.in_batch import in_batch_softmax, nce, samtone
from de_jax.losses.pair_loss import pair
from de_jax.training.step.as_trained import ChunkedModel
from de_jax.types import Batch, Embeddings

LOSSES = {
    "in_batch_softmax": in_batch_softmax,
    "samtone": samtone,
    "samtone_both": functools.partial(samtone, same_tower="both"),
    "nce": nce,
    "pair": pair,
}
MIB = 2**20


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    if args.num_devices > 1:
        jax.config.update("jax_num_cpu_devices", args.num_devices)  # of no effect where the devices are not simulated
    mesh = jax.make_mesh((args.num_devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[: args.num_devices])
    by_rows = NamedSharding(mesh, PartitionSpec("data"))
    measured = []
    for batch_size in progress_bar(args.batch_sizes):
        for block_size in (None, *args.block_sizes):
            loss = functools.partial(LOSSES[args.loss], block_size=block_size)
            about = {"batch_size": batch_size, "block_size": block_size}
            if args.model is None:
                measured.append({**about, **_measure(*_loss_of_vectors(loss, batch_size, args, by_rows))})
                continue
            for num_chunks in sorted({1, max(1, batch_size // args.rows_a_chunk)}):
                step = _loss_of_tokens(loss, batch_size, num_chunks, args.model, by_rows)
                measured.append({**about, "num_chunks": num_chunks, **_measure(*step)})
    setting = {"loss": args.loss, "model": args.model, "dim": args.dim, "dtype": args.dtype, "num_neg_docs": args.num_neg_docs}
    setting["num_positives"] = args.num_positives
    device = {"platform": jax.default_backend(), "num_devices": args.num_devices, "jax": jax.__version__}
    print(json.dumps({**setting, **device, "measured": measured}))


def _loss_of_vectors(loss: Callable, batch_size: int, args: argparse.Namespace, by_rows: NamedSharding) -> tuple[Any, ...]:
    """The loss as a function of a batch's vectors and ids, and their shapes; no array is made."""

    def rows(*shape: int, dtype: str = args.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch_size, *shape), dtype, sharding=by_rows)

    vectors = {"query": rows(args.dim), "doc": rows(args.dim)}
    if args.num_neg_docs:
        vectors["neg_docs"] = rows(args.num_neg_docs, args.dim)
    ids = {"query_id": rows(dtype="int32"), "doc_id": rows(dtype="int32")}
    if args.num_positives:
        ids["positive_ids"] = rows(args.num_positives, dtype="int32")
    return lambda vectors, ids: loss(Embeddings(**vectors, **ids)), vectors, ids


def _loss_of_tokens(loss: Callable, batch_size: int, num_chunks: int, name: str, by_rows: NamedSharding) -> tuple[Any, ...]:
    """The loss as a function of both towers' parameters and a batch of token ids, and their shapes."""
    model = measure.read_model(name, "recipes/sde.gin", ["T5Config.scan_layers=True"]).model
    chunked_model = ChunkedModel(model, num_chunks) if num_chunks > 1 else model
    tokens = {
        field: jax.ShapeDtypeStruct((batch_size, *shape), "int32", sharding=by_rows)
        for field, shape in {"query": (64,), "doc": (256,), "query_id": (), "doc_id": ()}.items()
    }
    key = jax.eval_shape(lambda: jax.random.key(0))
    rng = jax.random.key(0)
    return lambda params, batch: loss(chunked_model.embed(params, batch, rng)), jax.eval_shape(model.init, key), Batch(**tokens)


def _measure(value_of: Callable, *shapes: Any) -> dict:
    """Memory of the compiled value and gradient, by the first argument, on one device, in MiB."""
    start = time.perf_counter()
    program = jax.jit(jax.value_and_grad(value_of, has_aux=True)).lower(*shapes).compile()
    seconds = time.perf_counter() - start
    memory = program.memory_analysis()
    return {
        "argument_mib": round(memory.argument_size_in_bytes / MIB, 2),
        "output_mib": round(memory.output_size_in_bytes / MIB, 2),
        "temporary_mib": round(memory.temp_size_in_bytes / MIB, 2),
        "compile_seconds": round(seconds, 2),
    }


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loss", choices=list(LOSSES), default="samtone")
    parser.add_argument("--batch_sizes", nargs="+", type=int, default=[2**n for n in range(10, 17)], help="default 1024 ... 65536")
    parser.add_argument("--block_sizes", nargs="+", type=int, default=[128, 512, 2048], help="beside the dense form")
    parser.add_argument("--dim", type=int, default=768, help="dimensions of an embedding")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the embeddings")
    parser.add_argument("--model", help="a model file, such as small: with its towers; the dimensions are its own")
    parser.add_argument("--rows_a_chunk", type=int, default=256, help="texts of a chunk of the towers (default 256)")
    parser.add_argument("--num_neg_docs", type=int, default=0, help="mined documents of a row")
    parser.add_argument("--num_positives", type=int, default=0, help="documents known to be relevant to a row's query")
    parser.add_argument("--num_devices", type=int, default=1, help="devices that share the rows; simulated on a CPU")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
