"""Evaluation during training, and the best checkpoint by it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from de_jax.training.mesh import distributed
from de_jax.training.run.checkpoint import Checkpoints
from de_jax.training.run.fit import Stop
from de_jax.training.run.run_log import Sink
from de_jax.types import Metrics, Params, TrainState

Evaluate = Callable[[Params], dict[str, float]]
"""Scores by name for these parameters; higher is better."""


class EvaluateOnDev:
    """A hook that scores the parameters every `every_steps` updates and after the last, and keeps the best checkpoint.

    Args:
        evaluate: gives the scores, for example {"ndcg@10": ..., "mrr@10": ...}.
        every_steps: updates between two evaluations.
        num_steps: updates of the run.
        best: the folder of the best checkpoint; it holds the scores too, so a resumed run knows what to beat.
        metric: which score decides.
        sinks: who gets the scores, as "dev/<name>".
        on_seconds: told how long an evaluation took.
        before: called before each evaluation; waits for the step, so that only the evaluation is timed, and may raise.
    """

    def __init__(
        self,
        evaluate: Evaluate,
        *,
        every_steps: int,
        num_steps: int,
        best: Checkpoints,
        metric: str = "ndcg@10",
        sinks: Sequence[Sink] = (),
        on_seconds: Callable[[float], None] = lambda seconds: None,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        self._evaluate, self._every_steps, self._num_steps = evaluate, every_steps, num_steps
        self._best, self._metric, self._sinks = best, metric, sinks
        self._on_seconds, self._before = on_seconds, before

    def __call__(self, step: int, state: TrainState, metrics: Metrics) -> Stop | None:
        if step % self._every_steps and step != self._num_steps:
            return None
        self._before()
        start = time.monotonic()
        scores = self._evaluate(state.all_params)
        for sink in self._sinks:
            sink(step, {f"dev/{name}": value for name, value in scores.items()})
        if distributed.agreed(scores[self._metric] > self._value_to_beat()):
            self._best.remove_all(from_step=step)  # of a run that was set back to an earlier checkpoint
            self._best.save(step, state, scores)
        self._on_seconds(time.monotonic() - start)
        return None

    def _value_to_beat(self) -> float:
        self._best.wait()
        steps = self._best.steps()
        return self._best.beside(steps[-1])[self._metric] if steps else -math.inf
