"""A machine that is taken away says so with SIGTERM: the run saves and ends, and the same command continues it."""

from __future__ import annotations

import signal
from types import FrameType

import jax

from de_jax.training.mesh import distributed


class StopOnTerminate:
    """Remembers SIGTERM, so that the run saves after the step that is running and stops.

    Used as a context manager, in the main thread; outside of it the signal has its former meaning. Of several processes it is
    enough that one gets the signal: all stop after the same step.
    """

    REASON = "SIGTERM"

    def __init__(self) -> None:
        self._asked = False
        self._is_alone = jax.process_count() == 1  # JAX itself listens for the signal where there are several processes

    def __enter__(self) -> StopOnTerminate:
        if self._is_alone:
            self._former = signal.signal(signal.SIGTERM, self._remember)
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_alone:
            signal.signal(signal.SIGTERM, self._former)

    def reason(self, step: int) -> str | None:
        """Why to stop after this update, or None."""
        is_asked = self._asked if self._is_alone else distributed.sigterm_reached(step)
        return self.REASON if is_asked else None

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
