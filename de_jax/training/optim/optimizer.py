"""Optimizers and schedules: optax, with freezing, weight decay and learning rates chosen by parameter path."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from de_jax.settings import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Range, ShareBelowOne, checked
from de_jax.training.optim import paths
from de_jax.types import Array, InputError, Params, Schedule

DECAYED = (".*/(kernel|embedding)",)
"""Patterns of the parameters that decay by default: matrices, not norms and biases."""
TRAINED_PART = "inner_states/trained/inner_state"
"""The place of an optimizer's state in that of `freeze`."""

OptimizerFn = Callable[[Schedule, Params], optax.GradientTransformation]
"""An optimizer with its hyper-parameters bound: `adafactor` and `adamw` below, and what users write beside them."""


@checked
def linear(
    *,
    peak: PositiveFloat,
    num_steps: PositiveInt,
    warmup_steps: NonNegativeInt = 0,
    end: NonNegativeFloat = 0.0,
    decay_steps: PositiveInt | None = None,
) -> Schedule:
    """From 0 to `peak` over the warm-up, then straight to `end`, reached exactly at the last of `num_steps` updates.

    SamToNe (Moiseev et al. 2023) trains with peak 1e-3, no warm-up, end 0.

    Args:
        peak: highest learning rate.
        num_steps: updates of the whole run.
        warmup_steps: updates before the peak.
        end: learning rate of the last update.
        decay_steps: the update that reaches `end`, if it is not the run's last: 1,000,000 in ANCE's code (Xiong et al. 2021).
    """
    return _after_warmup(peak, num_steps, warmup_steps, lambda progress: peak + (end - peak) * progress, decay_steps)


@checked
def cosine(
    *,
    peak: PositiveFloat,
    num_steps: PositiveInt,
    warmup_steps: NonNegativeInt = 0,
    end: NonNegativeFloat = 0.0,
    decay_steps: PositiveInt | None = None,
) -> Schedule:
    """As `linear`, but along half a cosine."""
    decay = lambda progress: end + (peak - end) * 0.5 * (1 + jnp.cos(jnp.pi * progress))  # noqa: E731
    return _after_warmup(peak, num_steps, warmup_steps, decay, decay_steps)


@checked
def rsqrt(
    *, peak: PositiveFloat, num_steps: PositiveInt, warmup_steps: NonNegativeInt = 1, end: NonNegativeFloat | None = None
) -> Schedule:
    """From 0 to `peak` over the warm-up, then falling as 1 / sqrt(step) (Raffel et al. 2020).

    Args:
        peak, num_steps: as in `linear`.
        warmup_steps: the time constant too: at four times it, half of the peak is left.
        end: learning rate of the last update; the curve is stretched to meet it. None leaves the curve as it falls.
    """
    warmup = max(warmup_steps, 1)
    last = (warmup / max(num_steps - 1, warmup)) ** 0.5

    def decay(progress: Array) -> Array:
        step = warmup + progress * max(num_steps - 1 - warmup, 0)
        shape = jnp.sqrt(warmup / step)
        if end is None or last == 1.0:
            return peak * shape
        return end + (peak - end) * (shape - last) / (1.0 - last)

    return _after_warmup(peak, num_steps, warmup, decay)


@checked
def adafactor(
    schedule: Schedule,
    params: Params,
    *,
    decay_rate: Annotated[float, Range(0.0, 1.0, above=True)] = 0.8,
    decay_offset: NonNegativeInt = 0,
    min_dim_size_to_factor: PositiveInt = 128,
    multiply_by_parameter_scale: bool = True,
    weight_decay: NonNegativeFloat = 0.0,
    decayed: Sequence[str] = DECAYED,
) -> optax.GradientTransformation:
    """Adafactor (Shazeer and Stern 2018) as T5 is trained: no momentum, factored second moments, relative step sizes.

    Args:
        schedule: learning rate per update.
        params: the tree that it will update, to check `decayed` against.
        decay_rate: exponent of the second moment's memory.
        decay_offset: updates that this memory counts before the first. A run of T5X that continues pretraining at update 1,000,000
            with new moments has 1,000,000: each update of a tensor then has a root mean square of 1 before the rate.
        min_dim_size_to_factor: smallest two dimensions whose second moment is kept as row and column means.
        multiply_by_parameter_scale: whether a step is relative to its parameter's root mean square. Steps of a scalar, such as a
            learned temperature, never are: it may be 0.
        weight_decay: per update, times the learning rate.
        decayed: patterns of the parameters that decay; norms and biases do not by default.
    """
    core = optax.chain(  # as optax.adafactor has them
        optax.scale_by_factored_rms(
            decay_rate=decay_rate, step_offset=-decay_offset, min_dim_size_to_factor=min_dim_size_to_factor
        ),
        optax.clip_by_block_rms(1.0),
        *([optax.stateless(_relative)] if multiply_by_parameter_scale else []),
        optax.scale(-1),
    )
    # optax's own weight decay is not scaled by the learning rate, so it is added before the scaling here.
    mask = decay_mask(weight_decay, decayed, params)
    decay = optax.add_decayed_weights(-weight_decay, mask=mask) if weight_decay else optax.identity()
    return optax.chain(core, decay, optax.scale_by_schedule(schedule))


