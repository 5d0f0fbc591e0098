"""A training recipe: what gin configures under the name `train`, for the trainer, the miner and the planner alike."""

from __future__ import annotations

import argparse
import contextlib
import functools
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import gin
import jax

from de_jax import configurables
from de_jax.data import curriculum_texts
from de_jax.data.training_set import TrainingSet
from de_jax.interop.fine_tuning import InitFrom, Layers, check_init_from
from de_jax.losses.spread import with_spread
from de_jax.models.dual_encoder import DualEncoder
from de_jax.retrieval.miner import Miner
from de_jax.settings import NonNegativeFloat, PositiveFloat, PositiveInt, Range, Seed, check
from de_jax.training import grad_norms, plan, sharding, sharding_rules
from de_jax.training.alignment import KL, Alignment
from de_jax.training.chunked import ChunkedModel
from de_jax.training.collapse import CollapseAlarm
from de_jax.training.frozen import FrozenModel
from de_jax.training.negative_cache import NegativeCache
from de_jax.training.optimizer import OptimizerFn, Schedule, make_optimizer
from de_jax.training.train_step import Initialisable, Model, TrainStep, init_state, make_train_step
from de_jax.types import InputError, LossFn, Params, TrainState

FOLLOW_EVERY_STEPS = 10
"""A look at a folder is cheap, and a miner's work is fresh for a while only."""


