"""Mines hard negatives beside a training run: a generation from each new checkpoint, until the run is complete.

de-jax train --gin_file=recipes/ance_firstp.gin --gin.MODEL=runs/bm25 --gin.beir_pairs.dataset_dir=data/scifact --run_dir=runs/ance
de-jax mine  --gin_file=recipes/ance_firstp.gin --gin.MODEL=runs/bm25 --gin.beir_pairs.dataset_dir=data/scifact --run_dir=runs/ance

Both commands take the same arguments. Run them on one machine, or on two that see the same folders. Stop and restart either at any
time: without its miner, a run continues with its current negatives. Prints one JSON object for each generation.

Several miners share each generation with --shard=0/4 to 3/4, or with --distributed if a cluster assigns the number. They share only
the run's folder. The last to finish its part writes the generation, with the bytes of a single miner.
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
from typing import Any, NamedTuple

from de_jax import arguments, command, recipe_file
from de_jax.data.negatives.generations import Generation
from de_jax.data.negatives.mined_negatives import MinedNegatives
from de_jax.data.sources.options import Share
from de_jax.data.sources.training_set import TrainingSet
from de_jax.evaluation.dev_scores import score_index
from de_jax.files import mirrors
from de_jax.files.buckets import Unreachable
from de_jax.mining import shared_checkpoint
from de_jax.mining.miner import Miner
from de_jax.mining.mining_run import mine_generation, mine_part, mined_steps, only_miner
from de_jax.recipe import Recipe
from de_jax.retrieval import encode
from de_jax.retrieval.parts import Part
from de_jax.settings import PositiveFloat, PositiveInt, numeric
from de_jax.training.run.checkpoint import end_of
from de_jax.training.run.run_folder import CHECKPOINTS_DIR, MINING_DIR, Run, complete_steps, load_run
from de_jax.types import InputError

REMINDER_SECONDS = 600.0
"""Between two lines about a part that is missing."""


def mine(
    recipe: Recipe,
    run_dir: str | Path,
    *,
    once: bool = False,
    poll_seconds: float = 5.0,
    part: Part | None = None,
    dtype: str | None = "auto",
    texts_per_shard: int = encode.TEXTS_PER_SHARD,
) -> Iterator[Generation]:
    """Yields a generation mined by the run's newest checkpoint, then by each newer one; ends with the run.

    Each is mined when it is asked for: `for generation in mine(recipe, run_dir): ...`.

    Skipped are checkpoints that the trainer removes in the meantime, and checkpoints for which the disk was too full. If several
    checkpoints appear while another is mined, the newest is taken.

    Args:
        recipe: the run's own.
        run_dir: the run; it may start later.
        once: mine with the newest checkpoint, then end.
        poll_seconds: between two looks for a newer checkpoint.
        part: of the documents, where as many miners as it says mine each generation together. The miner that completes a
            generation yields it.
        dtype: of matrix products in encoding, see `de_jax.load`; the same for all miners.
        texts_per_shard: see `encode.encode_to_dir`; the same for all miners.

    Raises:
        InputError: the recipe mines nothing, another miner is at work, the run is of other texts or another vocabulary, or, with
            `once`, there is no checkpoint.
    """
    run_dir = mirrors.local(run_dir)
    recipe = recipe_file.with_seeds(recipe, run_dir)
    if recipe.negatives.miner is None:
        raise InputError("the recipe mines nothing; set HardNegatives.miner.")
    if recipe.negatives.mine_every_steps is not None and not once:
        raise InputError(
            "the run mines by itself every HardNegatives.mine_every_steps updates; set that to None to mine beside it."
        )
    recipe.negatives.miner.check()
    data = recipe.data(share=Share(run_dir=str(run_dir)))
    if not data.all_mined:
        raise InputError("no folder is set for the generations; set PairsOptions.negatives_dir.")
    with mirrors.kept_equal(run_dir) as sync:
        if sync:
            sync.follow(run_dir, *(mined.negatives_dir for mined in data.all_mined.values()))
        newest = shared_checkpoint.newest_step(run_dir)  # if it ended the run, the run may be about to go on
        mining = _Mining(run_dir, data, recipe.negatives.miner, texts_per_shard, poll_seconds, sync, newest, dtype)
        yield from _mine(mining, part, None if once else recipe.optimization.num_steps)


class _Mining(NamedTuple):
    """A miner's run, data and settings."""

    run_dir: Path
    data: TrainingSet
    miner: Miner
    texts_per_shard: int
    poll_seconds: float
    sync: mirrors.Sync | None
    first_seen: int = -1  # the newest checkpoint at the start
    dtype: str | None = None  # of matrix products; the run's own

    def mined_until(self) -> int:
        """The newest checkpoint with a generation of every part of the data."""
        # A generation beyond the newest checkpoint is another run's, a warm-up's for example.
        newest = shared_checkpoint.newest_step(self.run_dir)
        by_all = set[int].intersection(*(mined_steps(mined, self.run_dir) for mined in self.data.all_mined.values()))
        return max((step for step in by_all if step <= newest), default=-1)

    def each(self, run: Run) -> Iterator[tuple[Run, MinedNegatives, dict[str, Any]]]:
        """For each part of the data with a folder of generations: the run with its prompts and lengths, and options of mining."""
        for name, mined in self.data.all_mined.items():
            part = self.data.parts[name]
            own = run._replace(query=part.query, doc=part.doc) if name else run
            score = functools.partial(score_index, own, part.dev, doc_ids=part.dev.doc_store.ids) if part.dev else None
            yield own, mined, {"source": name, "score": score, "texts_per_shard": self.texts_per_shard}

    def is_over(self, num_steps: int | None) -> bool:
        """Whether the run needs no more generations; raises the fault that ended the comparison with a bucket."""
        if self.sync:
            self.sync.check()
        if num_steps is None:
            return False
        newest = shared_checkpoint.newest_step(self.run_dir)
        has_ended = newest > self.first_seen and end_of(self.run_dir / CHECKPOINTS_DIR, newest) is not None
        return has_ended or newest >= num_steps


