"""A trace of some steps, to see where their time goes."""

from __future__ import annotations

import warnings
from pathlib import Path

import jax

from de_jax.training.run.fit import Stop
from de_jax.types import Metrics, TrainState


class ProfileSteps:
    """A hook that traces `count` updates from update `first` on, for TensorBoard's profile plugin, xprof or Perfetto.

    The device is idle when the trace begins and when it ends, so that it holds whole steps.

    Args:
        profile_dir: where the trace goes.
        first: counted from 1; at least 2, as the first update is mostly compilation.
        count: at least 1.
        num_steps: updates of the run; the trace ends with it.
        start_step: updates done before; a run that continues too late for the trace warns.
    """

    def __init__(self, profile_dir: str | Path, *, first: int, count: int, num_steps: int, start_step: int = 0) -> None:
        self._profile_dir, self._first, self._last = str(profile_dir), first, min(first + count - 1, num_steps)
        self._is_tracing = False
        if first - 2 < start_step <= num_steps - 2 and not Path(profile_dir).exists():
            warnings.warn(
                f"Logging.profile_steps begins at update {first}, but the run continues after update {start_step}, so nothing is "
                f"traced; give a first update from {start_step + 2} on.",
                stacklevel=2,
            )

    def __call__(self, step: int, state: TrainState, metrics: Metrics) -> Stop | None:
        if step == self._first - 1 and self._first <= self._last:
            jax.block_until_ready(state)
            jax.profiler.start_trace(self._profile_dir)
            self._is_tracing = True
        elif step == self._last:
            jax.block_until_ready(state)
            self.close()
        return None

    def close(self) -> None:
        """Writes the trace, of a run that stops within it too."""
        if self._is_tracing:
            jax.profiler.stop_trace()
            self._is_tracing = False
