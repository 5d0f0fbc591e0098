"""Following a miner: a newer generation of negatives comes into force a few updates after it was seen, in all processes alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from de_jax.data.negatives.mined_negatives import MinedNegatives, Switch
from de_jax.mining.mining_run import own_generations
from de_jax.training.mesh import distributed
from de_jax.training.run.fit import Stop
from de_jax.training.run.run_log import Sink
from de_jax.types import Metrics, TrainState

BATCHES_AHEAD = 8
"""Updates between accepting a generation and its first batch; more than any process makes batches in advance."""
LOOK_SECONDS = 0.01
"""The longest that a look waits for a generation that is being read."""


class FollowNegatives:
    """A hook that looks for a newer generation every `every_steps` updates.

    A look lets a thread read the generation, and a later look accepts it. The first process looks, and all accept the generation or
    none does: each has it in memory then, and the switch is on the disk before a batch is made by it. Whatever the miner does, the
    run continues with its current negatives.

    Args:
        run_dir: of a run that mines by itself, so that it depends on its seed alone: a look waits until the generation is read, and
            passes over generations of later updates, mined before the run was killed. None for a run with a miner beside it.
        sinks: get the generation, its staleness in updates since the checkpoint it was mined with, and its statistics.
    """

    def __init__(self, mined: MinedNegatives, *, every_steps: int, run_dir: Path | None, sinks: Sequence[Sink] = ()) -> None:
        self._mined, self._every_steps, self._run_dir, self._sinks = mined, every_steps, run_dir, sinks

    def __call__(self, step: int, state: TrainState, metrics: Metrics) -> Stop | None:
        if step % self._every_steps:
            return None
        within = None if self._run_dir else LOOK_SECONDS
        newest = self._mined.newer(within, lambda: self._later(step)) if distributed.is_first() else None
        number = distributed.agreed_number(newest or 0)
        if number and distributed.all_agree(self._mined.accepts(number, within)):
            first_step = max(step + BATCHES_AHEAD, self._mined.switches[-1].step + 1)
            self._mined.record(Switch(first_step, number))
        self._log(step)
        return None

    def _later(self, step: int) -> set[int]:
        """The generations that the run mined after this update."""
        own = own_generations(self._mined, self._run_dir) if self._run_dir else {}
        return {number for number, manifest in own.items() if manifest.get("checkpoint_step", 0) > step}

    def _log(self, step: int) -> None:
        manifest = self._mined.manifest_at(step)
        facts = {"negatives/generation": float(self._mined.generation_at(step))}
        if manifest.get("checkpoint_step", step + 1) <= step:  # another run's checkpoint has no bearing on this one's age
            facts["negatives/staleness"] = float(step - manifest["checkpoint_step"])
        facts |= {f"negatives/{name}": float(value) for name, value in manifest.get("statistics", {}).items()}
        for sink in self._sinks:
            sink(step, facts)
