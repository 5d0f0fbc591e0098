"""Mines hard negatives beside a training run: a generation from each new checkpoint, until the run is complete."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from de_jax import command
from de_jax.data.negatives import generations
from de_jax.data.negatives.generations import Generation
from de_jax.data.negatives.mined_negatives import MinedNegatives
from de_jax.data.sources.options import Share
from de_jax.data.sources.training_set import TrainingSet
from de_jax.evaluation.dev_scores import score_index
from de_jax.files import addresses, folders
from de_jax.mining.miner import Miner, encode_docs
from de_jax.mining.mining_run import kept_as, made_of, mine_generation, mined_steps, only_miner
from de_jax.recipe import Recipe
from de_jax.retrieval import corpus_embeddings
from de_jax.retrieval.parts import Part
from de_jax.training.mesh import sharding
from de_jax.training.run import recipe_file
from de_jax.training.run.checkpoint import end_of
from de_jax.training.run.run_folder import CHECKPOINTS_DIR, MINING_DIR, Run, complete_steps, continuing, load_run
from de_jax.types import InputError

MineStep = Callable[[int], Iterator[Any]]


def mine(
    recipe: Recipe,
    run_dir: str | Path,
    *,
    once: bool = False,
    step: int | None = None,
    poll_seconds: float = 5.0,
    dtype: str | None = "auto",
    texts_per_shard: int = corpus_embeddings.TEXTS_PER_SHARD,
) -> Iterator[Generation]:
    """Yields a generation mined by the run's newest checkpoint, then by each newer one; ends with the run.

    Each is mined when it is asked for: `for generation in mine(recipe, run_dir): ...`.

    Skipped are checkpoints that the trainer removes in the meantime, and checkpoints for which the disk was too full. If several
    checkpoints appear while another is mined, the newest is taken.

    Args:
        recipe: the run's own.
        run_dir: the run; it may start later.
        once: mine with one checkpoint, then end.
        step: that checkpoint, with `once`; None for the newest.
        poll_seconds: between two looks for a newer checkpoint.
        dtype: of matrix products in encoding, see `de_jax.load`.
        texts_per_shard: see `corpus_embeddings.encode_to_dir`.

    Raises:
        InputError: the recipe mines nothing, another miner is at work, the run has other texts or tokens, or no checkpoint.
    """
    with _opened(recipe, run_dir, once=once, poll_seconds=poll_seconds, dtype=dtype, texts_per_shard=texts_per_shard) as mining:
        held = only_miner(*(mined.negatives_dir for mined in mining.data.all_mined.values()))
        if once:
            _newest_step(mining.run_dir)
            with held:
                yield from mining.mine_step(step)
        else:
            yield from _until_the_end(mining, recipe.optimization.num_steps, mining.mine_step, held)


def mine_shard(recipe: Recipe, run_dir: str | Path, step: int, part: Part, **options: Any) -> None:
    """Encodes a part of the documents by a checkpoint, for the call of `mine` with `once` and this step.

    `options` are `dtype` and `texts_per_shard` of `mine`.
    """
    with _opened(recipe, run_dir, once=True, poll_seconds=0, **options) as mining:
        for own, mined, source in mining.each(mining.load(step)):
            encode_docs(own, mined.texts, kept_as(source), part=part, texts_per_shard=mining.texts_per_shard)


@contextlib.contextmanager
def _opened(recipe: Recipe, run_dir: str | Path, *, once: bool, **options: Any) -> Iterator[_Mining]:
    """The data of a recipe that mines."""
    run_dir = addresses.local(run_dir)
    recipe = recipe_file.with_seeds(recipe, run_dir)
    if recipe.negatives.miner is None:
        raise InputError("the recipe mines nothing; set HardNegatives.miner.")
    if recipe.negatives.mine_every_steps is not None and not once:
        raise InputError("the run mines by itself every HardNegatives.mine_every_steps updates; set it to None to mine beside it.")
    recipe.negatives.miner.check()
    with continuing(run_dir):
        data = recipe.data(share=Share(run_dir=str(run_dir)))
    if not data.all_mined:
        raise InputError("no folder is set for the generations; set PairsOptions.negatives_dir.")
    first_seen = _newest(run_dir)  # if it ended the run, the run may be about to go on
    yield _Mining(run_dir, data, recipe.negatives.miner, first_seen, **options)


class _Mining(NamedTuple):
    """A miner's run, data and settings."""

    run_dir: Path
    data: TrainingSet
    miner: Miner
    first_seen: int  # the newest checkpoint at the start
    poll_seconds: float
    texts_per_shard: int = corpus_embeddings.TEXTS_PER_SHARD
    dtype: str | None = None  # of matrix products; the run's own

    def refresh(self) -> None:
        """Fetches the files that the trainer wrote since to folders in a bucket."""
        for folder in {self.run_dir, *(mined.negatives_dir for mined in self.data.all_mined.values())}:
            if copies := addresses.wing(folder):
                copies.follow(folder)

    def load(self, step: int | None) -> Run:
        """The run with a checkpoint, if its towers know the tokens of the stores."""
        run = load_run(self.run_dir, step, dtype=sharding.precision(self.dtype))
        for tower, side in (("query", self.data.query), ("doc", self.data.doc)):
            if run.side(tower).tokenizer.fingerprint != side.tokenizer.fingerprint:
                raise InputError(
                    f"{run.run_dir} has another {tower}_tokenizer than this recipe; give the arguments that it was started with."
                )
        return run

    def mined_until(self) -> int:
        """The newest checkpoint with a generation of every part of the data."""
        # A generation beyond the newest checkpoint is another run's, a warm-up's for example.
        newest = _newest(self.run_dir)
        by_all = set[int].intersection(*(mined_steps(mined, self.run_dir) for mined in self.data.all_mined.values()))
        return max((step for step in by_all if step <= newest), default=-1)

    def each(self, run: Run) -> Iterator[tuple[Run, MinedNegatives, str]]:
        """For each part of the data with a folder of generations: the run with its prompts and lengths, and the part's name."""
        for name, mined in self.data.all_mined.items():
            part = self.data.parts[name]
            yield run._replace(query=part.query, doc=part.doc) if name else run, mined, name

    def mine_step(self, step: int | None) -> Iterator[Generation]:
        """The generations by one checkpoint; a generation that a killed miner wrote is kept."""
        for own, mined, source in self.each(self.load(step)):
            key = made_of(own, mined.texts, self.miner)
            if found := generations.newest_made_of(mined.negatives_dir, key):
                yield found
                continue
            dev = self.data.parts[source].dev
            score = functools.partial(score_index, own, dev, doc_ids=dev.doc_store.ids) if dev else None
            options: dict[str, Any] = {"score": score, "texts_per_shard": self.texts_per_shard, "facts": {"made_of": key}}
            generation = mine_generation(own, mined, self.miner, source=source, **options)
            assert generation is not None  # this is the only process
            yield generation

    def is_over(self, num_steps: int) -> bool:
        """Whether the run needs no more generations; raises where another miner took a folder in a bucket over."""
        for mined in self.data.all_mined.values():
            if owner := addresses.owner_of(mined.negatives_dir):
                owner.check()
        newest = _newest(self.run_dir)
        has_ended = newest > self.first_seen and end_of(self.run_dir / CHECKPOINTS_DIR, newest) is not None
        return has_ended or newest >= num_steps