@checked
def adamw(
    schedule: Schedule,
    params: Params,
    *,
    b1: ShareBelowOne = 0.9,
    b2: ShareBelowOne = 0.999,
    eps: PositiveFloat = 1e-8,
    weight_decay: NonNegativeFloat = 0.01,
    decayed: Sequence[str] = DECAYED,
) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019).

    Args:
        b1, b2: memories of the first and second moment.
        eps: added to the root of the second moment.
        schedule, params, weight_decay, decayed: as of `adafactor`.
    """
    mask = decay_mask(weight_decay, decayed, params)
    return optax.adamw(schedule, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=mask)


def make_optimizer(
    optimizer: OptimizerFn,
    schedule: Schedule,
    params: Params,
    *,
    clip_norm: float | None = 1.0,
    learning_rate_factors: Mapping[str, float] | None = None,
    frozen: Sequence[str] = (),
    alternate: Sequence[str] = (),
    known: Params | None = None,
) -> optax.GradientTransformation:
    """Clipping, then `optimizer`, then learning-rate factors, on all parameters that are not frozen.

    Args:
        params: the tree to update; arrays or their shapes.
        clip_norm: largest global norm of the trained parameters' gradients; None for no limit.
        learning_rate_factors: factor by pattern; if several match a path the last one counts.
        frozen: patterns of parameters that keep their values, bit for bit.
        alternate: patterns that are trained in turn, see `alternating`.
        known: the parameters that factors and `frozen` may name, where `params` are only some of them; by default `params`.

    Raises:
        InputError: a pattern matches nothing, everything is frozen, or all that is trained in one of the turns.
    """
    factors = dict(learning_rate_factors or {})
    known = params if known is None else known
    paths.check_patterns("learning rate", list(factors), known)
    paths.check_patterns("freeze", frozen, known)
    clip = optax.clip_by_global_norm(clip_norm) if clip_norm is not None else optax.identity()

    def make(schedule: Schedule, first: optax.GradientTransformation) -> optax.GradientTransformation:
        return optax.chain(first, optimizer(schedule, params), _scale_by_path(factors))

    if alternate:
        _check_turns(alternate, params, frozen)
        tx = alternating(lambda own: make(own, optax.identity()), schedule, params, alternate, clip)
    else:
        tx = make(schedule, clip)
    return freeze(tx, params, frozen) if frozen else tx


def _check_turns(alternate: Sequence[str], params: Params, frozen: Sequence[str]) -> None:
    """Refuses a turn whose parameters are all frozen, in which nothing would be trained."""
    for pattern in alternate:
        own = [path for path in paths.all_paths(params) if paths.matches([pattern], path)]
        if own and all(paths.matches(frozen, path) for path in own):
            raise InputError(
                f"Optimization.alternate trains {pattern!r} in turn, and Optimization.frozen freezes all of it; leave "
                "one of them out."
            )


def alternating(
    make: Callable[[Schedule], optax.GradientTransformation],
    schedule: Schedule,
    params: Params,
    patterns: Sequence[str],
    clip: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Trains the parameters of one of `patterns` in each update, in turn.

    DAFT's alternative to two stages is one tower a batch (Leonhardt et al., section 4). Parameters that match no pattern, such as
    a shared projection, are trained in every update. A parameter's optimizer state counts its own updates; its learning rate
    is that of the run's update.

    Args:
        make: the optimizer for a schedule.
        schedule: learning rate per update of the run.
        params: the tree to update; arrays or their shapes.
        patterns: two or more, such as ("query/.*", "doc/.*"); no parameter matches two of them.
        clip: of the gradients of all parameters that an update trains.

    Raises:
        InputError: there is one pattern only, a pattern matches nothing, or two match the same parameter.
    """
    paths.check_patterns("alternate", patterns, params)
    turns = len(patterns)
    if turns < 2:
        raise InputError(f"Optimization.alternate has one pattern, {patterns[0]!r}; name at least two that are trained in turn.")
    turns_of = lambda path: [str(turn) for turn in range(turns) if paths.matches([patterns[turn]], path)]  # noqa: E731
    if twice := [path for path in paths.all_paths(params) if len(turns_of(path)) > 1]:
        raise InputError(f"two patterns of Optimization.alternate match {twice[0]}; let one of them match it.")

    def in_turn(turn: int) -> optax.GradientTransformation:
        own = make(lambda own_step: schedule(own_step * turns + turn))
        return optax.conditionally_mask(own, lambda step: step % turns == turn)

    txs = {str(turn): in_turn(turn) for turn in range(turns)} | {"always": make(schedule)}
    label = lambda path: (turns_of(path) or ["always"])[0]  # noqa: E731
    each = optax.multi_transform(txs, lambda tree: paths.map_with_path(lambda path, _: label(path), tree))

    def update(updates: Params, state: Any, params: Params | None = None, **more: Any) -> tuple[Params, Any]:
        turn = state.inner_states["0"].inner_state.step % turns
        is_trained = {"always": True} | {str(number): turn == number for number in range(turns)}
        trained = paths.map_with_path(lambda path, leaf: jnp.where(is_trained[label(path)], leaf, 0), updates)
        clipped, _ = clip.update(trained, clip.init(trained), params)
        return each.update(clipped, state, params, **more)

    return optax.GradientTransformationExtraArgs(each.init, update)


