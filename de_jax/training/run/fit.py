"""The training loop. Logs, checkpoints and evaluations are hooks."""

import collections
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from de_jax.types import Batches, InputError, Metrics, TrainState, TrainStep

MOST_IN_FLIGHT = 4
"""Updates that the devices have before them. More would not keep them busier, and a stop waits for all: on a CPU for minutes."""


class Stop(NamedTuple):
    """The return value of a hook that ends training early."""

    reason: str


Hook = Callable[[int, TrainState, Metrics], Stop | None]
"""Called after each update with (updates done, state, metrics), all still on the device.

Reading a number waits for the device, so a hook reads only at its own period. The state is donated to the next step, so a hook
copies the arrays that it keeps.
"""


def fit(
    step_fn: TrainStep, state: TrainState, batches: Batches, *, num_steps: int, hooks: Sequence[Hook] = ()
) -> tuple[TrainState, Stop | None]:
    """Trains from `state` to `num_steps` updates in all, or until a hook stops it.

    Args:
        step_fn: a compiled train step; may donate its state.
        state: where to start; its step is the number of updates already done.
        batches: the batches from a given step on, endless, already on the devices.
        num_steps: updates of the whole run, those already done included.
        hooks: called in order after every update.

    Returns:
        The last state, and the `Stop` of the hook that ended the run, if one did.

    Raises:
        InputError: the batches end before the run does.
    """
    step = start = int(state.step)
    if start >= num_steps:
        return state, None
    in_flight: collections.deque[Metrics] = collections.deque()
    for step, batch in zip(range(start + 1, num_steps + 1), batches(start), strict=False):
        state, metrics = step_fn(state, batch)
        in_flight.append(metrics)
        if len(in_flight) > MOST_IN_FLIGHT:
            jax.block_until_ready(in_flight.popleft())
        stops = [stop for hook in hooks if (stop := hook(step, state, metrics)) is not None]
        if stops:
            return state, stops[0]
    if step < num_steps:
        raise InputError(
            f"the batches end after update {step}, but num_steps is {num_steps}; a source of data gives batches without end, so "
            "begin again after the last one, or set num_steps to what there is."
        )
    return state, None