class Recipe:
    """What gin configures under the name `train`; nothing is read or computed before a method is called.

    Args:
        model: both towers and what they share.
        loss: one of `de_jax.losses`, or a function of the same type.
        data: opens the training set, given `host_index`, `num_hosts`, `row_multiple` and `run_dir`.
        optimizer: `@adafactor`, `@adamw`, `@lamb`, `@ance_lamb` or a function of the same type.
        schedule: `@linear`, `@cosine` or `@rsqrt`; it is told the peak and the number of steps.
        mesh: gives the devices to train on.
        sharding_rules: mesh axes by pattern over parameter paths, beside `sharding_rules.DEFAULT_RULES`, such as
            {".*/mlp/wo/kernel": ("tensor", None)}.
        num_steps: updates of the whole run.
        learning_rate: the schedule's peak.
        num_chunks: how many pieces the towers take a batch in, to save memory; the loss sees all of it.
        clip_norm: largest global gradient norm; None for no limit.
        learning_rate_factors: factor by pattern over parameter paths, such as {"shared/projection/.*": 10.0}.
        frozen: patterns of parameters that keep their values; a tower that is frozen as a whole runs without dropout.
        alternate: patterns of which one in turn is trained, an update each, such as ("query/.*", "doc/.*"); see
            `optimizer.alternating`.
        init_from: a run or a pretrained model whose parameters are the first ones here (PAIR's second stage), as
            `interop.checkpoints.read` knows them; or {"query": one, "doc": another}.
        init_new: patterns of parameters that start fresh although there is an `init_from`.
        init_layers: for a tower of fewer layers than its source has, which of them it starts from, such as {"query": (0, 6)}.
        seed: of the initial parameters and of dropout.
        grad_norm_groups: logs the norm of the gradient before clipping by group, see `grad_norms`: "thirds", or a pattern over
            parameter paths by name, such as {"bottom": ".*/layers_[0-3]/.*"}; None logs that of the whole only.
        log_every_steps: updates that one line of the log averages.
        save_every_steps: updates between checkpoints.
        evaluate_every_steps: updates between evaluations on the dev set.
        alignment: ends the run when the query tower is aligned with the document tower, as DAFT's first stage is; None for a run
            of `num_steps`.
        collapse_alarm: warns when embeddings collapse, see `losses.spread`; None watches nothing.
        miner: how hard negatives are mined by this run; None trains with those that the folder of negatives holds.
        mine_every_steps: updates between two minings, for which training waits; None leaves all but the first to `de-jax mine`.
            Without a miner it has no effect, so that `train.miner=None` turns a recipe that mines into a static one.
        follow_every_steps: updates between two looks for newer hard negatives; by default as often as they are mined here, every
            `FOLLOW_EVERY_STEPS` where `de-jax mine` does, and without a miner never.
        negative_cache: hard negatives for every query from the documents of earlier batches; None for none.
        keep_checkpoints: how many of the newest stay; the best by the dev score is kept besides.
        profile_steps: (first, count): traces `count` updates from update `first` on, into `<run_dir>/profile`.
    """

    def __init__(
        self,
        *,
        model: DualEncoder,
        loss: LossFn,
        data: Callable[..., TrainingSet],
        optimizer: OptimizerFn,
        schedule: Callable[..., Schedule],
        mesh: Callable[..., jax.sharding.Mesh] = sharding.make_mesh,
        sharding_rules: sharding_rules.Rules | None = None,
        num_steps: PositiveInt = 20000,
        learning_rate: PositiveFloat = 1e-3,
        num_chunks: PositiveInt = 1,
        clip_norm: PositiveFloat | None = 1.0,
        learning_rate_factors: Mapping[str, NonNegativeFloat] | None = None,
        frozen: Sequence[str] = (),
        alternate: Sequence[str] = (),
        init_from: InitFrom | None = None,
        init_new: Sequence[str] = (),
        init_layers: Layers | None = None,
        seed: Seed = 0,
        grad_norm_groups: Mapping[str, str] | Literal["thirds"] | None = None,
        log_every_steps: PositiveInt = 50,
        save_every_steps: PositiveInt = 1000,
        evaluate_every_steps: PositiveInt = 1000,
        alignment: Alignment | None = None,
        collapse_alarm: CollapseAlarm | None = None,
        miner: Miner | None = None,
        mine_every_steps: PositiveInt | None = None,
        follow_every_steps: PositiveInt | None = None,
        negative_cache: NegativeCache | None = None,
        keep_checkpoints: PositiveInt = 2,
        profile_steps: tuple[Annotated[int, Range(2)], PositiveInt] | None = None,
    ) -> None:
        check(Recipe, locals(), "train")
        configurables.check_calls(loss=loss, optimizer=optimizer, schedule=schedule, data=data, mesh=mesh)
        if miner is None and mine_every_steps is not None:
            warnings.warn(
                f"train.mine_every_steps = {mine_every_steps} has no effect without train.miner = @Miner(); the run trains with "
                "the negatives that its folder holds.",
                stacklevel=2,
            )
            mine_every_steps = None
        self.model, self.loss, self.data, self.mesh = model, loss, data, mesh
        self.negative_cache, self.frozen = negative_cache, tuple(frozen)
        self.num_chunks, self.sharding_rules = num_chunks, sharding_rules
        self.trained = self._trained(model)
        self.schedule = schedule(peak=learning_rate, num_steps=num_steps)
        self.num_steps, self.seed, self.grad_norm_groups = num_steps, seed, grad_norm_groups
        self.init_from, self.init_new, self.init_layers = init_from, init_new, init_layers
        self.make_tx = functools.partial(
            make_optimizer,
            optimizer,
            self.schedule,
            clip_norm=clip_norm,
            learning_rate_factors=learning_rate_factors,
            frozen=frozen,
            alternate=alternate,
        )
        self.log_every_steps, self.save_every_steps = log_every_steps, save_every_steps
        self.evaluate_every_steps, self.keep_checkpoints = evaluate_every_steps, keep_checkpoints
        self.alignment, self.collapse_alarm = alignment, collapse_alarm
        self.miner, self.mine_every_steps, self.profile_steps = miner, mine_every_steps, profile_steps
        self.follow_every_steps = follow_every_steps or mine_every_steps or (FOLLOW_EVERY_STEPS if miner else None)

    def shapes(self) -> TrainState:
        """Of what `init` gives; towers that are equal are traced once."""
        return jax.eval_shape(lambda params: self._first_state(types.SimpleNamespace(init=lambda rng: params)), self.model.shapes())

    def init(self) -> TrainState:
        """The state before the first step."""
        return self._first_state(self.model)

    def _first_state(self, model: Initialisable) -> TrainState:
        state = init_state(model, self.make_tx, jax.random.key(self.seed))
        if self.negative_cache is None:
            return state
        doc_length = configurables.setting(self.data, "max_doc_length")
        return state._replace(cache=self.negative_cache.empty(doc_length, self.model.doc.embedding_dim))

    def _trained(self, model: DualEncoder) -> Model:
        trained: Model = ChunkedModel(model, self.num_chunks) if self.num_chunks > 1 else model
        return FrozenModel(trained, self.frozen) if self.frozen else trained

    def train_step(self, params: Params) -> TrainStep:
        """One update of these parameters, arrays or their shapes; see `training.train_step`."""
        return self._step_of(self.trained, params)

    def _step_of(self, model: Model, params: Params) -> TrainStep:
        group_norms = grad_norms.group_norms(params, self.grad_norm_groups)
        loss = with_spread(self.loss) if self.collapse_alarm else self.loss
        temperature = self._temperature() if self.negative_cache else None
        return make_train_step(model, loss, self.make_tx(params), group_norms, self.negative_cache, temperature)

    def memory_settings(self, batch_size: int) -> dict[str, Any]:
        """The settings that decide how much memory a step takes, by name."""
        settings = {
            f"{self.data.__name__}.batch_size": batch_size,
            "train.num_chunks": self.num_chunks,
            f"{type(self.model.doc.encoder).__name__}.remat": getattr(self.model.doc.encoder, "remat", None),
        }
        with contextlib.suppress(KeyError):  # a loss that is never computed block by block
            settings[f"{self.loss.__name__}.block_size"] = configurables.setting(self.loss, "block_size")
        return settings

    def check(self) -> TrainState:
        """The shapes of the state, after a step was traced, one layer for all of a tower: what is wrong here raises here."""
        state = self.shapes()
        batch = plan.batch_shapes(8 * self.num_chunks, 8, 8, **self.texts_of_a_pair())
        try:
            jax.eval_shape(self._step_of(self._trained(self.model.with_scanned_layers()), state.params), state, batch)
        except ValueError as error:
            raise InputError(str(error)) from error
        return state

    def check_sizes(
        self, mesh: jax.sharding.Mesh, *, batch_size: int, max_query_length: int, max_doc_length: int, has_negatives: bool
    ) -> None:
        """Refuses batches that the devices cannot share, or that teach nothing, and texts without positions."""
        sharding.check_batch_size(batch_size, mesh, self.num_chunks)
        if self.negative_cache:
            self.negative_cache.check(batch_size, sharding.num_row_shares(mesh))
        self.model.check_length("query", max_query_length)
        self.model.check_length("doc", max_doc_length)
        if batch_size == 1 and not has_negatives and not self.negative_cache:
            raise InputError(
                f"{self.data.__name__}.batch_size is 1, so a query has no negative and the loss is 0; take at least 2 pairs, or "
                "mined negatives."
            )

    def check_parts(self, *, has_mined: bool, max_passages: int, has_queries_for_both: bool, has_dev: bool) -> None:
        """Refuses a miner or an alignment that lacks what it needs of the data.

        Args:
            has_mined: there is a folder for mined negatives.
            max_passages: of a document.
            has_queries_for_both: there are queries that both towers embed.
            has_dev: there is a dev set.
        """
        if self.miner and not has_mined:
            raise InputError(
                f"the recipe has a miner, but its negatives have no folder; set {self.data.__name__}.negatives_dir, such as "
                "{run_dir}/negatives."
            )
        if self.miner and self.miner.num_neg_queries and max_passages > 1:
            raise InputError(
                "mined queries are for documents of one passage; set max_passages to 1, or Miner.num_neg_queries to 0."
            )
        if self.miner:
            self.miner.check()
        measure = self.alignment.measure if self.alignment else None
        if measure == KL and not has_queries_for_both:
            take = "" if self.data.__name__ == "beir_pairs" else "take @beir_pairs and "
            raise InputError(
                f"train.alignment compares the towers on queries, but the data have none for that; {take}set "
                "beir_pairs.num_for_both = 1000."
            )
        if measure not in (None, KL) and not has_dev:
            raise InputError(f"train.alignment waits for {measure} on the dev set, but there is none; set dev_split.")

    def check_before_data(self, mesh: jax.sharding.Mesh, params: Params, *, is_fresh: bool) -> None:
        """Refuses what shows before anything is traced or read: sizes, parts that do not fit, and the sources of parameters.

        Args:
            mesh: the devices to train on.
            params: the model's shapes.
            is_fresh: the run has no checkpoint yet, so it begins with `init_from`.
        """
        # A source that is not ours may bring what it has no setting for.
        is_known = self.data.__name__ in {source.__name__ for source in configurables.DATA}
        negatives_dir, max_passages = self._of_data("negatives_dir", not is_known), self._of_data("max_passages", 1)
        with contextlib.suppress(KeyError):  # a source of batches that has other settings
            sizes = {name: configurables.setting(self.data, name) for name in ("batch_size", "max_query_length", "max_doc_length")}
            is_beir = self.data.__name__ == "beir_pairs"  # other sources may bring negatives of their own
            self.check_sizes(mesh, **sizes, has_negatives=bool(negatives_dir) or not is_beir)
        self.check_parts(
            has_mined=bool(negatives_dir),
            max_passages=max_passages,
            has_queries_for_both=bool(self._of_data("num_for_both", not is_known)),
            has_dev=self._of_data("dev_split", "") is not None,
        )
        if curriculum := self._of_data("curriculum", None):
            expansion, relevance_file = self._of_data("expansion", ""), self._of_data("relevance_file", "")
            limits = {"has_negatives": bool(negatives_dir), "max_passages": max_passages}
            curriculum_texts.check(curriculum, expansion, relevance_file=relevance_file, **limits)
        if self.init_from and is_fresh:
            check_init_from(self.init_from, params, new=self.init_new, layers=self.init_layers)

    def _of_data(self, name: str, otherwise: Any) -> Any:
        """A setting of the data; `otherwise` where this source of data has no such setting."""
        try:
            return configurables.setting(self.data, name)
        except KeyError:
            return otherwise

    def _temperature(self) -> float | None:
        """The loss's."""
        try:
            return configurables.setting(self.loss, "temperature")
        except KeyError:
            raise InputError(
                f"train.negative_cache draws by the temperature of the loss, but {self.loss.__name__} has none; take another loss."
            ) from None

    def texts_of_a_pair(self) -> dict[str, int]:
        """What `plan.batch_shapes` wants to know of a pair's texts beside their lengths."""
        data = lambda name: configurables.setting(self.data, name)  # noqa: E731
        found: dict[str, int] = {}
        with contextlib.suppress(KeyError):  # a source of batches that knows no passages
            found["max_passages"] = data("max_passages")
        with contextlib.suppress(KeyError):  # or no hard negatives
            if data("negatives_dir"):
                found |= {name: data(name) for name in ("num_neg_docs", "num_neg_queries")}
        return found