def mine_elsewhere(
    recipe: Recipe, run_dir: str | Path, by_step: Callable[[int], list[dict[str, Any]] | None], *, step: int | None, **options: Any
) -> Iterator[dict[str, Any]]:
    """As `mine`, with other processes that mine by one checkpoint, which is kept for them meanwhile.

    `by_step` gives the reports of their generations by the checkpoint of a step; `options` are the other ones of `mine`.
    """

    def mine_step(step: int) -> Iterator[dict[str, Any]]:
        with _kept(mining.run_dir, step):
            yield from by_step(step) or ()

    with _opened(recipe, run_dir, **options) as mining:
        if addresses.address_of(mining.run_dir):
            raise InputError("--engine needs a run in a folder that all machines see, not in a bucket.")
        if options["once"]:
            yield from mine_step(_newest_step(mining.run_dir) if step is None else step)
        else:
            yield from _until_the_end(mining, recipe.optimization.num_steps, mine_step, contextlib.nullcontext())


def _until_the_end(
    mining: _Mining, num_steps: int, mine_step: MineStep, held: contextlib.AbstractContextManager[None]
) -> Iterator[Any]:
    """What `mine_step` yields of each new checkpoint, while `held` is entered."""
    # The run mines the first generation itself if the folder is empty, so the folder belongs to the run until then.
    all_begun = lambda: all(mined.newest() is not None for mined in mining.data.all_mined.values())  # noqa: E731
    absent = "" if mining.run_dir.is_dir() else ", a folder that does not exist yet,"
    _wait_until(all_begun, f"the run in {mining.run_dir}{absent} to begin", mining)
    with held:
        for step in _new_steps(mining, num_steps):
            try:
                yield from mine_step(step)
            except InputError as error:
                if step == max(complete_steps(mining.run_dir / CHECKPOINTS_DIR), default=step):  # the newest is not removed
                    raise
                warnings.warn(f"nothing was mined by step {step} ({error}); a newer checkpoint is taken.", stacklevel=3)
            except OSError as error:
                if error.errno not in command.MENDABLE:
                    raise
                where = f" at {error.filename}" if error.filename else ""
                warnings.warn(f"nothing was mined by step {step}: {error.strerror}{where}; the next one is tried.", stacklevel=3)


