"""A training run of any model: its state on the mesh, checkpoints, logs and faults, and how it continues after a stop.

`train.py` and `doc2query/generator_run.py` set the model and the actions between two updates.
"""

import contextlib
import dataclasses
import functools
import platform
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from de_jax import __version__
from de_jax.data.batches.prefetch import prefetch
from de_jax.files import addresses, outputs, reading
from de_jax.settings import Count, Record, list_of
from de_jax.training.hooks import faults
from de_jax.training.mesh import distributed, plan, sharding
from de_jax.training.mesh.distributed import StopOnSignal
from de_jax.training.optim import paths
from de_jax.training.run import run_log
from de_jax.training.run.checkpoint import ENDED, Checkpoints, SaveCheckpoints, read_base, write_base
from de_jax.training.run.fit import Hook, Stop, fit
from de_jax.training.run.run_folder import CHECKPOINTS_DIR, LOCK_FILE
from de_jax.training.run.settings import Logging, Optimization
from de_jax.training.run.wandb_log import wandb_sink
from de_jax.types import Batches, InputError, Metrics, Params, TrainState, TrainStep

ENVIRONMENT_FILE = "environment.json"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
_RECORDS = list_of(Record({"from_step": Count}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """The model, data and step of a training run.

    Attributes:
        init: gives the state before the first update; compiled.
        start_from: maps the parameters' shapes on the mesh to their first values; `init` draws the parameters that stay shapes.
        step: one update; compiled.
        like: the shapes of the state, and where each array lies on the mesh.
        mesh: the devices.
        batches: this process's rows.
        batch_size, epoch_steps: pairs of a global batch, and updates in an epoch if the data have epochs.
        optimization, logging: see `settings`.
        explanation: how faults name pairs and settings.
    """

    init: Callable[[], TrainState]
    start_from: Callable[[Params], Params]
    step: TrainStep
    like: TrainState
    mesh: jax.sharding.Mesh
    batches: Batches
    batch_size: int
    optimization: Optimization
    logging: Logging
    explanation: faults.Explanation
    epoch_steps: int | None = None


@dataclasses.dataclass(frozen=True)
class Session:
    """A run between its beginning, or its last checkpoint, and its end; gives the hooks that every run has.

    Attributes:
        training: the model, data and step.
        run_dir: gets the logs and checkpoints.
        checkpoints: of the run.
        state: the first one; the first update takes its arrays.
        start_step: updates done before.
        beside: the values saved beside that state; empty for a new run.
        owner: uploads a run in a bucket; None for any other.
    """

    training: Training
    run_dir: Path
    checkpoints: Checkpoints
    state: TrainState
    start_step: int
    beside: dict[str, Any]
    owner: Any
    _step_fn: Any
    _terminate: StopOnSignal
    _at_end: contextlib.ExitStack

    def sinks(self) -> list[run_log.Sink]:
        """metrics.jsonl, TensorBoard, a progress bar and, if asked for, W&B; the first process writes them for all."""
        if not distributed.is_first():
            return []
        num_steps, epoch_steps = self.training.optimization.num_steps, self.training.epoch_steps
        sinks = [
            run_log.jsonl_sink(self.run_dir, self.start_step),
            run_log.tensorboard_sink(self.run_dir, self.start_step),
            self._at_end.enter_context(run_log.progress_sink(num_steps, self.start_step, epoch_steps)),
        ]
        if project := self.training.logging.wandb:
            sinks.append(self._at_end.enter_context(wandb_sink(self.run_dir, self.start_step, project)))
        return sinks

    def log(self, sinks: Sequence[run_log.Sink], source_of: Callable[[int], str] = lambda step: "") -> run_log.LogMetrics:
        """The hook that logs, with the line that the last session left unfinished; see there for the arguments."""
        optimization = self.training.optimization
        return run_log.LogMetrics(
            sinks,
            every_steps=self.training.logging.log_every_steps,
            num_steps=optimization.num_steps,
            pairs_per_step=self.training.batch_size,
            schedule=functools.partial(jax.jit(lambda numbers, step: optimization.rates(numbers)(step)), optimization.numbers),
            begun=self.beside.get("log"),
            source_of=source_of,
        )

    def profile(self) -> list[Hook]:
        """The hook that traces some updates, if that is asked for."""
        if not self.training.logging.profile_steps:
            return []
        first, count = self.training.logging.profile_steps
        steps = {"num_steps": self.training.optimization.num_steps, "start_step": self.start_step}
        profile = ProfileSteps(self.run_dir / "profile", first=first, count=count, **steps)
        self._at_end.callback(profile.close)
        return [profile]

    def save(
        self,
        log: run_log.LogMetrics,
        *,
        beside: Callable[[], dict[str, Any]] = dict,
        reasons: Sequence[Callable[[], str | None]] = (),
    ) -> SaveCheckpoints:
        """The hook that saves, and ends the run on SIGTERM or Ctrl-C; the last of all hooks.

        Args:
            log: its unfinished line is saved too.
            beside: further values to save beside the state.
            reasons: each gives why the run is to end after this update, or None.
        """

        def ended() -> str | None:
            return next(filter(None, (one() for one in reasons)), None)

        return SaveCheckpoints(
            self.checkpoints,
            every_steps=self.training.logging.save_every_steps,
            num_steps=self.training.optimization.num_steps,
            beside=lambda: {"log": log.unfinished(), ENDED: ended(), "environment": environment(), **beside()},
            asked_to_stop=lambda step: self._terminate.reason(step) or ended(),
        )

    def fit(self, hooks: Sequence[Hook]) -> tuple[TrainState, Stop | None]:
        """Trains to the last update, or until a hook stops it, see `fit.fit`; Ctrl-C saves and raises KeyboardInterrupt."""
        batches, mesh = self.training.batches, self.training.mesh
        if distributed.is_first():
            keep_environment(self.run_dir, self.start_step, self.beside.get("environment"))
        step_fn = run_log.naming_shapes(self._step_fn) if distributed.is_first() else self._step_fn
        with self._terminate.interruptible():
            try:
                return fit(
                    step_fn,
                    self.state,
                    lambda first: sharding.placed(prefetch(batches(first)), mesh),
                    num_steps=self.training.optimization.num_steps,
                    hooks=[self._check_place, *hooks[:-1], self._check_place, *hooks[-1:]],  # the last one saves
                )
            except OSError:  # a file of the run is not there
                self._check_place()
                raise

    def _check_place(self, *update: Any) -> None:
        """Before this update is logged or saved: the folder is still that of this run."""
        if self.owner:
            self.owner.check()
        outputs.check_held(self.run_dir / LOCK_FILE)


@contextlib.contextmanager
def session(training: Training, run_dir: Path) -> Iterator[Session]:
    """The run where its newest checkpoint left it, or before its first update; the folder's lock is the caller's.

    Raises:
        InputError: also by what runs within: which step and pairs gave no finite number, what to change where memory is short,
            or that a checkpoint cannot be read or written.
    """
    keep = training.logging.keep_checkpoints
    with (
        contextlib.closing(Checkpoints(run_dir / CHECKPOINTS_DIR, keep=keep)) as checkpoints,
        StopOnSignal() as terminate,
        contextlib.ExitStack() as at_end,
    ):
        shardings: TrainState = jax.tree.map(lambda leaf: leaf.sharding, training.like)
        step_fn = sharding.compiled_step(training.step, shardings, training.mesh)
        with _faults_explained(training, checkpoints, step_fn):
            state = _first_state(training, checkpoints)
            if state.base is not None and checkpoints.latest_step() is None:
                write_base(run_dir, state.base)
            checkpoints.remove_old()
            start_step = int(state.step)
            beside = checkpoints.beside(start_step) if start_step else {}
            owner = addresses.owner_of(run_dir)
            yield Session(training, run_dir, checkpoints, state, start_step, beside, owner, step_fn, terminate, at_end)


def fresh_state(init: Callable[[], TrainState], start_from: Callable[[Params], Params], like: TrainState) -> TrainState:
    """The state before the first update; each array lies on the mesh from the start like its counterpart in `like`."""
    given = paths.by_path(start_from(like.all_params))
    of = lambda path, own: given[path] if isinstance(given[path], jax.Array) else own  # noqa: E731
    params, base = (paths.map_with_path(of, part) for part in (like.params, like.base))
    return completed(init, like._replace(params=params, base=base))


def completed(init: Callable[[], TrainState], state: TrainState) -> TrainState:
    """The state with what `init` gives in the place of shapes.

    Nothing else is drawn: to compile unneeded random numbers took seconds.
    """
    is_shape = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)  # noqa: E731
    if not any(map(is_shape, jax.tree.leaves(state))):
        return state
    places = jax.tree.map(lambda leaf: leaf.sharding if is_shape(leaf) else None, state)
    absent = lambda: jax.tree.map(lambda leaf, drawn: drawn if is_shape(leaf) else None, state, init())  # noqa: E731
    drawn = jax.jit(absent, out_shardings=places)()
    return jax.tree.map(lambda leaf, drawn: drawn if is_shape(leaf) else leaf, state, drawn)


def _first_state(training: Training, checkpoints: Checkpoints) -> TrainState:
    """The newest checkpoint, or a fresh state."""
    latest, num_steps = checkpoints.latest_step(), training.optimization.num_steps
    if latest is None:
        return fresh_state(training.init, training.start_from, training.like)
    if latest > num_steps:
        name = training.explanation.num_steps
        raise InputError(f"the run is at step {latest} already, past {name} = {num_steps}; raise it.")
    state, of_base = checkpoints.restore(latest, training.like), training.like.base
    if of_base is not None:
        state = state._replace(base=read_base(checkpoints.folder.parent, of_base))
    return completed(training.init, state)


@contextlib.contextmanager
def _faults_explained(training: Training, checkpoints: Checkpoints, step_fn: Any) -> Iterator[None]:
    """Names the step and the pairs without a finite number, or the settings to change if memory is short."""
    explanation, mesh = training.explanation, training.mesh
    try:
        yield
    except faults.NonFiniteError as error:
        checkpoints.wait()
        batch = next(training.batches(error.step - 1))
        params_before = lambda: _first_state(training, checkpoints).all_params  # noqa: E731
        raise faults.non_finite(error, batch, explanation, mesh, params_before, checkpoints.latest_step()) from None
    except jax.errors.JaxRuntimeError as error:
        if not faults.is_out_of_memory(error):
            raise
        memory = None
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            memory = plan.compile_for(mesh, step_fn, training.like, sharding.place(next(training.batches(0)), mesh)).memory
        raise faults.out_of_memory(error, explanation, mesh, memory and memory.total) from error


def environment() -> dict[str, Any]:
    """What decides the bits of an update beside the settings: versions, devices and the number of processes."""
    versions = {name: metadata.version(name) for name in _PACKAGES}
    return {
        "de_jax": __version__,
        "python": platform.python_version(),
        **versions,
        "device": jax.devices()[0].device_kind,
        "num_devices": jax.device_count(),
        "num_processes": jax.process_count(),
        "machine": platform.machine(),
    }


def environments(run_dir: Path, step: int | None = None) -> list[dict[str, Any]]:
    """The environments of a run up to a step, each with the step `from_step` that it began at; none for runs of before 0.2."""
    path = run_dir / ENVIRONMENT_FILE
    found: list[dict[str, Any]] = reading.read_json(path, _RECORDS) if path.is_file() else []
    return [one for one in found if step is None or one["from_step"] <= step]


def keep_environment(run_dir: Path, start_step: int, before: dict[str, Any] | None) -> None:
    """Adds the environment of a start to `environment.json`; warns if it differs from that of the checkpoint continued from."""
    here = environment()
    changed = [f"{name} {before.get(name)} is now {value}" for name, value in here.items() if before and before.get(name) != value]
    if changed:
        warnings.warn(f"{run_dir} continues elsewhere ({', '.join(changed)}), so its bits may differ from then on.", stacklevel=2)
    there = environments(run_dir)
    records = [one for one in there if one["from_step"] < start_step]
    if not records or {**records[-1], **here} != records[-1]:
        records.append({"from_step": start_step, **here})
    if records != there:
        outputs.write_json(run_dir / ENVIRONMENT_FILE, records)


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
