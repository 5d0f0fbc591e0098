"""A run's numbers for Weights & Biases, beside `metrics.jsonl` and TensorBoard; the package `wandb` is optional.

<run_dir>/wandb.json   the id of the W&B run, so that a continued run stays one run there
          wandb/       W&B's own files, which `wandb sync` sends where the run was offline
"""

import contextlib
import re
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from de_jax.files import reading
from de_jax.files.outputs import write_json
from de_jax.settings import Record, needs, some_text
from de_jax.training.run.recipe_file import read_recipe_file
from de_jax.training.run.run_log import Sink
from de_jax.types import InputError

ID_FILE = "wandb.json"
FINISH_SECONDS = 60.0
"""At the end of a run, for the lines that W&B has not taken yet."""
_OFFLINE = ("offline", "dryrun", "disabled")
_ID = Record({"id": some_text})


def check(project: str) -> None:
    """Refuses a run that W&B would refuse after it was compiled, by its project or login; asks W&B about the login alone."""
    if not re.fullmatch(r"(?:[^/\\#?%:]+/)?[^/\\#?%:]+", project):
        raise InputError(f"Logging.wandb is {project!r}; it must be a project of W&B, such as 'retrieval' or 'my-team/retrieval'.")
    wandb = _package()
    try:
        is_online = wandb.setup().settings.mode not in _OFFLINE
        if is_online and not wandb.login(prompt=False):
            raise ValueError("no API key is configured")
    except Exception as error:  # its own errors and those of the network have no common base
        raise _refused(project, error) from None


@contextlib.contextmanager
def wandb_sink(run_dir: str | Path, start_step: int, project: str) -> Iterator[Sink]:
    """Gives a sink; W&B's own process sends the lines, and has `FINISH_SECONDS` left at the end.

    A continued run stays one W&B run. After a kill, a run repeats the updates since its checkpoint; W&B keeps the lines that it
    already has, which are equal. A run that starts from update 0 is a new W&B run.

    Args:
        run_dir: gives the name, the settings (`recipe.json`) and the id, and gets W&B's files.
        start_step: updates done before.
        project: "project" or "entity/project".

    Raises:
        InputError: W&B does not begin the run.
    """
    run, is_taken = _begun(Path(run_dir), start_step, project), True

    def hand(function: Any, *args: Any, **options: Any) -> None:
        nonlocal is_taken
        try:
            function(*args, **options)
        except Exception as error:  # no fault of a log ends the training
            is_taken = False
            warnings.warn(f"W&B gets no more lines of this run ({_reason(error)}); metrics.jsonl has them all.", stacklevel=3)

    def write(step: int, scalars: dict[str, float]) -> None:
        if is_taken:
            hand(run.log, dict(scalars), step=step)

    exit_code = 1
    try:
        yield write
        exit_code = 0
    finally:
        if is_taken:
            hand(run.finish, exit_code=exit_code)


def _begun(run_dir: Path, start_step: int, project: str) -> Any:
    """The W&B run."""
    wandb = _package()
    path = run_dir / ID_FILE
    run_id = reading.read_json(path, _ID)["id"] if start_step and path.is_file() else uuid.uuid4().hex[:8]
    write_json(path, {"id": run_id})
    entity, _, name = project.rpartition("/")
    try:
        return wandb.init(
            project=name,
            entity=entity or None,
            id=run_id,
            resume="allow",
            name=run_dir.resolve().name,
            dir=str(run_dir),
            config=read_recipe_file(run_dir) or {},
            settings=wandb.Settings(console="off", finish_timeout=FINISH_SECONDS),
        )
    except Exception as error:  # as in `check`
        raise _refused(project, error) from None


def _package() -> Any:
    with needs("wandb", "Logging.wandb"):
        import wandb
    return wandb


def _refused(project: str, error: Exception) -> InputError:
    return InputError(
        f"W&B does not take runs for {project} ({_reason(error)}); run `wandb login` (wandb 0.31 or newer), or set "
        "WANDB_MODE=offline and send the run later by `wandb sync`."
    )


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
