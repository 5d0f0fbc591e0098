"""Several processes that run one program: how they meet, decisions that all must take alike, and the signals that end them.

Every process calls the same jitted functions in the same order; a process that differs would leave the others waiting.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax._src.clusters import ClusterEnv
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
        raise InputError(f"{' and '.join(missing)} missing; give all three of a process, or --distributed if a cluster sets them.")
    return False


def join(
    *, coordinator_address: str | None, num_processes: int | None, process_id: int | None, lost_after_seconds: int = 60
) -> None:
    """Waits until all processes are there; before anything else of JAX. InputError: some are missing, or a value is.

    Process 0 listens at `coordinator_address`, host:port. The cluster gives values that are None. A process without a sign of
    life for `lost_after_seconds` counts as lost, and JAX aborts the others.
    """
    try:
        jax.distributed.initialize(coordinator_address, num_processes, process_id, heartbeat_timeout_seconds=lost_after_seconds)
    except (ValueError, RuntimeError) as error:
        raise InputError(f"the processes cannot be joined: {' '.join(str(error).split())}") from error


def place() -> tuple[int, int]:
    """The number of this process and how many there are, as `join` learns them from a cluster; nothing is joined.

    For work in which no process needs another while it runs. Where a cluster starts a process for each GPU, this one sees its own
    GPU alone, as after `join`. To be called before anything else of JAX.

    Raises:
        InputError: no cluster provides the numbers.
    """
    try:
        # With an address, none is looked up. JAX has no public name for this.
        _, total, number, own = ClusterEnv.auto_detect_unset_distributed_params("unused", None, None, None, None, None)
    except (ValueError, RuntimeError, OSError, KeyError) as error:
        raise InputError(f"the cluster does not say which process this is: {' '.join(str(error).split())}") from error
    if number is None or total is None:
        raise InputError("no TPU pod, SLURM, Kubernetes or MPI gives the number of this process; give its number and their count.")
    for name in ("jax_cuda_visible_devices", "jax_rocm_visible_devices"):
        if own:
            jax.config.update(name, ",".join(map(str, own)))
    return number, total


def check_alone() -> None:
    """Raises InputError where JAX sees the devices of several hosts as one, so that no process can compute without the others."""
    if not is_alone():
        raise InputError(
            f"this process is one of {jax.process_count()} of a TPU slice; set TPU_PROCESS_BOUNDS=1,1,1 and "
            "TPU_CHIPS_PER_PROCESS_BOUNDS to the chips of this host, such as 2,2,1, so that each host computes by itself."
        )


def is_first() -> bool:
    """Whether this process writes the files that are written once: logs, descriptions, the summary."""
    return jax.process_index() == 0


def is_alone() -> bool:
    """Whether this is the only process."""
    return jax.process_count() == 1


def agreed(decision: bool) -> bool:
    """The first process's decision, in every process; all must ask."""
    return bool(agreed_number(int(decision)))


def agreed_number(number: int) -> int:
    """The first process's number, in every process; all must ask."""
    return number if is_alone() else int(multihost_utils.broadcast_one_to_all(np.asarray(number)))


def all_agree(decision: bool) -> bool:
    """Whether every process decides so; all must ask."""
    return decision if is_alone() else bool(multihost_utils.process_allgather(np.asarray(decision)).all())


SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""By which schedulers announce the end of a job, and of a lost terminal, unless nohup hides it."""


class StopOnSignal:
    """Remembers `SIGNALS`, and Ctrl-C if that is asked for, so that the run saves after the step that is running and stops.

    Used as a context manager; outside of it the signal has its former meaning. Of several processes it is enough that one gets
    the signal: all stop after the same step. On another thread than the main one, which gets no signals, nothing changes.
    """

    REASON = "SIGTERM"
    INTERRUPTED = "Ctrl-C"

    def __init__(self) -> None:
        self._asked: str | None = None
        self._is_alone = jax.process_count() == 1  # JAX itself listens for the signal if there are several processes
        self._listens = self._is_alone and threading.current_thread() is threading.main_thread()

    def __enter__(self) -> StopOnSignal:
        if self._listens:
            own = [one for one in SIGNALS if one == signal.SIGTERM or signal.getsignal(one) == signal.SIG_DFL]
            self._former = {one: signal.signal(one, self._remember) for one in own}
        return self

    def __exit__(self, *error: object) -> None:
        if self._listens:
            for one, former in self._former.items():
                signal.signal(one, former)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Within, the first Ctrl-C is remembered too, and the second has its former meaning. For a process that is alone.

        Raises:
            KeyboardInterrupt: at the end, if the run stopped for Ctrl-C.
        """
        former = signal.getsignal(signal.SIGINT)
        if not self._listens or former is not signal.default_int_handler:  # someone else decides what Ctrl-C does
            yield
            return

        def remember(number: int, frame: FrameType | None) -> None:
            signal.signal(signal.SIGINT, former)
            self._asked = self._asked or self.INTERRUPTED
            with contextlib.suppress(OSError):  # print may be what this interrupts
                os.write(2, b"\nsaving after this update; Ctrl-C again stops at once.\n")

        signal.signal(signal.SIGINT, remember)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, former)
        if self._asked == self.INTERRUPTED:
            raise KeyboardInterrupt

    def reason(self, step: int) -> str | None:
        """Why to stop after this update, or None."""
        if self._is_alone:
            return self._asked
        return self.REASON if multihost_utils.reached_preemption_sync_point(step) else None

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._asked = self.REASON
