"""Compiles a recipe's training step for devices that are not there, and says what it needs of them; nothing is run or timed.

de-jax plan_run --topology=v5e:16x16 --gin_file=recipes/samtone_both.gin --gin_file=models/t5_1_1_xxl.gin --batch_size=4096 \\
    --gin.make_mesh.fsdp=16 --gin.T5Config.remat=full --gin.T5Config.scan_layers=True

Neither data nor a tokenizer is read: every text is taken to be as long as the recipe allows, one a row. Real texts are shorter
and share rows; `--query_rows` and `--doc_rows` say how many rows of the longest length they take. A TPU topology needs the
`plan` extra, and no TPU. Memory, collectives and executed FLOPs are the compiler's; `estimate` is a lower bound of a step's time
from them and the chip's data sheet.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from de_jax import command
from de_jax.configurables import parse_with_settings, read_recipe
from de_jax.recipe import Recipe
from de_jax.training.mesh import plan, sharding, sharding_rules
from de_jax.types import InputError

GIB = 2**30
SHAPE = {"batch_size": "batch_size", "query_length": "max_query_length", "doc_length": "max_doc_length"}
"""What a batch's shape is made of, and the recipe's names for it."""
NEGATIVES = {"query": "num_neg_queries", "doc": "num_neg_docs"}


def main(argv: list[str] | None = None) -> None:
    """The command; prints the plan as a JSON object."""
    args, bindings = _parse_args(argv)
    jax.config.update("jax_platforms", "cpu")  # nothing runs, so a device that is there stays free
    topology = plan.open_topology(args.topology)  # before JAX looks for devices, which reading a recipe has it do
    recipe = read_recipe(args.gin_file, bindings, allow_imports=args.allow_imports)
    given = {name: getattr(args, name) for name in (*SHAPE, "query_rows", "doc_rows")}
    plan.compiler_options(args.effort)  # an impossible one is refused before the recipe is read
    shape = given | {name: given[name] or getattr(recipe.options, setting, None) for name, setting in SHAPE.items()}
    if missing := [name for name in SHAPE if shape[name] is None]:
        raise InputError(f"the recipe's data has no options, so its sizes are not known; add --{missing[0]}.")
    print(json.dumps(plan_run(recipe, topology, effort=args.effort, **shape, **recipe.texts_of_a_pair())))


def plan_run(recipe: Recipe, topology: plan.Topology, *, effort: float, **shape: int | None) -> dict[str, Any]:
    """What `main` prints.

    Args:
        recipe: its data is not opened.
        topology: see `plan.open_topology`.
        effort: see `plan.compile_for`.
        shape: the arguments of `plan.batch_shapes`.
    """
    chip, mesh, state = topology.chip, recipe.devices.mesh(devices=topology.devices), recipe.check()
    for rows in {shape["batch_size"], shape["query_rows"], shape["doc_rows"]} - {None}:
        sharding.check_batch_size(rows, mesh, recipe.devices.num_chunks)
    if recipe.negatives.negative_cache:
        recipe.negatives.negative_cache.check(shape["batch_size"], sharding.num_row_shares(mesh))
    shardings = sharding_rules.state_shardings(state, mesh, recipe.devices.sharding_rules)
    step = sharding_rules.compiled_step(recipe.train_step(state.params), shardings, mesh)
    placed = sharding_rules.with_shardings(state, shardings)
    compiled = plan.compile_for(mesh, step, state, plan.batch_shapes(**shape), effort=effort)
    return {
        "topology": topology.name,
        "device": topology.devices[0].device_kind,
        "mesh": dict(mesh.shape),
        **shape,
        "num_chunks": recipe.devices.num_chunks,
        "num_parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "state_gib": _gib(plan.bytes_per_device(placed)),
        "negative_cache_gib": _gib(plan.bytes_per_device(placed.cache)),
        "available_gib": _gib(chip.memory_bytes) if chip else None,
        "fits": compiled.why_not is None if chip else None,
        "why_not": compiled.why_not,
        **_needs(compiled, mesh.size, chip),
        "useful_flops": _useful_flops(recipe, shape),
        "compile_seconds": round(compiled.compile_seconds, 1),
        "effort": effort,
        "jax": jax.__version__,
    }


def _needs(compiled: plan.Plan, num_devices: int, chip: plan.Chip | None) -> dict[str, Any]:
    """Memory of each device, FLOPs of all together, and what each receives from others; nothing where the step does not fit."""
    if compiled.memory is None or compiled.costs is None:
        return {"memory_gib": None, "executed_flops": None, "collectives": None, "estimate": None}
    memory, costs = compiled.memory, compiled.costs
    return {
        "memory_gib": {name: _gib(size) for name, size in {**memory._asdict(), "total": memory.total}.items()},
        "executed_flops": costs.flops * num_devices,
        "collectives": [collective._asdict() for collective in costs.collectives],
        "num_unknown_loops": costs.num_unknown_loops,
        "estimate": plan.estimate(costs, chip)._asdict() if chip else None,
    }


def _useful_flops(recipe: Recipe, shape: dict[str, int | None]) -> float:
    """Of the towers' products forward and backward, without anything that is computed twice; packed texts are of one length."""
    total, num_pairs = 0.0, shape["batch_size"]
    for side in ("query", "doc"):
        number = num_pairs * (1 + shape.get(NEGATIVES[side], 0))
        if side == "doc" and not shape["doc_rows"]:
            number *= shape.get("max_passages", 1)
        length = shape[f"{side}_length"] * (shape[f"{side}_rows"] or num_pairs) / num_pairs
        total += 3 * plan.forward_flops(getattr(recipe.model, side).encoder, np.full(number, length))
    return total


def _gib(size: int) -> float:
    return round(size / GIB, 3)


def _parse_args(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = command.Parser(description=__doc__)
    parser.add_argument("--gin_file", action="append", required=True, help="a recipe; may be given several times")
    parser.add_argument("--topology", required=True, help=f"chips and their grid, such as {plan.EXAMPLES}")
    parser.add_argument("--batch_size", type=int, help="pairs; default the recipe's")
    parser.add_argument("--query_length", type=int, help="tokens of every query; default the recipe's longest")
    parser.add_argument("--doc_length", type=int, help="tokens of every document; default the recipe's longest")
    parser.add_argument("--query_rows", type=int, help="rows that packed queries take; default one a query")
    parser.add_argument("--doc_rows", type=int, help="rows that packed documents take; default one a document")
    parser.add_argument("--effort", type=float, default=-1.0, help="of the compiler, from -1, soonest done, to 1 (default -1)")
    return parse_with_settings(parser, argv)


if __name__ == "__main__":
    command.run(main)
