"""Several processes that run one program: how they meet, and decisions that all must take alike.

Every process calls the same jitted functions in the same order; a process that differs would leave the others waiting.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from de_jax.types import InputError


def is_asked_for(*, automatic: bool, **given: Any) -> bool:
    """Whether this process is to join others.

    Args:
        automatic: JAX asks the TPU pod, SLURM, Kubernetes or MPI for missing values.
        given: the first three arguments of `join`, by name; None for missing values.

    Raises:
        InputError: only some of the values are given.
    """
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if automatic or not missing:
        return True
    if len(missing) < len(given):
        raise InputError(
            f"{' and '.join(missing)} missing; give all three of a process, or --distributed where a cluster knows them."
        )
    return False


def join(
    *, coordinator_address: str | None, num_processes: int | None, process_id: int | None, lost_after_seconds: int = 60
) -> None:
    """Waits until all processes are there; before anything else of JAX.

    Args:
        coordinator_address: host:port of process 0, reachable from all.
        num_processes: how many there are.
        process_id: which of them this is, from 0 on.
        lost_after_seconds: without a sign of life for so long a process counts as lost, and JAX aborts the others.

    Raises:
        InputError: a value is missing and no cluster provides it, or the other processes are missing.
    """
    try:
        jax.distributed.initialize(coordinator_address, num_processes, process_id, heartbeat_timeout_seconds=lost_after_seconds)
    except (ValueError, RuntimeError) as error:
        raise InputError(f"the processes cannot be joined: {' '.join(str(error).split())}") from error


def is_first() -> bool:
    """Whether this process writes the files that are written once: logs, descriptions, the summary."""
    return jax.process_index() == 0


def agreed(decision: bool) -> bool:
    """The first process's decision, in every process; all must ask."""
    return bool(agreed_number(int(decision)))


def agreed_number(number: int) -> int:
    """The first process's number, in every process; all must ask."""
    return number if jax.process_count() == 1 else int(multihost_utils.broadcast_one_to_all(np.asarray(number)))


def all_agree(decision: bool) -> bool:
    """Whether every process decides so; all must ask."""
    return decision if jax.process_count() == 1 else bool(multihost_utils.process_allgather(np.asarray(decision)).all())


def sigterm_reached(step: int) -> bool:
    """Whether some process got SIGTERM and this is the update, the same in all, that they stop after.

    To be asked after every update; nothing waits for it. JAX listens for the signal and lets the processes agree in the background.
    """
    return multihost_utils.reached_preemption_sync_point(step)
