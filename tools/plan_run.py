"""Compiles a recipe's training step for remote devices, and reports memory, FLOPs and collectives; runs and times nothing.

de-jax plan_run --topology=h100:8 --gin_file=recipes/samtone_both.gin
de-jax plan_run --topology=v5e:16x16 --gin_file=recipes/samtone_both.gin --gin_file=models/t5_1_1_xxl.gin --batch_size=4096 \\
    --gin.make_mesh.fsdp=16 --gin.T5Config.remat=full --gin.T5Config.scan_layers=True

The plan needs no data or tokenizer: every text has the recipe's longest length and its own row. Real texts are shorter and share
rows; `--query_rows` and `--doc_rows` set the number of rows. A TPU topology needs the `plan` extra, GPUs need `plan_gpu`, and
neither needs the device. Memory, collectives and executed FLOPs are the compiler's. `estimate` is a lower bound of a step's time
from these and the data sheet. In Python: `de_jax.planner.plan(recipe, topology)`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import jax

from de_jax import command
from de_jax.configurables import parse_with_settings, read_recipe
from de_jax.planner import Effort, plan
from de_jax.settings import numeric
from de_jax.training.mesh.plan import EXAMPLES, open_topology

SHAPE = ("batch_size", "query_length", "doc_length", "query_rows", "doc_rows")


def main(argv: list[str] | None = None) -> None:
    """The command; prints the plan as a JSON object."""
    args, bindings = _parse_args(argv)
    jax.config.update("jax_platforms", "cpu")  # nothing runs, so a device that is there stays free
    topology = open_topology(args.topology)  # before JAX looks for devices, which reading a recipe has it do
    recipe = read_recipe(args.gin_file, bindings, allow_imports=args.allow_imports)
    print(json.dumps(plan(recipe, topology, effort=args.effort, **{name: getattr(args, name) for name in SHAPE})))


def _parse_args(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = command.Parser(description=__doc__)
    parser.add_argument("--gin_file", action="append", required=True, help="a recipe; repeatable")
    parser.add_argument("--topology", required=True, help=f"devices, such as {EXAMPLES}")
    parser.add_argument("--batch_size", type=int, help="pairs; default the recipe's")
    parser.add_argument("--query_length", type=int, help="tokens of every query; default the recipe's longest")
    parser.add_argument("--doc_length", type=int, help="tokens of every document; default the recipe's longest")
    parser.add_argument("--query_rows", type=int, help="rows of packed queries; default one a query")
    parser.add_argument("--doc_rows", type=int, help="rows of packed documents; default one a document")
    parser.add_argument(
        "--effort", type=numeric(Effort), default=-1.0, help="effort of the compiler, from -1 (fast compilation) to 1 (default -1)"
    )
    return parse_with_settings(parser, argv)


if __name__ == "__main__":
    command.run(main)
