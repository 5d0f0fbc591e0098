"""Where a run's numbers go: metrics.jsonl, TensorBoard event files, a progress bar."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from de_jax.data.files import atomic_file
from de_jax.training.checkpoint import check_finite
from de_jax.training.fit import Stop
from de_jax.training.optimizer import Schedule
from de_jax.types import Metrics, TrainState

METRICS_FILE = "metrics.jsonl"

Sink = Callable[[int, dict[str, float]], None]
"""Takes (updates done, scalars by name)."""


class LogMetrics:
    """A hook that averages each metric over `every_steps` updates and hands the means to all sinks.

    The sums are kept on the device, and a mean is read one step late, when the next step is already queued: the device never
    waits for the log.

    Args:
        sinks: who gets the numbers.
        every_steps: updates per line.
        num_steps: updates of the run, so that the last line is written.
        pairs_per_step: the global batch size.
        schedule: the learning rate, logged beside the metrics.
    """

    def __init__(self, sinks: Sequence[Sink], *, every_steps: int, num_steps: int, pairs_per_step: int, schedule: Schedule) -> None:
        self._sinks, self._every_steps, self._num_steps = sinks, every_steps, num_steps
        self._pairs_per_step, self._schedule = pairs_per_step, schedule
        self._sums: Metrics | None = None
        self._count = 0
        self._due: tuple[int, int, Metrics] | None = None
        self._clock = time.monotonic()

    def __call__(self, step: int, state: TrainState, metrics: Metrics) -> Stop | None:
        self.flush()
        self._sums = metrics if self._sums is None else _add(self._sums, metrics)
        self._count += 1
        if step % self._every_steps == 0 or step == self._num_steps:
            self._due = (step, self._count, self._sums)
            self._sums, self._count = None, 0
        if step == self._num_steps:
            self.flush()
        return None

    def skip_time(self, seconds: float) -> None:
        """Leaves the seconds that another hook took (an evaluation) out of the speed."""
        self._clock += seconds

    def flush(self) -> None:
        """Writes the line that is due, if one is. Before a checkpoint: a resumed run does not log those steps again."""
        if self._due is None:
            return
        step, count, sums = self._due
        self._due = None
        means = {name: float(value) / count for name, value in jax.device_get(sums).items()}
        now = time.monotonic()
        speed = count * self._pairs_per_step / max(now - self._clock, 1e-9)
        self._clock = now
        check_finite(step, means)
        scalars = {**means, "learning_rate": float(self._schedule(step - 1)), "pairs_per_second": speed}
        for sink in self._sinks:
            sink(step, scalars)


@jax.jit
def _add(sums: Metrics, metrics: Metrics) -> Metrics:
    return jax.tree.map(lambda a, b: a + b, sums, metrics)


def jsonl_sink(run_dir: str | Path, start_step: int) -> Sink:
    """Appends a JSON object a line to `metrics.jsonl`; lines after `start_step`, of a run that was cut off, are dropped."""
    path = Path(run_dir) / METRICS_FILE
    kept = [line for line in read_metrics(path) if line["step"] <= start_step] if path.exists() else []
    with atomic_file(path) as temporary:
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))

    def write(step: int, scalars: dict[str, float]) -> None:
        line = json.dumps({"step": step, **{name: round(value, 7) for name, value in scalars.items()}})
        with open(path, "a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    return write


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a last line that was cut off is left out."""
    lines = []
    for line in Path(path).read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


def tensorboard_sink(run_dir: str | Path, start_step: int) -> Sink:
    """Writes TensorBoard event files under `<run_dir>/tensorboard`, without TensorFlow."""
    from tensorboardX import SummaryWriter

    writer = SummaryWriter(str(Path(run_dir) / "tensorboard"), purge_step=start_step + 1 if start_step else None)

    def write(step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return write


def progress_sink(num_steps: int, start_step: int) -> Sink:
    """A bar on stderr with loss, pairs per second and the time left."""
    from tqdm import tqdm

    bar = tqdm(total=num_steps, initial=start_step, unit="step", desc="train", dynamic_ncols=True)
    shown: dict[str, str] = {}

    def write(step: int, scalars: dict[str, float]) -> None:
        short = {"loss": "loss", "pairs_per_second": "pairs/s", "dev/ndcg@10": "dev nDCG@10"}
        shown.update({short[name]: f"{value:.4g}" for name, value in scalars.items() if name in short})
        bar.set_postfix(shown, refresh=False)
        bar.update(step - bar.n)
        bar.refresh()
        if step == num_steps and "loss" in scalars:
            bar.close()

    return write
