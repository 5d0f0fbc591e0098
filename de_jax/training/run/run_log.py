"""Where a run's numbers go: metrics.jsonl, TensorBoard event files, a progress bar."""

import contextlib
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from de_jax.files.outputs import append_text, atomic_file, make_folder, naming, progress_bar, say
from de_jax.files.reading import BOM, parse_json, read_bytes
from de_jax.settings import Count, Mismatch, Record, map_of, needs
from de_jax.training.hooks.faults import NonFiniteError
from de_jax.training.run.fit import Stop
from de_jax.types import Array, InputError, Metrics, Packed, Schedule, TrainState, TrainStep

METRICS_FILE = "metrics.jsonl"


def _scalar(value: Any) -> int | float:
    """A number of a log, which may be NaN or infinite."""
    if type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max):
        return value  # type: ignore[no-any-return]
    raise Mismatch(value, "a number")


_NUMBERS, _STEP = map_of(_scalar), Record({"step": Count})

Sink = Callable[[int, dict[str, float]], None]
"""Takes (updates done, scalars by name)."""


class _Window(NamedTuple):
    """The updates since the last line whose batches came from one source."""

    num_steps: int  # those before a restart included
    steps: tuple[int, ...]  # those of this process
    sums: Metrics
    num_finite: Array  # [] float32: how many of `steps` came before the first that gave no finite number


_Windows = dict[str, _Window]
"""By source; "" where a run has but one."""


class LogMetrics:
    """A hook that averages each metric over `every_steps` updates and hands the means to all sinks.

    The sums are kept on the device, and a mean is read one step late, when the next step is already queued: the device never
    waits for the log. A metric that some updates lack is averaged over the others.

    Args:
        sinks: who gets the numbers. A `ProgressBar` among them moves with every update.
        every_steps: updates per line.
        num_steps: updates of the run, so that the last line is written.
        pairs_per_step: the global batch size.
        schedule: the learning rate, logged beside the metrics.
        begun: the value of `unfinished` when the continued run was saved.
        source_of: the name of the source that an update's batch came from, by the updates done before it. A line then has the mean
            loss of each source too, as "loss/<name>"; by default there is one source without a name.

    Raises:
        NonFiniteError: the loss or the gradient is not a finite number; raised instead of the line that it would be in.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        *,
        every_steps: int,
        num_steps: int,
        pairs_per_step: int,
        schedule: Schedule,
        begun: Mapping[str, Any] | None = None,
        source_of: Callable[[int], str] = lambda step: "",
    ) -> None:
        self._sinks, self._every_steps, self._num_steps = sinks, every_steps, num_steps
        self._pairs_per_step, self._schedule, self._source_of = pairs_per_step, schedule, source_of
        self._windows: _Windows = _begun(begun or {})
        self._due: tuple[int, _Windows, Array] | None = None
        self._clock, self._num_timed = time.monotonic(), 0

    def __call__(self, step: int, state: TrainState, metrics: Metrics) -> Stop | None:
        for sink in self._sinks:
            if isinstance(sink, ProgressBar):
                sink.advance(step)
        self.flush()
        source = self._source_of(step - 1)
        window = self._windows.get(source)
        if window is None or window.sums.keys() != metrics.keys():  # a continued run has other metrics
            self._windows[source] = _Window(1, (step,), metrics, _is_finite(metrics))
        else:
            count, steps, sums, num_finite = window
            added = _add(sums, num_finite, np.float32(len(steps)), metrics)
            self._windows[source] = _Window(count + 1, (*steps, step), *added)
        self._num_timed += 1
        if step % self._every_steps == 0 or step == self._num_steps:
            # The learning rate is computed behind this step and read with its means, so it keeps no later step waiting.
            self._due = (step, self._windows, jnp.asarray(self._schedule(step - 1), jnp.float32))
            self._windows = {}
        if step == self._num_steps:
            self.flush()
        return None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Waits for the step, raises as `unfinished`, and leaves the seconds of the block (an evaluation) out of the speed."""
        self.unfinished()
        start = time.monotonic()
        yield
        self._clock += time.monotonic() - start

    def unfinished(self) -> dict[str, Any]:
        """Writes the line that is due, and returns the state of the next line for a continued run.

        Waits for the device. Raises as a line would, for the updates since the last one.
        """
        self.flush()
        windows = {
            source: {"count": window.num_steps, "sums": {name: float(value) for name, value in window.sums.items()}}
            for source, window in _fetched(self._windows).items()
        }
        return {**windows.pop("", {}), **({"sources": windows} if windows else {})}

    def flush(self) -> None:
        """Writes the line that is due, if one is."""
        if self._due is None:
            return
        step, windows, learning_rate = self._due
        self._due = None
        means = _means(_fetched(windows))
        now = time.monotonic()
        speed = self._num_timed * self._pairs_per_step / max(now - self._clock, 1e-9)
        self._clock, self._num_timed = now, 0
        scalars = {**means, "learning_rate": float(learning_rate), "pairs_per_second": speed}
        for sink in self._sinks:
            sink(step, scalars)