def parse_with_settings(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The arguments that `parser` knows, and the recipe's settings, written --gin.NAME=VALUE, as "NAME=VALUE"."""
    parser.epilog = "--gin.NAME=VALUE sets any setting of the recipe, for example --gin.train.num_steps=100."
    parser.add_argument("--allow_imports", action="store_true", help="let gin files import modules outside de_jax, which is code")
    args, rest = parser.parse_known_args(argv)
    for argument in rest:
        if not argument.startswith("--gin."):
            parser.error(f"unknown argument {argument}; settings are written --gin.name=value")
    return args, [argument.removeprefix("--gin.") for argument in rest]


def read_recipe(gin_files: Sequence[str], bindings: Sequence[str] = (), *, allow_imports: bool = False) -> Recipe:
    """The recipe that gin files and `name=value` settings describe.

    Raises:
        InputError: an unknown name, a missing setting, or values that do not fit together.
    """
    configurables.register(("train", Recipe))
    configurables.parse(gin_files, bindings, allow_imports=allow_imports)
    try:
        return gin.get_configurable("train")()
    except InputError as error:
        raise InputError(str(error).splitlines()[0]) from None  # gin adds where it passed through
    except (TypeError, RuntimeError, ValueError) as error:
        raise InputError(f"the recipe cannot be used: {configurables.sentence(error)}") from error