@contextlib.contextmanager
def _kept(run_dir: Path, step: int) -> Iterator[None]:
    """Keeps a copy of a checkpoint, which the trainer may remove meanwhile; of links where the disk has them."""

    def link(source: str, copy: str) -> None:
        try:
            os.link(source, copy)
        except OSError:
            shutil.copy2(source, copy)

    folders.clear(run_dir / MINING_DIR, lambda name: False)
    try:
        with folders.atomic_dir(run_dir / MINING_DIR / str(step)) as temporary:
            source = run_dir / CHECKPOINTS_DIR / str(step)
            shutil.copytree(source, temporary, copy_function=link, dirs_exist_ok=True)
    except (FileNotFoundError, shutil.Error) as error:
        raise InputError(f"{run_dir} has no checkpoint {step} any more: {error}") from None
    try:
        yield
    finally:
        folders.clear(run_dir / MINING_DIR, lambda name: False)


def _wait_until(condition: Callable[[], bool], what: str, mining: _Mining) -> None:
    is_told = False
    while not (mining.refresh() or condition()):
        if not is_told:
            print(f"waiting for {what}", file=sys.stderr, flush=True)
            is_told = True
        time.sleep(mining.poll_seconds)


def _newest_step(run_dir: Path) -> int:
    if (newest := _newest(run_dir)) < 0:
        raise InputError(f"{run_dir} has no checkpoint to mine with; start the run first, or leave --once out to wait for it.")
    return newest


def _newest(run_dir: Path) -> int:
    """The newest checkpoint's step; -1 for none."""
    return max(complete_steps(run_dir / CHECKPOINTS_DIR), default=-1)


def _new_steps(mining: _Mining, num_steps: int) -> Iterator[int]:
    """The newest checkpoint that was not mined with, as often as there is one, and waits for it; ends with the run."""
    last, newest = mining.mined_until(), functools.partial(_newest, mining.run_dir)
    while True:
        is_next = lambda: mining.is_over(num_steps) or newest() > last  # noqa: E731
        _wait_until(is_next, f"a checkpoint in {mining.run_dir}", mining)
        if mining.is_over(num_steps):
            return
        yield (last := newest())