def _begun(begun: Mapping[str, Any]) -> _Windows:
    """The windows that `LogMetrics.unfinished` gave; all of their updates gave finite numbers."""
    saved = {**({"": begun} if "sums" in begun else {}), **begun.get("sources", {})}
    return {
        source: _Window(one["count"], (), {name: np.float32(value) for name, value in one["sums"].items()}, np.float32(0))
        for source, one in saved.items()
    }


def _fetched(windows: _Windows) -> _Windows:
    """The windows with their numbers on the host."""
    numbers = jax.device_get({source: (window.sums, window.num_finite) for source, window in windows.items()})
    windows = {source: window._replace(sums=numbers[source][0]) for source, window in windows.items()}
    if bad := [step for source, window in windows.items() for step in window.steps[int(numbers[source][1]) :][:1]]:
        raise NonFiniteError("the loss or the gradient of", min(bad))
    return windows


def _means(windows: _Windows) -> dict[str, float]:
    """Of each metric over the updates that have it, and of each source's loss."""
    means: dict[str, float] = {}
    for name in dict.fromkeys(name for window in windows.values() for name in window.sums):
        having = [window for window in windows.values() if name in window.sums]
        means[name] = sum(float(window.sums[name]) for window in having) / sum(window.num_steps for window in having)
    losses = {source: float(window.sums["loss"]) / window.num_steps for source, window in windows.items() if source}
    return means | {f"loss/{source}": loss for source, loss in losses.items()}


@jax.jit
def _add(sums: Metrics, num_finite: Array, count: Array, metrics: Metrics) -> tuple[Metrics, Array]:
    goes_on = (num_finite == count) & (_is_finite(metrics) > 0)
    return jax.tree.map(lambda a, b: a + b, sums, metrics), jnp.where(goes_on, num_finite + 1, num_finite)


@jax.jit
def _is_finite(metrics: Metrics) -> Array:
    watched = [metrics[name] for name in ("loss", "grad_norm") if name in metrics]
    return jnp.isfinite(jnp.stack(watched)).all().astype(jnp.float32)


def naming_shapes(step_fn: TrainStep) -> TrainStep:
    """The step, which names on stderr each new shape of a batch before it is compiled, and how long that took."""
    known = set()

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        shape = tuple(leaf.shape for leaf in jax.tree.leaves(batch))
        if shape in known:
            return step_fn(state, batch)
        known.add(shape)
        start = time.monotonic()
        say(f"compiling an update for batches of {_shapes(batch)}")
        after = step_fn(state, batch)
        say(f"compiled in {time.monotonic() - start:.1f} s")
        return after

    return step


def _shapes(batch: Any) -> str:
    """The arrays of a batch of more than one dimension, such as "query 22 x 32, doc 32 x 128"."""
    parts = jax.tree.leaves_with_path(batch, is_leaf=lambda part: isinstance(part, Packed))
    arrays = ((jax.tree_util.keystr(path, simple=True, separator="/"), getattr(part, "tokens", part)) for path, part in parts)
    return ", ".join(f"{name} {' x '.join(map(str, array.shape))}" for name, array in arrays if array.ndim > 1)


