"""The settings of training and logging that know no model: optimization, devices and logs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, cast, dataclass_transform

import jax

from de_jax.settings import NonNegativeFloat, PositiveFloat, PositiveInt, Range, check_call, check_fields, name_of
from de_jax.training.hooks.collapse import CollapseAlarm
from de_jax.training.mesh import sharding
from de_jax.training.mesh.sharding import Rules
from de_jax.training.optim.lamb import ance_lamb, lamb
from de_jax.training.optim.optimizer import OptimizerFn, adafactor, adamw, cosine, linear, make_optimizer, rsqrt
from de_jax.types import InputError, Params, Schedule

T = TypeVar("T")
BY_NAME: dict[str, Any] = {one.__name__: one for one in (adafactor, adamw, lamb, ance_lamb, linear, cosine, rsqrt)}
"""Optimizers and schedules."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def settings_group(cls: type[T]) -> type[T]:
    """A frozen dataclass whose fields are given by name."""
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


@settings_group
class Optimization:
    """How parameters are updated.

    Attributes:
        optimizer: "adafactor", "adamw", "lamb", "ance_lamb", or a function of the same type, such as `partial(adamw, b2=0.98)`.
        schedule: "linear", "cosine", "rsqrt", or a function that is called with the peak and the number of steps.
        num_steps: updates of the whole run.
        learning_rate: the schedule's peak.
        clip_norm: largest global gradient norm; None for no limit.
        learning_rate_factors: factor by pattern over parameter paths, such as {"shared/projection/.*": 10.0}.
        frozen: patterns of parameters that keep their values; a tower that is wholly frozen runs without dropout. A run may
            continue with others, see `Checkpoints.restore`.
        alternate: patterns that take turns: each update trains the parameters of the next pattern, such as ("query/.*", "doc/.*");
            see `optimizer.alternating`.

    Example:
        >>> from functools import partial
        >>> warm = partial(linear, warmup_steps=100)
        >>> Optimization(schedule=warm, learning_rate=2e-5, num_steps=1000, frozen=("doc/.*",)).clip_norm
        1.0
    """

    optimizer: OptimizerFn | Literal["adafactor", "adamw", "lamb", "ance_lamb"] = adafactor
    schedule: Callable[..., Schedule] | Literal["linear", "cosine", "rsqrt"] = linear
    num_steps: PositiveInt = 20000
    learning_rate: PositiveFloat = 1e-3
    clip_norm: PositiveFloat | None = 1.0
    learning_rate_factors: Mapping[str, NonNegativeFloat] | None = None
    frozen: Sequence[str] = ()
    alternate: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("optimizer", "schedule"):
            if isinstance(given := getattr(self, name), str):
                object.__setattr__(self, name, BY_NAME[given])
        called: Any = getattr(self.optimizer, "func", self.optimizer)
        if getattr(called, "__module__", "").startswith("optax.") and not hasattr(called, "__wrapped__"):
            why = f"Optimization.optimizer is optax's {name_of(self.optimizer)}, whose arguments are not (schedule, params)"
            raise InputError(f"{why}; wrap it, as in lambda schedule, params: optax.lion(schedule).")
        for name, setting in (("peak", "learning_rate"), ("num_steps", "num_steps")):
            if name in getattr(self.schedule, "keywords", {}):
                raise InputError(f"the schedule's {name} is what Optimization.{setting} says; set that, and leave {name} out.")
        check_call("Optimization.optimizer", cast(OptimizerFn, self.optimizer), "schedule", "params", like="adafactor")
        check_call("Optimization.schedule", cast(Any, self.schedule), options=("peak", "num_steps"), like="linear")
        self.rates()  # a schedule refuses settings that do not fit the number of steps

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers of the schedule that a compiled program takes as arguments, by name; none of a schedule that is not ours."""
        known = getattr(self.schedule, "keywords", {}) | {"peak": self.learning_rate, "num_steps": self.num_steps}
        is_known = getattr(self.schedule, "func", self.schedule) in (linear, cosine)
        return {name: number for name, number in known.items() if number is not None} if is_known else {}

    def rates(self, numbers: Mapping[str, Any] | None = None) -> Schedule:
        """The learning rate by step; of a traced program with `numbers` as arrays."""
        return cast(Any, self.schedule)(**{"peak": self.learning_rate, "num_steps": self.num_steps, **(numbers or {})})

    def tx(self, params: Params, known: Params | None = None, numbers: Mapping[str, Any] | None = None) -> Any:
        """The optimizer of these parameters, arrays or their shapes; `known` as of `make_optimizer`, `numbers` as of `rates`."""
        return make_optimizer(
            cast(OptimizerFn, self.optimizer),
            self.rates(numbers),
            params,
            clip_norm=self.clip_norm,
            learning_rate_factors=self.learning_rate_factors,
            frozen=self.frozen,
            alternate=self.alternate,
            known=known,
        )


@settings_group
class Devices:
    """The devices of a step, and its chunks.

    Attributes:
        mesh: gives the devices to train on.
        sharding_rules: mesh axes by pattern over parameter paths, beside `sharding.DEFAULT_RULES`, such as
            {".*/mlp/wo/kernel": ("tensor", None)}.
        num_chunks: how many pieces the towers take a batch in, to save memory; the loss sees all of it.

    Example:
        >>> from functools import partial
        >>> Devices(mesh=partial(sharding.make_mesh, fsdp=8), num_chunks=4).sharding_rules is None
        True
    """

    mesh: Callable[..., jax.sharding.Mesh] = sharding.make_mesh
    sharding_rules: Rules | None = None
    num_chunks: PositiveInt = 1

    def __post_init__(self) -> None:
        check_fields(self)
        check_call("Devices.mesh", self.mesh, like="make_mesh")


@settings_group
class Logging:
    """Settings of logs, checkpoints, evaluations and alarms during training.

    Attributes:
        log_every_steps: updates that one line of the log averages.
        evaluate_every_steps: updates between evaluations on the dev set.
        evaluate_start: whether a run that starts from a model is scored before its first update too, for its verdict.
        early_stopping_patience: evaluations in a row without a better dev score after which the run ends; the best checkpoint stays
            in `best/`. None trains to the last update.
        save_every_steps: updates between checkpoints.
        keep_checkpoints: how many of the newest stay; the best by the dev score is kept besides.
        profile_steps: (first, count): traces `count` updates from update `first` on, into `<run_dir>/profile`.
        grad_norm_groups: logs the norm of the gradient before clipping by group, see `grad_norms`: "thirds", or a pattern over
            parameter paths by name, such as {"bottom": ".*/layers_[0-3]/.*"}; None logs that of the whole only.
        collapse_alarm: warns when embeddings collapse, see `losses.pair_loss`; None watches nothing.
        wandb: the project of Weights & Biases, "project" or "entity/project", that the log goes to too; None for none. Needs the
            package `wandb`, and a login unless WANDB_MODE=offline.

    Example:
        >>> Logging(save_every_steps=500, keep_checkpoints=3, grad_norm_groups="thirds").evaluate_every_steps
        1000
    """

    log_every_steps: PositiveInt = 50
    evaluate_every_steps: PositiveInt = 1000
    evaluate_start: bool = True
    early_stopping_patience: PositiveInt | None = None
    save_every_steps: PositiveInt = 1000
    keep_checkpoints: PositiveInt = 2
    profile_steps: tuple[Annotated[int, Range(2)], PositiveInt] | None = None
    grad_norm_groups: Mapping[str, str] | Literal["thirds"] | None = None
    collapse_alarm: CollapseAlarm | None = None
    wandb: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
