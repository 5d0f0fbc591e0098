"""Checkpoints by Orbax: written in the background, complete or absent, refused when they belong to another model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from de_jax.training import paths
from de_jax.training.fit import Stop
from de_jax.types import InputError, Metrics, Params, TrainState


class Checkpoints:
    """The checkpoints of one folder, `<folder>/<step>/{params, training, metrics}`.

    Args:
        folder: where they lie; made when the first is saved.
        keep: how many of the newest stay.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2) -> None:
        self.folder = Path(folder).absolute()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=True)
        items = ("params", "training", "metrics")
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_names=items)

    def save(self, step: int, state: TrainState, metrics: dict[str, float] | None = None) -> None:
        """Starts writing `state`; returns once the arrays are copied from the devices. A step that exists is left alone."""
        if step in self._manager.all_steps():
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(state.params),
                training=ocp.args.StandardSave({"step": state.step, "opt_state": state.opt_state, "rng": state.rng}),
                metrics=ocp.args.JsonSave(metrics or {}),
            ),
        )

    def latest_step(self) -> int | None:
        """The newest complete checkpoint's step, or None."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """All complete checkpoints' steps, oldest first."""
        return sorted(self._manager.all_steps())

    def metrics(self, step: int) -> dict[str, float]:
        """What was saved beside the state."""
        return dict(self._manager.restore(step, args=ocp.args.Composite(metrics=ocp.args.JsonRestore()))["metrics"])

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The state of a step, each array placed as its counterpart in `like`.

        Args:
            step: one of `steps()`.
            like: arrays, or shapes with shardings.

        Raises:
            InputError: the checkpoint is of another model or optimizer, or damaged.
        """
        training = {"step": like.step, "opt_state": like.opt_state, "rng": like.rng}
        restored = self._restore(step, {"params": _abstract(like.params), "training": _abstract(training)})
        return TrainState(
            step=restored["training"]["step"],
            params=restored["params"],
            opt_state=restored["training"]["opt_state"],
            rng=restored["training"]["rng"],
        )

    def restore_params(self, step: int, like: Params) -> Params:
        """The parameters alone; the rest of the checkpoint is not read."""
        return self._restore(step, {"params": _abstract(like)})["params"]

    def wait(self) -> None:
        """Returns when everything asked for is on the disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, then lets the folder go."""
        self.wait()
        self._manager.close()

    def _restore(self, step: int, like: dict[str, Any]) -> dict[str, Any]:
        folder = self.folder / str(step)
        for name, tree in like.items():
            _check_same_tree(folder / name, self._stored_shapes(folder / name), tree)
        try:
            restore = {name: ocp.args.StandardRestore(tree) for name, tree in like.items()}
            return dict(self._manager.restore(step, args=ocp.args.Composite(**restore)))
        except (ValueError, KeyError, FileNotFoundError, OSError) as error:
            raise InputError(
                f"the checkpoint {folder} cannot be read ({_first_line(error)}); delete that folder to continue from an older one."
            ) from error

    def _stored_shapes(self, item: Path) -> dict[str, tuple[int, ...]]:
        try:
            metadata = ocp.StandardCheckpointHandler().metadata(item)
            tree = getattr(metadata, "tree", metadata)
        except (ValueError, KeyError, FileNotFoundError, OSError, json.JSONDecodeError) as error:
            raise InputError(
                f"the checkpoint {item} is incomplete or damaged ({_first_line(error)}); "
                "delete the folder above it to continue from an older one."
            ) from error
        leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: hasattr(node, "shape"))
        return {paths.path_of(key_path): tuple(leaf.shape or ()) for key_path, leaf in leaves if hasattr(leaf, "shape")}


class SaveCheckpoints:
    """A hook that saves every `every_steps` updates and after the last one, once `before` has run.

    Raises:
        InputError: the loss is not a finite number; such a state is never saved.
    """

    def __init__(
        self, checkpoints: Checkpoints, *, every_steps: int, num_steps: int, before: Callable[[], None] = lambda: None
    ) -> None:
        self._checkpoints, self._every_steps, self._num_steps, self._before = checkpoints, every_steps, num_steps, before

    def __call__(self, step: int, state: TrainState, metrics: Metrics) -> Stop | None:
        if step % self._every_steps == 0 or step == self._num_steps:
            check_finite(step, metrics)
            self._before()
            self._checkpoints.save(step, state)
        return None


def check_finite(step: int, metrics: Metrics) -> None:
    """Raises `InputError` when the loss of this step is not a finite number. Waits for the device."""
    loss = float(metrics["loss"])
    if loss - loss != 0.0:
        raise InputError(
            f"the loss of step {step} is {loss}; the last checkpoint before it is kept. "
            "A lower learning rate, gradient clipping or a higher temperature usually mends this."
        )


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)), tree)


def _check_same_tree(item: Path, stored: dict[str, tuple[int, ...]], like: Any) -> None:
    wanted = {paths.path_of(key_path): tuple(leaf.shape) for key_path, leaf in jax.tree_util.tree_leaves_with_path(like)}
    for path in sorted({*stored, *wanted}):
        if stored.get(path) != wanted.get(path):
            raise InputError(
                f"the checkpoint {item} is of another model: '{path}' has {_shape(stored.get(path))} there and "
                f"{_shape(wanted.get(path))} here; use the recipe it was trained with, or another run_dir."
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "no entry" if shape is None else f"shape {shape}"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