def freeze(tx: optax.GradientTransformation, params: Params, patterns: Sequence[str]) -> optax.GradientTransformation:
    """`tx` on the parameters that match none of `patterns`; the others get no update and no optimizer state.

    optax.masked would pass the raw gradients of skipped parameters through as updates, so a "frozen" tower would move.

    Raises:
        InputError: everything is frozen.
    """
    labels = paths.map_with_path(lambda path, _: "frozen" if paths.matches(patterns, path) else "trained", params)
    if all(paths.matches(patterns, path) for path in paths.all_paths(params)):
        raise InputError(f"the freeze patterns {list(patterns)} match every parameter, so nothing would be trained.")
    return optax.multi_transform({"trained": tx, "frozen": optax.set_to_zero()}, labels)


def _after_warmup(
    peak: float, num_steps: int, warmup_steps: int, decay: Callable[[Array], Array], decay_steps: int | None = None
) -> Schedule:
    """Linear warm-up, then `decay` of the progress in [0, 1] from its end to update `decay_steps`, by default the run's last."""
    if not isinstance(num_steps, jax.Array) and warmup_steps > num_steps:
        raise InputError(
            f"warmup_steps is {warmup_steps}, but the run has {num_steps} steps; choose between 0 and {num_steps}, in a recipe "
            "with linear.warmup_steps."
        )
    positive = lambda number: jnp.maximum(number, 1) if isinstance(number, jax.Array) else max(number, 1)  # noqa: E731

    def schedule(step: Array) -> Array:
        step = jnp.asarray(step, jnp.float32)
        last = num_steps if decay_steps is None else decay_steps
        progress = jnp.clip((step - warmup_steps) / positive(last - 1 - warmup_steps), 0.0, 1.0)
        return jnp.where(step < warmup_steps, peak * step / positive(warmup_steps), decay(progress))

    return schedule


def decay_mask(weight_decay: float, decayed: Sequence[str], params: Params) -> Callable[[Params], Params]:
    """For optax: of a tree, which leaves decay; refuses a pattern that matches nothing in `params`."""
    if weight_decay:
        paths.check_patterns("weight decay", decayed, params)
    return lambda tree: paths.map_with_path(lambda path, _: paths.matches(decayed, path), tree)


def _relative(updates: Params, params: Params | None) -> Params:
    """Updates times the root mean square of their parameters, of scalars left alone."""
    by_rms = optax.scale_by_param_block_rms()
    scaled, _ = by_rms.update(updates, by_rms.init(params), params)
    return jax.tree.map(lambda new, old: new if old.ndim else old, scaled, updates)


def _scale_by_path(factors: Mapping[str, float]) -> optax.GradientTransformation:
    def factor(path: str) -> float:
        found = [value for pattern, value in factors.items() if paths.matches([pattern], path)]
        return found[-1] if found else 1.0

    return optax.stateless(lambda updates, _: paths.map_with_path(lambda path, update: update * factor(path), updates))