def _mine(mining: _Mining, part: Part | None, num_steps: int | None) -> Iterator[Generation]:
    """As `mine`; of the newest checkpoint alone without `num_steps`."""
    negatives = mining.data.all_mined.values()
    if num_steps is not None:
        # The run mines the first generation itself if the folder is empty, so the folder belongs to the run until then.
        all_begun = lambda: all(mined.newest() is not None for mined in negatives)  # noqa: E731
        _wait_until(all_begun, f"the run in {mining.run_dir} to begin", mining.poll_seconds)
    if part:
        yield from _mine_parts(mining, part, num_steps)
        return
    with contextlib.ExitStack() as locks:
        for mined in negatives:
            locks.enter_context(only_miner(mined.negatives_dir))
        yield from _mine_alone(mining, num_steps)


def _mine_alone(mining: _Mining, num_steps: int | None) -> Iterator[Generation]:
    """The generations of a single miner; of the newest checkpoint alone without `num_steps`."""
    run_dir, is_once = mining.run_dir, num_steps is None
    steps = _new_steps(mining, num_steps) if num_steps else iter([_newest_step(run_dir)])
    for step in steps:
        try:
            # The trainer may remove the newest, and another is as good.
            run = load_run(run_dir, None if is_once else step, dtype=mining.dtype)
            _check_same_texts(run, mining.data)
            for own, mined, options in mining.each(run):
                if not is_once and step in mined_steps(mined, run_dir):  # by a miner that was killed before it came to all sources
                    continue
                generation = mine_generation(own, mined, mining.miner, **options)
                assert generation is not None  # this is the only process
                yield generation
        except InputError as error:
            if is_once or step == max(complete_steps(run_dir / CHECKPOINTS_DIR), default=step):  # the newest is not removed
                raise
            warnings.warn(f"nothing was mined by step {step} ({error}); a newer checkpoint is taken.", stacklevel=3)
        except OSError as error:
            if is_once or error.errno not in command.MENDABLE:
                raise
            warnings.warn(f"nothing was mined by step {step}: {_reason(error)}; the next one is tried.", stacklevel=3)


