"""Evaluation during training, the best checkpoint by it, and the end of a run that no longer gets better."""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from de_jax.training.mesh import distributed
from de_jax.training.run.checkpoint import Checkpoints
from de_jax.training.run.fit import Stop
from de_jax.training.run.run_log import Sink
from de_jax.types import Metrics, Params, TrainState

Evaluate = Callable[[Params], dict[str, float]]
"""Scores by name for these parameters."""


class EvaluateOnDev:
    """A hook that scores the parameters every `every_steps` updates and after the last, and keeps the best checkpoint.

    Args:
        evaluate: gives the scores, for example {"ndcg@10": ..., "mrr@10": ...}.
        best: the folder of the best checkpoint; it holds the scores too.
        metric: which score decides; a "loss" is better when it is lower, every other score when it is higher.
        patience: evaluations in a row without a better score after which the run is over; None for no end.
        start_step: updates of the run before. Checkpoints of later ones are of an attempt that was killed, which this one repeats.
        begun, sinks, paused: as of `StopWhenAligned`; sinks get the scores as "dev/<name>".
    """

    def __init__(
        self,
        evaluate: Evaluate,
        *,
        every_steps: int,
        num_steps: int,
        best: Checkpoints,
        metric: str = "ndcg@10",
        patience: int | None = None,
        begun: Mapping[str, Any] | None = None,
        start_step: int = 0,
        sinks: Sequence[Sink] = (),
        paused: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._evaluate, self._every_steps, self._num_steps = evaluate, every_steps, num_steps
        self._best, self._metric, self._patience, self._sinks, self._paused = best, metric, patience, sinks, paused
        self._reason: str | None = None
        self._progress: dict[str, Any] = {"best": None, "num_worse": 0, **(begun or {})}
        steps = best.steps()
        if not steps or steps[0] <= start_step:
            self._progress["best"] = best.beside(steps[0])[metric] if steps else None

    def __call__(self, step: int, state: TrainState, metrics: Metrics) -> Stop | None:
        if step % self._every_steps and step != self._num_steps:
            return None
        with self._paused():
            self._judge(step, state)
        return None

    def _judge(self, step: int, state: TrainState) -> None:
        scores = self._evaluate(state.all_params)
        for sink in self._sinks:
            sink(step, {f"dev/{name}": value for name, value in scores.items()})
        if distributed.agreed(self._is_better(scores[self._metric])):
            self._best.remove_all(from_step=step)  # of a run that was set back to an earlier checkpoint
            self._best.save(step, state, scores)
            self._progress = {"best": scores[self._metric], "num_worse": 0}
        else:
            self._progress["num_worse"] += 1
        reason = ended_early(self._progress, self._patience)
        if distributed.agreed(reason is not None):
            self._reason = reason or "the first process saw no better score on dev"

    def reason(self) -> str | None:
        """Why the run is over, or None."""
        return self._reason

    def progress(self) -> dict[str, Any]:
        """The state that a continued run needs, once the best checkpoint is on the disk; JSON."""
        self._best.wait()
        return dict(self._progress)

    def _is_better(self, score: float) -> bool:
        best = self._progress["best"]
        return not math.isnan(score) and (best is None or (score < best if self._metric == "loss" else score > best))


def ended_early(progress: Mapping[str, Any] | None, patience: int | None) -> str | None:
    """Why a run with this `EvaluateOnDev.progress` needs no more updates, or None."""
    if not progress or patience is None or progress["num_worse"] < patience:
        return None
    found = "gave no number" if progress["best"] is None else f"were no better than the best, {progress['best']:.4g}"
    return f"{progress['num_worse']} evaluations on dev in a row {found}"
