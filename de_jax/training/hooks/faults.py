"""What can stop a training run half-way, as the sentence that its user reads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool

from de_jax.data.sources.training_set import TrainingSet
from de_jax.training.mesh import sharding
from de_jax.training.step.train_step import Model
from de_jax.types import Array, Batch, InputError, Params, TrainState

MAX_PAIRS = 8
"""Pairs of a batch that a sentence names."""
GIB = 1 << 30
ADVICE = {
    "batch_size": "lower {}",
    "num_chunks": "raise {}",
    "remat": 'set {} to "dots" or "full"',
    "block_size": "set {} to 256 or so",
}


class NonFiniteError(InputError):
    """An update gave something that is not a finite number; such a state is never saved.

    Attributes:
        step: the first such update, counted from 1; its batch is the first of `batches(step - 1)`.
    """

    def __init__(self, what: str, step: int) -> None:
        super().__init__(f"{what} step {step} is not a finite number")
        self.step = step


def non_finite(
    error: NonFiniteError, data: TrainingSet, model: Model, mesh: Mesh, state_before: Callable[[], TrainState], kept: int | None
) -> InputError:
    """The error with the pairs to look at and what to do.

    Args:
        error: says which step.
        data: gives that step's batch again.
        model: embeds it, to tell the pairs that give no finite embedding from the others.
        mesh: where it does.
        state_before: gives the last good state.
        kept: the step of the last good checkpoint.
    """
    batch = next(data.batches(error.step - 1))
    is_bad = np.zeros(len(batch.query_id), bool)
    if jax.process_count() == 1:  # of several, each has only its own rows at hand
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # no memory for it beside the failed run's
            is_bad = _gives_no_embedding(model, state_before().params, sharding.place(batch, mesh))
    rows = np.flatnonzero(is_bad) if is_bad.any() else np.arange(len(is_bad))
    whose = "these pairs of its batch give no finite embedding" if is_bad.any() else "its batch holds"
    more = f" and {len(rows) - MAX_PAIRS} more" if len(rows) > MAX_PAIRS else ""
    named = ", ".join(
        f"(query {_id(int(batch.query_id[row]), data.query_ids)}, document {_id(int(batch.doc_id[row]), data.doc_ids)})"
        for row in rows[:MAX_PAIRS].tolist()
    )
    return InputError(
        f"{error}; {whose}: {named}{more}; {'no checkpoint is there yet' if kept is None else f'checkpoint {kept} is kept'}: mend "
        "or remove such texts, or continue with a lower train.learning_rate or train.clip_norm, or a higher temperature."
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether XLA found no memory, compiling or running; a CPU's error has another code, with the same words in it."""
    words = ("RESOURCE_EXHAUSTED", "Out of memory")
    return isinstance(error, jax.errors.JaxRuntimeError) and any(word in str(error) for word in words)


def out_of_memory(error: BaseException, settings: Mapping[str, Any], mesh: Mesh, num_bytes: int | None) -> InputError:
    """What to change where a step does not fit.

    Args:
        error: XLA's.
        settings: the current value by name of what may be changed; of a name, what follows the dot is in `ADVICE`.
        mesh: the devices.
        num_bytes: what a step takes on one of them by the compiler's count, if it could compile.
    """
    reason = str(error).splitlines()[0].rpartition(": ")[2].strip().rstrip(".")
    count = f", a step takes {num_bytes / GIB:.3g} GiB of it by the compiler's count" if num_bytes else ""
    tries = [ADVICE[name.rpartition(".")[2]].format(f"{name} (now {value})") for name, value in settings.items()]
    axes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    return InputError(
        f"the device ran out of memory ({reason}){count}: {', '.join(tries)}, or take more devices, over which make_mesh.fsdp "
        f"also splits parameters and optimizer state (the mesh is {axes})."
    )


def bytes_of_step(step_fn: Any, state: TrainState, batch: Batch) -> int | None:
    """What a compiled step takes on each device, arguments and results included; None if it cannot be compiled.

    Args:
        step_fn: jitted.
        state, batch: arrays, or shapes with shardings.
    """
    try:
        memory = step_fn.lower(state, batch).compile().memory_analysis()
    except jax.errors.JaxRuntimeError:
        return None
    sizes = (memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes)
    return sum(sizes) - memory.alias_size_in_bytes


def _gives_no_embedding(model: Model, params: Params, batch: Batch) -> Bool[np.ndarray, " B"]:
    @jax.jit
    def rows(params: Params, batch: Batch) -> Array:
        embeddings = model.embed(params, batch)
        return jnp.isfinite(embeddings.query).all(axis=1) & jnp.isfinite(embeddings.doc).all(axis=1)

    return ~np.asarray(rows(params, batch))


def _id(row: int, ids: Sequence[str] | None) -> str:
    return repr(ids[row]) if ids is not None and row >= 0 else str(row)
