"""The base of a run with adapters, which no update changes: written once, before the first update, beside the checkpoints."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np

from de_jax.training.run.checkpoint import Checkpoints
from de_jax.types import Params, TrainState

BASE_DIR = "base"


def write(run_dir: Path, base: Params) -> None:
    """Writes the base of a new run; replaces the base of a run that was killed before its first checkpoint."""
    with contextlib.closing(Checkpoints(run_dir / BASE_DIR, keep=1)) as folder:
        folder.remove_all()
        folder.save(0, TrainState(np.zeros((), np.int32), base, {}, np.zeros((), np.int32)))


def read(run_dir: Path, like: Params) -> Params:
    """The base, each array placed as its counterpart in `like`.

    Raises:
        InputError: it is of another model, or damaged.
    """
    with contextlib.closing(Checkpoints(run_dir / BASE_DIR)) as folder:
        return folder.restore_params(0, like)
