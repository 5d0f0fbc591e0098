"""How many bytes does a T5 layer move on a TPU, and what keeps its products waiting? Prints one JSON object.

python -m benchmarks.layer_bytes --topology=v5e:2x2 --model=base --attention=fused

Compiles one layer forward and backward for one chip (minutes), with the rows that it has of 512 pairs of MS MARCO's mean lengths on
four chips: 39 of 256 tokens and 19 of 64. Needs `pip install 'de-jax-retrieval[plan]'`, no TPU; nothing is run.

`accessed_gb` is the compiler's own count over all memories. A copy between HBM and VMEM, next to the processor, counts four times,
and three times if it is cut into slices. `used_gb` leaves such copies out. `hbm_gb` counts all traffic of HBM. Each has a
ceiling: the time of the products over that of the bytes at HBM's speed, at most 1.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from de_jax.models import layers
from de_jax.models.t5 import T5Config, T5Layer
from de_jax.training.mesh import plan

SIZES = {
    "base": {"model_dim": 768, "num_heads": 12, "mlp_dim": 2048},
    "large": {"model_dim": 1024, "num_heads": 16, "mlp_dim": 2816},
}
ROWS = ((39, 256), (19, 64))
HBM_BYTES = {"v5e": 819e9, "v6e": 1640e9}
"""Per second, of a chip, by docs.cloud.google.com/tpu/docs."""
WIDTHS = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "u16": 2, "s8": 1, "pred": 1}
FREE = ("parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")


def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5e:2x2", help="TPUs; the layer is compiled for one of them (default v5e:2x2)")
    parser.add_argument("--model", default="base", choices=SIZES)
    parser.add_argument("--attention", default="auto", choices=("auto", "fused", "plain"))
    parser.add_argument("--dropout", type=float, default=0.1, help="rate (default .1)")
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    topology = plan.open_topology(args.topology)
    config = T5Config(**SIZES[args.model], num_layers=1, dropout_rate=args.dropout, attention=args.attention)
    compiled = compile_layer(config, topology.devices[0])
    costs = compiled.cost_analysis()
    flops = 3 * sum(plan.forward_flops(config, np.full(rows, length)) for rows, length in ROWS)
    used, hbm = counted(compiled.as_text())
    products, speed = flops / topology.chip.peak_flops, HBM_BYTES[args.topology.partition(":")[0]]
    report = {**vars(args), "products_ms": 1e3 * products}
    for name, size in (("accessed", float(costs["bytes accessed"])), ("used", used), ("hbm", hbm)):
        report |= {f"{name}_gb": size / 1e9, f"{name}_ceiling": min(1.0, products / (size / speed))}
    print(json.dumps({name: round(value, 3) if isinstance(value, float) else value for name, value in report.items()}))


def compile_layer(config: T5Config, device: Any) -> Any:
    """A layer's results and the gradient of everything that it reads."""
    layer, on_chip = T5Layer(config), jax.sharding.SingleDeviceSharding(device)

    def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=on_chip)

    def step(params: Any, key: Any, rows: Any, segments: Any, biases: Any, gradients: Any) -> Any:
        def forward(params: Any, rows: Any, biases: Any) -> Any:
            keys = jax.random.split(jax.random.wrap_key_data(key), len(rows))
            call = lambda *of: layer.apply({"params": params}, *of[:2], not config.dropout_rate, of[2], rngs={"dropout": of[3]})  # noqa: E731
            return [call(*of) for of in zip(rows, segments, biases, keys, strict=True)]

        results, backward = jax.vjp(forward, params, rows, biases)
        return results, backward(gradients)

    rows = [shape(*size, config.model_dim) for size in ROWS]
    biases = [shape(config.num_heads, length, length, dtype=jnp.float32) for _, length in ROWS]
    segments = [shape(*size, dtype=jnp.int32) for size in ROWS]
    made = jax.eval_shape(
        lambda key, *of: layer.init(key, *of[:2], True, of[2]), jax.random.key(0), rows[0], segments[0], biases[0]
    )
    params = jax.tree.map(lambda leaf: shape(*leaf.shape, dtype=leaf.dtype), made["params"])
    with layers.compiling_for("tpu"):
        return jax.jit(step).lower(params, shape(2, dtype=jnp.uint32), rows, segments, biases, rows).compile()


def counted(text: str) -> tuple[int, int]:
    """Bytes of a TPU's compiled program without loops: of the operands and results of its instructions, and to and from HBM."""
    entry = [found.groups() for line in text.partition("\nENTRY ")[2].splitlines() if (found := INSTRUCTION.match(line))]
    types = {name: result for name, result, _, _ in entry}
    used = hbm = 0
    for _, result, opcode, rest in entry:
        if opcode in FREE or opcode.endswith("-done") or "ConcatBitcast" in rest:
            continue
        if opcode.endswith("-start"):  # a copy, in pieces or whole, between the two memories or within one
            (a, a_is_far), (b, b_is_far) = _arrays(result)[:2]
            hbm += min(a, b) * (a_is_far + b_is_far)
            continue
        operands = [types[name] for name in re.findall(r"%([\w.\-]+)", rest.partition("), ")[0]) if name in types]
        arrays = [array for one in (result, *operands) for array in _arrays(one)]
        used, hbm = used + sum(size for size, _ in arrays), hbm + sum(size for size, is_far in arrays if is_far)
    return used, hbm


def _arrays(text: str) -> list[tuple[int, bool]]:
    """The bytes of each array of a type, and whether it lies in HBM."""
    found = re.findall(r"\b([a-z]+\d*)\[([\d,]*)\](\{[^}]*\})?", text)
    sizes = lambda dims: map(int, filter(None, dims.split(",")))  # noqa: E731
    return [(WIDTHS[d] * math.prod(sizes(dims)), "S(" not in layout) for d, dims, layout in found if d in WIDTHS]


if __name__ == "__main__":
    main()