def _mine_parts(mining: _Mining, part: Part, num_steps: int | None) -> Iterator[Generation]:
    """The generations that one of several miners completes; without `num_steps`, of the checkpoint at hand alone."""
    run_dir, is_once = mining.run_dir, num_steps is None
    if is_once:
        _newest_step(run_dir)
    while not mining.is_over(num_steps):
        step = None
        try:
            step = shared_checkpoint.take(run_dir, mining.mined_until)
            if step is None and is_once:
                print("the newest checkpoint has a generation already", file=sys.stderr)
                return
            if step is None:
                is_new = lambda: mining.is_over(num_steps) or shared_checkpoint.newest_step(run_dir) > mining.mined_until()  # noqa: E731
                _wait_until(is_new, f"a checkpoint in {run_dir}", mining.poll_seconds)
                continue
            run = load_run(run_dir, MINING_DIR, dtype=mining.dtype)
            _check_same_texts(run, mining.data)
            left = [(own, mined, options) for own, mined, options in mining.each(run) if step not in mined_steps(mined, run_dir)]
            joins = [mine_part(own, mined, mining.miner, part, **options) for own, mined, options in left]
            yield from _joined(mining, joins, run.step, num_steps)
        except Unreachable as error:
            if is_once:
                raise
            warnings.warn(f"{error} The part {part} is tried again.", stacklevel=3)
            time.sleep(mining.poll_seconds)
        except InputError:
            if step is None or shared_checkpoint.shared(run_dir, mining.mined_until()) == step:
                raise  # else others have mined with it meanwhile
        except OSError as error:
            if is_once or error.errno not in command.MENDABLE:
                raise
            warnings.warn(f"the part {part} of step {step} was not mined: {_reason(error)}; it is tried again.", stacklevel=3)
            time.sleep(mining.poll_seconds)
        if is_once:
            break
    shared_checkpoint.tidy(run_dir, mining.mined_until)


def _joined(
    mining: _Mining, joins: list[Callable[[], Generation | list[Part]]], step: int, num_steps: int | None
) -> Iterator[Generation]:
    """Waits until a step is mined by all parts, and yields the generations that this process completes on the way.

    Ends before, if others mine by another checkpoint or the part of this process is gone.
    """
    since, told_at = time.strftime("%Y-%m-%d %H:%M"), 0.0
    told: list[str] = []
    while shared_checkpoint.shared(mining.run_dir, mining.mined_until()) == step and not mining.is_over(num_steps):
        missing = []
        for join in joins:
            found = join()
            if isinstance(found, Generation):
                yield found
            else:
                missing += [str(one) for one in found]
        if mining.mined_until() >= step:
            return
        if missing and (missing != told or time.monotonic() > told_at + REMINDER_SECONDS):
            print(f"step {step}: waiting since {since} for part {', '.join(missing)}", file=sys.stderr, flush=True)
            told, told_at = missing, time.monotonic()
        if num_steps is None:
            return
        time.sleep(mining.poll_seconds)
        if not missing:
            return


def main(argv: list[str] | None = None) -> None:
    """The command."""
    from de_jax import configurables  # mining from Python needs no gin

    args, bindings = configurables.parse_with_settings(_parser(), argv)
    command.use_memory_fraction(args.memory_fraction)
    part = arguments.part(args)
    recipe = configurables.read_recipe(args.gin_file, bindings, allow_imports=args.allow_imports)
    options = {name: getattr(args, name) for name in ("once", "poll_seconds", "texts_per_shard")}
    for generation in mine(recipe, args.run_dir, part=part, dtype=arguments.dtype(args), **options):
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


def _new_steps(mining: _Mining, num_steps: int) -> Iterator[int]:
    """The newest checkpoint that was not mined with, as often as there is one, and waits for it; ends with the run."""
    last, newest = mining.mined_until(), functools.partial(shared_checkpoint.newest_step, mining.run_dir)
    while True:
        is_next = lambda: mining.is_over(num_steps) or newest() > last  # noqa: E731
        _wait_until(is_next, f"a checkpoint in {mining.run_dir}", mining.poll_seconds)
        if mining.is_over(num_steps):
            return
        yield (last := newest())


def _reason(error: OSError) -> str:
    return f"{error.strerror} at {error.filename}" if error.filename else str(error.strerror)


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
    parser.add_argument(
        "--texts_per_shard",
        type=numeric(PositiveInt),
        default=encode.TEXTS_PER_SHARD,
        help="texts encoded at a time; parts are multiples of this (default 32768)",
    )
    arguments.add_dtype(parser)
    arguments.add_shard(parser)
    command.add_memory_fraction(parser)
    return parser


if __name__ == "__main__":
    command.run(main)
