"""The checkpoint that several miners of a run mine with together, so that all parts of a generation are by one model.

<run_dir>/mining/40/    the files of checkpoints/40, by hard links where the file system has them

The first miner that asks puts the newest checkpoint there, by a rename; the others find it. It stays until a generation was mined
with it, though the trainer may have removed its own long before, so a miner that was killed continues with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from de_jax.files import folders, leases, mirrors, outputs
from de_jax.training.run.run_folder import CHECKPOINTS_DIR, MINING_DIR, complete_steps


def take(run_dir: Path, mined_until: Callable[[], int]) -> int | None:
    """The checkpoint to mine with now; None while every checkpoint is mined with.

    Args:
        run_dir: the run.
        mined_until: the newest checkpoint that generations were mined with.
    """
    step = shared(run_dir, mined_until())
    if step is not None and mirrors.is_there(run_dir / MINING_DIR / str(step) / folders.CHECKPOINT_FILE):
        return step
    if newest_step(run_dir) <= mined_until():
        return None
    with leases.in_turn(run_dir / MINING_DIR):
        mirrors.refresh(run_dir)
        mined = mined_until()  # another miner may have mined, and shared the next one, meanwhile
        _remove(run_dir, mined)
        if shared(run_dir, mined) is None and newest_step(run_dir) > mined:
            _share(run_dir, newest_step(run_dir))
        return shared(run_dir, mined)


def shared(run_dir: Path, mined: int) -> int | None:
    """The checkpoint that is shared, if it is newer than `mined`."""
    step = max(complete_steps(run_dir / MINING_DIR), default=-1)
    return step if step > mined else None


def tidy(run_dir: Path, mined_until: Callable[[], int]) -> None:
    """Removes a shared checkpoint that a generation was mined with."""
    with leases.in_turn(run_dir / MINING_DIR):
        _remove(run_dir, mined_until())


def newest_step(run_dir: Path) -> int:
    """The run's newest checkpoint; -1 without any."""
    return max(complete_steps(run_dir / CHECKPOINTS_DIR), default=-1)


def _remove(run_dir: Path, mined: int) -> None:
    outputs.remove_leftovers(run_dir / MINING_DIR)
    mirrors.clear(run_dir / MINING_DIR, lambda name: not name.isdigit() or int(name) > mined)


def _share(run_dir: Path, step: int) -> None:
    """Puts a checkpoint where all miners find it, unless the trainer removes it at this moment."""
    source = run_dir / CHECKPOINTS_DIR / str(step)
    with contextlib.suppress(FileNotFoundError), folders.atomic_dir(run_dir / MINING_DIR / str(step)) as temporary:
        files = _files(source)
        for name in files:
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            _link(source / name, temporary / name)
        if _files(source) != files:
            raise FileNotFoundError(f"{source} is being removed")


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _link(source: Path, path: Path) -> None:
    """A hard link, or a copy where the file system has none."""
    try:
        os.link(source, path)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(source, path)
