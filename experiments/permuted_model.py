"""A model whose hidden dimensions are permuted: it embeds as before, up to the order of the dimensions; prints one JSON object.

python -m experiments.permuted_model --model=runs/bert --run_dir=runs/bert_permuted --seed=0

Two towers of one language model share more than a start: each dimension means the same in both. DAFT's premise is two towers that
do not (Leonhardt et al.), and a permuted one differs in nothing else: recipes/daft_stage1.gin --gin.MODEL=runs/bert
--gin.QUERY_MODEL=runs/bert_permuted. Encoders are T5's and BERT's, without a projection.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from de_jax import command
from de_jax.data.text.tokenizing import Side
from de_jax.interop import any_model
from de_jax.models.bert import BertConfig
from de_jax.models.t5 import T5Config
from de_jax.settings import Seed, numeric
from de_jax.training.optim import paths
from de_jax.training.run.run_folder import write_run
from de_jax.types import InputError, Params

IN = r".*/(query|key|value|wi|wi_0|wi_1)/kernel|.*norm/(scale|bias)|.*/(out|wo)/bias"
"""Parameters whose first axis is the residual stream."""
OUT = r".*/(out|wo)/kernel|(.*/)?(embedder|position|token_type)/embedding"
"""Parameters whose last axis is."""


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    found = any_model.read(args.model)
    tower, tokenizer = found.model.query, found.query.tokenizer
    if set(found.params) != {"shared"} or tower.projection_dim or not isinstance(tower.encoder, BertConfig | T5Config):
        raise InputError(f"{args.model} is not one T5 or BERT encoder without a projection; give the run of a language model.")
    if tokenizer is None:
        raise InputError(f"{args.model} holds no vocabulary; import it with de-jax import model --tokenizer=<file>.")
    params = permuted(found.params, tower.encoder.model_dim, args.seed)
    side = Side(tokenizer, found.query.max_length)
    write_run(args.run_dir, params, model=found.model, query=side, doc=side, origin=[str(args.model)])
    print(json.dumps({"run_dir": str(args.run_dir), "model_dim": tower.encoder.model_dim, "seed": args.seed}))


def permuted(params: Params, model_dim: int, seed: int) -> Params:
    """The parameters of an encoder with the dimensions of its residual stream in the order of `order_of`."""
    order = order_of(model_dim, seed)

    def reordered(path: str, leaf: Any) -> np.ndarray:
        array = np.asarray(leaf)
        axis = 0 if re.fullmatch(IN, path) else -1 if re.fullmatch(OUT, path) else None
        return array if axis is None else np.take(array, order, axis=axis)

    return paths.map_with_path(reordered, params)


def order_of(model_dim: int, seed: int) -> np.ndarray:
    """Which dimension of the model comes where: dimension i of the permuted one is `order[i]` of the model's."""
    return np.random.default_rng(seed).permutation(model_dim)


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the run of a language model, or another T5 or BERT encoder")
    parser.add_argument("--run_dir", type=Path, required=True, help="gets the permuted model")
    parser.add_argument("--seed", type=numeric(Seed), default=0, help="of the permutation (default 0)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
