"""Where the time of encoding one micro-batch goes, part by part, and what one product for query, key and value would change.

taskset -c 0 python -m benchmarks.encoder_parts --model small --rows 14 --length 72 --clock cpu

Each part is compiled alone and called once a layer on values of the real shapes and precisions, with each layer's own
parameters; `whole` is the encoder as it is used. Parts are timed in turns. XLA fuses across parts, so their sum may exceed the
whole; `peak_share` is a part's FLOPs per second by those of a large matrix product, for the parts that are products.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks import measure
from de_jax import command
from de_jax.models.attention import attend
from de_jax.models.layers import product, stream_dtype
from de_jax.models.t5 import RMSNorm, T5Config
from de_jax.types import Array

Part = tuple[Callable[..., Any], tuple[Any, ...], float]
"""A function of one layer, its arguments layer by layer, and its FLOPs in all layers."""


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    model = measure.read_model(args.model, "recipes/sde.gin", [f"T5Config.dtype='{args.dtype}'"]).model
    peak = 1e12 * (args.peak_tflops or measure.peak_tflops(args.dtype, args.clock))
    parts = _parts(model.doc.encoder, args.rows, args.length)
    runs = {name: _run(jax.jit(function), layers) for name, (function, layers, _) in parts.items()}
    params = jax.jit(model.init)(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (args.rows, args.length), 3, model.doc.encoder.vocab_size)
    whole = jax.jit(lambda params, tokens: model.encode_doc(params, tokens))
    runs["whole"] = _run(whole, ((model.inference_params(params, "doc"), tokens),))
    seconds = measure.in_turns({name: _often(run, args.calls) for name, run in runs.items()}, args.repeats, args.clock)
    medians = {name: statistics.median(values) / args.calls for name, values in seconds.items()}
    report: dict[str, Any] = {"benchmark": "encoder_parts", "model": args.model, "dtype": args.dtype, "clock": args.clock}
    report |= {"rows": args.rows, "length": args.length, "peak_tflops": round(peak / 1e12, 4)}
    report["milliseconds"] = {name: round(1e3 * value, 3) for name, value in medians.items()}
    report["share_of_whole"] = {name: round(value / medians["whole"], 3) for name, value in medians.items()}
    report["peak_share"] = {name: round(flops / medians[name] / peak, 3) for name, (_, _, flops) in parts.items() if flops}
    report["qkv_in_one"] = measure.speedup(seconds, "qkv in one product", "qkv in three products")
    print(json.dumps({**report, **measure.environment()}))


def _parts(config: T5Config, rows: int, length: int) -> dict[str, Part]:
    """Every part of a layer, and the same q, k and v by one product."""
    low, stream = jnp.dtype(config.dtype), stream_dtype(jnp.dtype(config.dtype))
    num_layers, joined = config.num_layers, config.num_heads * config.head_dim

    def drawn(dtype: jnp.dtype, *shape: int) -> Array:
        return jax.random.normal(jax.random.key(len(shape)), shape, dtype)

    def products(x: Array, *shapes: tuple[int, int]) -> Part:
        layers = tuple((x, *(drawn(low, *shape) + layer for shape in shapes)) for layer in range(num_layers))
        return _linear, layers, num_layers * 2 * rows * length * sum(a * b for a, b in shapes)

    x, hidden = drawn(stream, rows, length, config.model_dim), drawn(stream, rows, length, config.mlp_dim)
    context, heads = drawn(low, rows, length, joined), drawn(low, rows, length, config.num_heads, config.head_dim)
    bias, segments = drawn(jnp.dtype("float32"), config.num_heads, length, length), jnp.ones((rows, length), jnp.int32)
    norm = RMSNorm(config.dtype)
    norm_params = norm.init(jax.random.key(0), x)
    attention_flops = num_layers * 4 * rows * length * length * joined
    gated = config.activation == "gated_gelu"
    return {
        "qkv in three products": products(x, *[(config.model_dim, joined)] * 3),
        "qkv in one product": products(x, (config.model_dim, 3 * joined)),
        "attention": (attend, ((heads, heads, heads, bias, segments),) * num_layers, attention_flops),
        "out": products(context, (joined, config.model_dim)),
        "mlp in": products(x, *[(config.model_dim, config.mlp_dim)] * (2 if gated else 1)),
        "activation": (functools.partial(_gated_gelu, low), ((hidden, hidden),) * num_layers, 0)
        if gated
        else (nn.relu, ((hidden,),) * num_layers, 0),
        "mlp out": products(hidden.astype(low), (config.mlp_dim, config.model_dim)),
        "norms and residuals": (lambda x, y: norm.apply(norm_params, x + y), ((x, x),) * (2 * num_layers), 0),
    }


def _linear(x: Array, *kernels: Array) -> list[Array]:
    low = kernels[0].dtype
    return [product("ble,ef->blf", x.astype(low), kernel, stream_dtype(low)) for kernel in kernels]


def _gated_gelu(low: jnp.dtype, wi_0: Array, wi_1: Array) -> Array:
    return (nn.gelu(wi_0, approximate=True) * wi_1).astype(low)


def _run(function: Callable[..., Any], layers: tuple[tuple[Any, ...], ...]) -> Callable[[], None]:
    def run() -> None:
        jax.block_until_ready([function(*arguments) for arguments in layers])

    return run


def _often(run: Callable[[], None], calls: int) -> Callable[[], None]:
    def run_often() -> None:
        for _ in range(calls):
            run()

    return run_often


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="small", help="a model file: tiny, small, ..., or t5_1_0_small (default small)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rows", type=int, default=14, help="texts of the micro-batch (default 14)")
    parser.add_argument("--length", type=int, default=72, help="tokens of each (default 72)")
    parser.add_argument("--calls", type=int, default=10, help="calls of one measurement (default 10)")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each part (default 5)")
    parser.add_argument("--peak_tflops", type=float, help="the peak that speeds are relative to; default: measured by products")
    parser.add_argument("--clock", default="wall", choices=tuple(measure.CLOCKS), help="wall, or cpu seconds of one core")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