def jsonl_sink(run_dir: str | Path, start_step: int) -> Sink:
    """Appends a JSON object a line to `metrics.jsonl`; lines after `start_step`, of a run that was cut off, are dropped."""
    path = Path(run_dir) / METRICS_FILE
    is_resumed = start_step > 0 and path.exists()  # a run from update 0 repeats the scores before its first update too
    kept = [line for line in read_metrics(path) if line["step"] <= start_step] if is_resumed else []
    with atomic_file(path) as temporary:
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))

    def write(step: int, scalars: dict[str, float]) -> None:
        append_text(path, json.dumps({"step": step, **{name: float(f"{value:.8g}") for name, value in scalars.items()}}) + "\n")

    return write


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics file. Skips a damaged line with a warning, and a truncated last line silently."""
    *whole, last = read_bytes(path).removeprefix(BOM).split(b"\n")
    lines = []
    for number, raw in enumerate([*whole, last], start=1):
        try:
            lines.append(_STEP(_NUMBERS(parse_json(raw.decode(), allow_nan=True))))
        except ValueError:
            if number <= len(whole):
                warnings.warn(f"{path}, line {number}: damaged, so it is left out; the other lines are kept.", stacklevel=2)
    return lines


def tensorboard_sink(run_dir: str | Path, start_step: int) -> Sink:
    """Writes a TensorBoard event file under `<run_dir>/tensorboard`, if tensorboardX is installed."""
    # Not its SummaryWriter: that one writes in a thread, and when the disk is full the thread dies and the queue to it blocks.
    try:
        with needs("train", "TensorBoard's log"):
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event, SessionLog
            from tensorboardX.summary import scalar
    except InputError as error:
        say(f"{METRICS_FILE} alone has the curves: {error}")
        return lambda step, scalars: None

    folder = Path(run_dir) / "tensorboard"
    make_folder(folder)
    writer = EventsWriter(str(folder / "events"))
    if start_step:  # hides the lines of a killed run after its last checkpoint
        start = SessionLog(status=SessionLog.START)
        writer.write_event(Event(step=start_step + 1, wall_time=time.time(), session_log=start))

    def write(step: int, scalars: dict[str, float]) -> None:
        with naming(folder):
            for name, value in scalars.items():
                writer.write_event(Event(step=step, wall_time=time.time(), summary=scalar(name, value)))
            writer.flush()

    return write


class ProgressBar:
    """A sink: a bar on stderr with epoch, loss, pairs per second, dev score and time left. It moves with every update."""

    def __init__(self, bar: Any, epoch_steps: int | None = None) -> None:
        self._bar, self._epoch_steps = bar, epoch_steps
        self._shown: dict[str, str] = {}

    def __call__(self, step: int, scalars: dict[str, float]) -> None:
        short = {"loss": "loss", "pairs_per_second": "pairs/s", "dev/ndcg@10": "dev nDCG@10", "alignment/kl_divergence": "KL"}
        if self._epoch_steps:
            self._shown["epoch"] = f"{step / self._epoch_steps:.2f}/{self._bar.total / self._epoch_steps:.2f}"
        self._shown.update({short[name]: f"{value:.4g}" for name, value in scalars.items() if name in short})
        self._bar.set_postfix(self._shown)

    def advance(self, step: int) -> None:
        """Called after each update."""
        self._bar.update(step - self._bar.n)


@contextlib.contextmanager
def progress_sink(num_steps: int, start_step: int, epoch_steps: int | None = None) -> Iterator[Sink]:
    """A `ProgressBar`, whose last state stays on the screen."""
    with progress_bar(total=num_steps, initial=start_step, unit="step", desc="train", dynamic_ncols=True) as bar:
        yield ProgressBar(bar, epoch_steps)
