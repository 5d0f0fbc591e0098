"""Pretrains a small language model to start from: a T5 by span corruption, or a BERT by masked tokens.

python -m reproduction.pretrain --gin_file=reproduction/recipes/pretrain_t5.gin --gin.TextsOptions.texts="('data/scifact',)" \\
    --gin.TextsOptions.tokenizer=runs/vocabulary --run_dir=runs/t5

Repeat the command to continue a stopped run. After the last update <run_dir>/encoder is a run of a dual encoder to start from, a
MODEL of recipes: the encoder alone, with mean pooling (T5) or the first token's vector (BERT), no projection, and embeddings of
length 1. A T5's <run_dir> is a generator's too, which `de-jax doc2query train --init_from` takes.
"""

from __future__ import annotations

import functools
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from de_jax import command, configurables
from de_jax.data.sources.options import Share
from de_jax.data.text.tokenizing import Side
from de_jax.doc2query import generator_run
from de_jax.doc2query.generator_run import GeneratorRun
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.generator import Generator
from de_jax.models.tower import TowerConfig
from de_jax.settings import Seed, check_call, check_fields, name_of
from de_jax.training.hooks.faults import Explanation
from de_jax.training.mesh import distributed, sharding
from de_jax.training.mesh.distributed import StopOnSignal
from de_jax.training.run import language_model, recipe_file
from de_jax.training.run.run_folder import only_trainer, write_run
from de_jax.training.run.settings import Logging, Optimization, settings_group
from de_jax.types import Array, InputError, Params
from reproduction import commands
from reproduction.masked_lm import MaskedLanguageModel, MaskedTexts
from reproduction.texts import CorruptedTexts, TextsOptions, masked_tokens, span_corruption

SOURCES: dict[type, str] = {Generator: "span_corruption", MaskedLanguageModel: "masked_tokens"}
"""What each kind of model learns from."""
ENCODER_DIR = "encoder"


@settings_group
class Pretraining:
    """All that decides the training of a language model; nothing is read or computed before a function is called.

    Attributes:
        model: a T5 with its decoder, or a BERT with its head.
        data: opens the texts, given a `Share`: `functools.partial(span_corruption, options=TextsOptions(...))`.
        optimization: see there.
        logging: see there; `collapse_alarm` and `early_stopping_patience` are refused, as there are neither embeddings nor a dev
            set, and `evaluate_every_steps` has no effect.
        seed: of fresh parameters and of dropout.
        mesh: gives the devices to train on.

    Raises:
        InputError: a value that its setting cannot have.

    Example:
        >>> from de_jax.models.t5 import T5Config
        >>> texts = TextsOptions(texts=("data/beir/scifact",), tokenizer="vocabularies/t5", max_length=128)
        >>> recipe = Pretraining(
        ...     model=Generator(T5Config(vocab_size=8192, model_dim=256, num_layers=4)),
        ...     data=functools.partial(span_corruption, options=texts),
        ...     optimization=Optimization(num_steps=3000, learning_rate=1e-2),
        ... )
        >>> recipe.logging.save_every_steps
        1000
    """

    model: Generator | MaskedLanguageModel
    data: Callable[..., CorruptedTexts]
    optimization: Optimization = Optimization()
    logging: Logging = Logging()
    seed: Seed = 0
    mesh: Callable[..., jax.sharding.Mesh] = sharding.make_mesh

    def __post_init__(self) -> None:
        check_fields(self)
        check_call("Pretraining.data", self.data, options=("share",), like=SOURCES[type(self.model)])
        check_call("Pretraining.mesh", self.mesh, like="make_mesh")
        if self.logging.early_stopping_patience:
            raise InputError("Logging.early_stopping_patience waits for a dev score, and pretraining has none; remove it.")
        if self.logging.collapse_alarm:
            raise InputError("Logging.collapse_alarm watches embeddings, and pretraining has none; remove it.")
        source = name_of(self.data)
        if source in SOURCES.values() and source != SOURCES[type(self.model)]:
            raise InputError(
                f"Pretraining.data is {source}, from which a {type(self.model).__name__} cannot learn; take "
                f"{SOURCES[type(self.model)]}."
            )

    @property
    def encoder(self) -> Any:
        """The config of the encoder."""
        return self.model.t5 if isinstance(self.model, Generator) else self.model.encoder

    def num_parameters(self) -> int:
        """Decoder or head included."""
        shapes = jax.eval_shape(self.model.init, jax.eval_shape(lambda: jax.random.key(0)))
        self.optimization.tx(shapes)  # refuses patterns that match nothing
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def main(argv: list[str] | None = None) -> None:
    """The command; prints a JSON object when the run is complete."""
    args, bindings = commands.parse_with_settings(_parser(), argv)
    recipe = configurables.build(args.gin_file, bindings, allow_imports=args.allow_imports, root=Pretraining, also=NAMES)
    if args.dry_run:
        print(json.dumps({"num_parameters": recipe.num_parameters()}))
        return
    if not args.run_dir:
        raise InputError("--run_dir is missing; name the folder that checkpoints and logs go to.")
    summary = pretrain(recipe, args.run_dir)
    print(json.dumps(summary))
    if summary["stopped"] == StopOnSignal.REASON:
        sys.exit(command.EXIT_STOPPED)


