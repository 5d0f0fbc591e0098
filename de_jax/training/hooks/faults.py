"""Error sentences for faults that stop a training run."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool

from de_jax.training.mesh import sharding
from de_jax.types import Array, Batch, InputError, Params

MAX_PAIRS = 8
"""Pairs or texts of a batch that a sentence names."""
GIB = 1 << 30
ADVICE = {
    "batch_size": "lower {}",
    "max_doc_length": "lower {}",
    "num_chunks": "raise {}",
    "remat": 'set {} to "dots" or "full"',
    "block_size": "set {} to 256 or so",
}


class NonFiniteError(InputError):
    """The update `step`, counted from 1, gave something that is not a finite number; such a state is never saved."""

    def __init__(self, what: str, step: int) -> None:
        super().__init__(f"{what} step {step} is not a finite number")
        self.step = step


class Explanation(NamedTuple):
    """How the faults of a run name its pairs and settings.

    Attributes:
        is_finite: (parameters, batch) to whether each row, [B], gives finite numbers only.
        given: those numbers in a word, such as "embedding".
        lower: completes the advice "continue with a lower ..." for a number that is not finite.
        memory: the current values, by name, of the settings that determine the memory of a step; names end as in `ADVICE`.
        devices: completes the advice "take more devices".
        num_steps: the name of the setting that ends the run.
        name: of a row of a batch.
        rows: a word for the rows of a batch.
    """

    is_finite: Callable[[Params, Any], Array]
    given: str
    lower: str
    memory: Mapping[str, Any]
    devices: str
    num_steps: str
    name: Callable[[Any, int], str]
    rows: str = "pairs"


def non_finite(
    error: NonFiniteError, batch: Any, explanation: Explanation, mesh: Mesh, params_before: Callable[[], Params], kept: int | None
) -> InputError:
    """The error with the rows to look at and the remedies.

    `params_before` gives the last good parameters, and `kept` is the step of the last good checkpoint.
    """
    is_bad = np.zeros(len(batch.doc_id), bool)
    if jax.process_count() == 1:  # of several, each has only its own rows at hand
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # no memory for it beside the failed run's
            is_bad = ~np.asarray(jax.jit(explanation.is_finite)(params_before(), sharding.place(batch, mesh)))
    rows = np.flatnonzero(is_bad) if is_bad.any() else np.arange(len(is_bad))
    whose = f"these {explanation.rows} of its batch give no finite {explanation.given}" if is_bad.any() else "its batch holds"
    more = f" and {len(rows) - MAX_PAIRS} more" if len(rows) > MAX_PAIRS else ""
    named = ", ".join(explanation.name(batch, row) for row in rows[:MAX_PAIRS].tolist())
    return InputError(
        f"{error}; {whose}: {named}{more}; {'no checkpoint is there yet' if kept is None else f'checkpoint {kept} is kept'}: fix "
        f"or remove these texts, or continue with a lower {explanation.lower}."
    )


def pair_name(query_ids: Sequence[str] | None, doc_ids: Sequence[str] | None, batch: Batch, row: int) -> str:
    """`Explanation.name` of a pair, by the ids of the rows of its stores if they are known."""
    return f"(query {_id(int(batch.query_id[row]), query_ids)}, document {_id(int(batch.doc_id[row]), doc_ids)})"


def has_finite_embeddings(model: Any, params: Params, batch: Batch) -> Bool[Array, " B"]:
    """`Explanation.is_finite` of a dual encoder."""
    embeddings = model.embed(params, batch)
    return jnp.isfinite(embeddings.query).all(axis=1) & jnp.isfinite(embeddings.doc).all(axis=1)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether XLA found no memory, compiling or running; a CPU's error has another code, with the same words in it."""
    words = ("RESOURCE_EXHAUSTED", "Out of memory")
    return isinstance(error, jax.errors.JaxRuntimeError) and any(word in str(error) for word in words)


def out_of_memory(error: BaseException, explanation: Explanation, mesh: Mesh, num_bytes: int | None) -> InputError:
    """The error for a step that does not fit, with the settings to change.

    `num_bytes` is a step's memory on one device by the compiler's count, if it could compile.
    """
    reason = str(error).splitlines()[0].rpartition(": ")[2].strip().rstrip(".")
    count = f", a step takes {num_bytes / GIB:.3g} GiB of it by the compiler's count" if num_bytes else ""
    memory = explanation.memory.items()
    tries = [ADVICE[name.rpartition(".")[2].lstrip("-")].format(f"{name} (now {value})") for name, value in memory]
    axes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    return InputError(
        f"the device ran out of memory ({reason}){count}: {', '.join(tries)}, or take more devices{explanation.devices} "
        f"(the mesh is {axes})."
    )


def _id(row: int, ids: Sequence[str] | None) -> str:
    return repr(ids[row]) if ids is not None and row >= 0 else str(row)
