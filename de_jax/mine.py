"""Mines hard negatives beside a training run: a generation from each new checkpoint, until the run is complete.

de-jax train --gin_file=recipes/ance_firstp.gin --gin.MODEL=runs/bm25 --gin.beir_pairs.dataset_dir=data/scifact --run_dir=runs/ance
de-jax mine  --gin_file=recipes/ance_firstp.gin --gin.MODEL=runs/bm25 --gin.beir_pairs.dataset_dir=data/scifact --run_dir=runs/ance

Both commands take the same arguments. Run them on one machine, or on two that see the same folders. Stop and restart either at any
time: without its miner, a run continues with its current negatives. Prints one JSON object for each generation.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from de_jax import command
from de_jax.data.sources.options import Share
from de_jax.data.sources.training_set import TrainingSet
from de_jax.evaluation.dev_scores import score_index
from de_jax.files import mirrors
from de_jax.mining.generations import Generation
from de_jax.mining.miner import Miner
from de_jax.mining.mining_run import mine_generation, mined_steps, only_miner
from de_jax.recipe import Recipe
from de_jax.settings import PositiveFloat, numeric
from de_jax.training.run.run_folder import CHECKPOINTS_DIR, Run, complete_steps, load_run
from de_jax.types import InputError


def mine(recipe: Recipe, run_dir: str | Path, *, once: bool = False, poll_seconds: float = 5.0) -> Iterator[Generation]:
    """Yields a generation mined by the run's newest checkpoint, then by each newer checkpoint; ends with the run's last.

    Each is mined when it is asked for: `for generation in mine(recipe, run_dir): ...`.

    Skipped are checkpoints that the trainer removes in the meantime, and checkpoints for which the disk was too full. If several
    checkpoints appear while another is mined, the newest is taken.

    Args:
        recipe: the run's own.
        run_dir: the run; it may start later.
        once: mine with the newest checkpoint, then end.
        poll_seconds: between two looks for a newer checkpoint.

    Raises:
        InputError: the recipe mines nothing, another miner is at work, the run is of other texts or another vocabulary, or, with
            `once`, there is no checkpoint.
    """
    run_dir = mirrors.local(run_dir)
    if recipe.negatives.miner is None:
        raise InputError("the recipe mines nothing; set train.miner = @Miner().")
    if recipe.negatives.mine_every_steps is not None and not once:
        raise InputError("the run mines by itself every train.mine_every_steps updates; set that to None to mine beside it.")
    recipe.negatives.miner.check()
    data = recipe.data(share=Share(run_dir=str(run_dir)))
    if not data.all_mined:
        raise InputError(f"no folder is set for the generations; set {recipe.options_name}.negatives_dir.")
    with mirrors.kept_equal(run_dir) as sync:
        if sync:
            sync.follow(run_dir, *(mined.negatives_dir for mined in data.all_mined.values()))
        yield from _mine(recipe, recipe.negatives.miner, run_dir, data, once, poll_seconds)


def _mine(recipe: Recipe, miner: Miner, run_dir: Path, data: TrainingSet, once: bool, poll_seconds: float) -> Iterator[Generation]:
    """As `mine`, of data that is open."""
    if not once:
        # The run mines the first generation itself if the folder is empty, so the folder belongs to the run until then.
        all_begun = lambda: all(mined.newest() is not None for mined in data.all_mined.values())  # noqa: E731
        _wait_until(all_begun, f"the run in {run_dir} to begin", poll_seconds)
    with contextlib.ExitStack() as locks:
        for mined in data.all_mined.values():
            locks.enter_context(only_miner(mined.negatives_dir))
        # A generation beyond the newest checkpoint is another run's, a warm-up's for example.
        newest = max(complete_steps(run_dir / CHECKPOINTS_DIR), default=-1)
        by_all = set[int].intersection(*(mined_steps(mined) for mined in data.all_mined.values()))
        last = max((step for step in by_all if step <= newest), default=-1)
        steps = iter([_newest_step(run_dir)]) if once else _new_steps(run_dir, last, recipe.optimization.num_steps, poll_seconds)
        for step in steps:
            try:
                run = load_run(run_dir, None if once else step)  # the trainer may remove the newest, and another is as good
                _check_same_texts(run, data)
                yield from _mine_all(run, data, miner)
            except InputError:
                if once or step == max(complete_steps(run_dir / CHECKPOINTS_DIR), default=step):  # the newest is not removed
                    raise
                warnings.warn(f"the checkpoint of step {step} was removed while it was read; a newer one is taken.", stacklevel=2)
            except OSError as error:
                if once or error.errno not in command.MENDABLE:
                    raise
                where = f" at {error.filename}" if error.filename else ""
                warnings.warn(f"nothing was mined by step {step}: {error.strerror}{where}; the next one is tried.", stacklevel=2)


def _mine_all(run: Run, data: TrainingSet, miner: Miner) -> Iterator[Generation]:
    """A generation of each part of the data that has a folder for it, with its own prompts and lengths."""
    for name, mined in data.all_mined.items():
        part = data.parts[name]
        own = run._replace(query=part.query, doc=part.doc) if name else run
        score = functools.partial(score_index, own, part.dev, doc_ids=part.dev.doc_store.ids) if part.dev else None
        generation = mine_generation(own, mined, miner, source=name, score=score)
        assert generation is not None  # this is the only process
        yield generation


def main(argv: list[str] | None = None) -> None:
    """The command."""
    from de_jax import configurables  # mining from Python needs no gin

    args, bindings = configurables.parse_with_settings(_parser(), argv)
    command.use_memory_fraction(args.memory_fraction)
    recipe = configurables.read_recipe(args.gin_file, bindings, allow_imports=args.allow_imports)
    for generation in mine(recipe, Path(args.run_dir), once=args.once, poll_seconds=args.poll_seconds):
        said = ("checkpoint_step", "num_pairs", "seconds", "statistics")
        print(
            json.dumps({"generation_dir": str(generation.folder)} | {name: generation.manifest[name] for name in said}), flush=True
        )


def _wait_until(condition: Callable[[], bool], what: str, poll_seconds: float) -> None:
    is_told = False
    while not condition():
        if not is_told:
            print(f"waiting for {what}", file=sys.stderr, flush=True)
            is_told = True
        time.sleep(poll_seconds)


def _newest_step(run_dir: Path) -> int:
    steps = complete_steps(run_dir / CHECKPOINTS_DIR)
    if not steps:
        raise InputError(f"{run_dir} has no checkpoint to mine with; start the run first, or leave --once out to wait for it.")
    return steps[-1]


def _new_steps(run_dir: Path, last: int, num_steps: int, poll_seconds: float) -> Iterator[int]:
    """The newest checkpoint beyond the last one, as often as there is one, and waits for it; ends once the run is complete."""

    def newest() -> int:
        return max(complete_steps(run_dir / CHECKPOINTS_DIR), default=-1)

    while True:
        _wait_until(lambda: newest() > last or newest() >= num_steps, f"a checkpoint in {run_dir}", poll_seconds)
        if (last := newest()) >= num_steps:
            return
        yield last


def _check_same_texts(run: Run, data: TrainingSet) -> None:
    """Whether the stores hold the tokens that the run's towers know."""
    for tower, side in (("query", data.query), ("doc", data.doc)):
        if run.side(tower).tokenizer.fingerprint != side.tokenizer.fingerprint:
            raise InputError(
                f"{run.run_dir} has another {tower}_tokenizer than this recipe; give the arguments that the run was started with."
            )


def _parser() -> command.Parser:
    parser = command.Parser(description=__doc__)
    parser.add_argument(
        "--gin_file", action="append", default=[], required=True, help="the run's recipe, as for de-jax train; repeatable"
    )
    parser.add_argument("--run_dir", required=True, help="the run; it may start later")
    parser.add_argument("--once", action="store_true", help="mine once with the newest checkpoint, then exit")
    parser.add_argument(
        "--poll_seconds", type=numeric(PositiveFloat), default=5.0, help="seconds between checks for a newer checkpoint (default 5)"
    )
    command.add_memory_fraction(parser)
    return parser


if __name__ == "__main__":
    command.run(main)