def pretrain(recipe: Pretraining, run_dir: str | Path) -> dict[str, Any]:
    """Trains to the recipe's last step, from the newest checkpoint in `run_dir` if there is one; returns a summary.

    Args:
        recipe: the model, the texts and the settings of training.
        run_dir: gets checkpoints, logs, `recipe.json` and `encoder/`.

    Raises:
        InputError: another trainer is at work in `run_dir`, or the texts are unusable or do not fit the model or devices.
    """
    start, run_dir = time.monotonic(), Path(run_dir)
    recipe = recipe_file.with_seeds(recipe, run_dir)
    num_parameters, mesh = recipe.num_parameters(), recipe.mesh()
    with only_trainer(run_dir):
        host_index, num_hosts = sharding.host_share(mesh)
        data = recipe.data(share=Share(host_index=host_index, num_hosts=num_hosts))
        _check(recipe, data, mesh)
        if isinstance(recipe.model, Generator):
            lengths = {"max_query_length": data.max_target_length, "max_doc_length": data.max_length}
            generator_run.describe(GeneratorRun(run_dir, 0, recipe.model, {}, data.tokenizer, **lengths))
        state, stop = language_model.train_language_model(
            run_dir,
            recipe.model,
            batches=data.batches,
            batch_size=data.batch_size,
            optimization=recipe.optimization,
            logging=recipe.logging,
            mesh=mesh,
            explanation=_explanation(recipe, data),
            seed=recipe.seed,
            begin=lambda: recipe_file.keep(recipe, run_dir),
        )
        if stop is None and distributed.is_first():
            _write_encoder(recipe, run_dir, data)
    return {
        "run_dir": str(run_dir),
        "step": int(state.step),
        "seconds": round(time.monotonic() - start, 1),
        "num_parameters": num_parameters,
        "num_tokens": data.num_tokens,
        "epochs": round(int(state.step) / data.batches_per_epoch, 3),
        "stopped": stop.reason if stop else None,
    }


def _write_encoder(recipe: Pretraining, run_dir: Path, data: CorruptedTexts) -> None:
    """The encoder of the newest checkpoint, as a run of its own."""
    _, params = language_model.restored(run_dir, None, recipe.model)
    tower = TowerConfig(recipe.encoder, pooling="mean" if isinstance(recipe.model, Generator) else "first", projection_dim=None)
    kept = {part: params[part] for part in ("embedder", "encoder") if part in params}  # without layers, no encoder
    side = Side(data.tokenizer, data.max_length)
    shutil.rmtree(run_dir / ENCODER_DIR, ignore_errors=True)  # of a run that was continued to more updates
    write_run(run_dir / ENCODER_DIR, {"shared": kept}, model=DualEncoder(query=tower, doc=tower), query=side, doc=side)


def _check(recipe: Pretraining, data: CorruptedTexts, mesh: jax.sharding.Mesh) -> None:
    """Whether the batches fit the model and the devices."""
    sharding.check_batch_size(data.batch_size, mesh)
    encoder, name = recipe.encoder, type(recipe.encoder).__name__
    if data.vocab_size > encoder.vocab_size:
        raise InputError(
            f"the texts have token ids up to {data.vocab_size - 1}, but the embedding table has {encoder.vocab_size} rows; set "
            f"{name}.vocab_size to at least {data.vocab_size}."
        )
    if encoder.max_length is not None and data.max_length > encoder.max_length:
        raise InputError(
            f"TextsOptions.max_length is {data.max_length}, but the encoder has positions for {encoder.max_length} tokens; set "
            f"{name}.max_positions higher."
        )


def _explanation(recipe: Pretraining, data: CorruptedTexts) -> Explanation:
    model: Any = recipe.model
    is_finite = generator_run.has_finite_logits if isinstance(model, Generator) else _has_finite_logits
    return Explanation(
        is_finite=functools.partial(is_finite, model),
        given="scores of tokens",
        lower="Optimization.learning_rate or Optimization.clip_norm",
        memory={
            "TextsOptions.batch_size": data.batch_size,
            f"{type(recipe.encoder).__name__}.remat": recipe.encoder.remat,
        },
        devices="",
        num_steps="Optimization.num_steps",
        name=lambda batch, row: f"the text from {data.doc_ids[int(batch.doc_id[row])]!r} on",
        rows="texts",
    )


def _has_finite_logits(model: MaskedLanguageModel, params: Params, batch: MaskedTexts) -> Array:
    return jnp.isfinite(model.logits(params, batch.tokens, batch.places)).all(axis=(1, 2))


def _parser() -> command.Parser:
    parser = command.Parser(description=__doc__)
    parser.add_argument("--gin_file", action="append", default=[], required=True, help="a recipe; repeatable")
    parser.add_argument("--run_dir", help="folder for checkpoints and logs; a run in it continues")
    parser.add_argument("--dry_run", action="store_true", help="check the recipe without data, and count the parameters")
    return parser


NAMES: dict[str, Any] = {
    one.__name__: one for one in (Generator, MaskedLanguageModel, span_corruption, masked_tokens, TextsOptions)
}
"""Names of a recipe of pretraining, beside those of every recipe."""

if __name__ == "__main__":
    command.run(main)
