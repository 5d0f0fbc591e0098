"""Mining by a run while it trains: one generation from given parameters, and the hooks that mine or that follow a miner."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from de_jax.data.batches import teacher_scores
from de_jax.data.batches.pair_batches import TrainingPairs
from de_jax.data.negatives import generations
from de_jax.data.negatives.mined_negatives import MinedNegatives, Switch
from de_jax.data.text import beir
from de_jax.files import addresses, folders, outputs, reading
from de_jax.mining.miner import Miner, Score, embed, mine, mine_bm25
from de_jax.mining.teacher import spelt
from de_jax.retrieval import corpus_embeddings, encode
from de_jax.training.mesh import distributed
from de_jax.training.run.fit import Stop
from de_jax.training.run.run_folder import Run
from de_jax.training.run.run_log import Sink
from de_jax.types import InputError, Metrics, Params, TrainState

KEPT_AS = "mining"
"""A miner's folder for its newest embeddings, under <run_dir>/embeddings."""

_RUN = "run_dir_from_here"


def mine_generation(
    run: Run,
    mined: MinedNegatives,
    miner: Miner,
    *,
    source: str = "",
    score: Score | None = None,
    texts_per_shard: int = corpus_embeddings.TEXTS_PER_SHARD,
    facts: Mapping[str, str] = MappingProxyType({}),
) -> generations.Generation | None:
    """Mines and writes the next generation. If several processes train, all of them call this, and the first one writes.

    A process that trains or mines alone keeps the embeddings in the run's folder, and after a kill the same call continues with
    them. Several processes keep them in memory.
    """
    keep_as = kept_as(source) if distributed.is_alone() else None
    embedded = embed(run, mined.texts, keep_as=keep_as, texts_per_shard=texts_per_shard)
    if not distributed.is_first():
        return None
    previous = mined.newest()
    pairs, more = mine(embedded, mined.texts, miner, previous=previous and previous.rows["neg_docs"], score=score)
    if embedded.folder is not None:
        kept = embedded.folder.name  # it may lie in another's folder
        own_dir = corpus_embeddings.embeddings_dir(run.run_dir, kept_as(source))
        folders.clear(own_dir, lambda name: name.startswith(kept) or not name.startswith("step_"))
    mined_by = by_run(run.run_dir, mined.negatives_dir)
    own = {**mined.texts.hashes, **mined_by, **facts, "checkpoint_step": run.step, "dtype": run.model.dtype, **more}
    return generations.write_generation(mined.negatives_dir, mined.next_number(), pairs, own)


def mine_once_by_bm25(texts: TrainingPairs, negatives_dir: Path) -> None:
    """Writes BM25's hard negatives of the pairs, by what their tokens spell, unless the folder has a generation of these texts."""
    own = {"bm25_of": texts.fingerprint(None)}
    with only_miner(negatives_dir):
        if numbers := generations.numbers(negatives_dir):
            if generations.read_manifest(negatives_dir, numbers[0]).get("bm25_of") in (None, *own.values()):
                return
            raise InputError(f"{negatives_dir} holds negatives of other texts than these pairs have; take another run_dir.")
        docs, queries = (
            beir.Texts([*store.ids], [text for _, text in spelt(store, tokenizer, range(store.num_texts))])
            for store, tokenizer in zip(texts.stores[::-1], (texts.doc_tokenizer, texts.query_tokenizer), strict=True)
        )
        qrels: beir.Qrels = {}
        for query, doc in texts.pairs.tolist():
            qrels.setdefault(queries.ids[query], {})[docs.ids[doc]] = 1
        dataset = beir.Dataset(texts.name, docs, queries, qrels)
        found, facts = mine_bm25(dataset, Miner(), drop_identical_ids=texts.drop_identical_ids)
        generations.write_generation(negatives_dir, 1, found, {**texts.hashes, **own, **facts, "mined_by": "bm25"})


def made_of(run: Run, texts: TrainingPairs, miner: Miner) -> str:
    """A key of what decides a generation: the model as it reads texts, the texts, the pairs and the settings."""
    sides = [(side.tokenizer.fingerprint, side.max_length, side.max_passages) for side in (run.query, run.doc)]
    stores = [store.content_hash for store in (texts.query_store, texts.doc_store)]
    teacher = reading.sha256_of(teacher_scores.file_of(miner.teacher_scores)) if miner.teacher_scores else ""
    settings = repr((run.model.dtype, sides, stores, texts.drop_identical_ids, miner))
    return folders.key_of(encode.name_with_hashes(settings, run), teacher, texts.pairs.tobytes().hex())


def kept_as(source: str) -> str:
    """The name of a miner's embeddings in the run's folder."""
    return f"{KEPT_AS}_{source}" if source else KEPT_AS


class MineNegatives:
    """A hook that mines a generation every `every_steps` updates, with the parameters of that update.

    Training waits for it, so that a run depends only on its seed. After a kill, an update that already has a generation is skipped.
    """

    def __init__(
        self,
        run_of: Callable[[int, Params], Run],
        mined: MinedNegatives,
        miner: Miner,
        *,
        every_steps: int,
        num_steps: int,
        source: str = "",
        paused: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._run_of, self._mined, self._miner = run_of, mined, miner
        self._every_steps, self._num_steps, self._source = every_steps, num_steps, source
        self._paused = paused

    def __call__(self, step: int, state: TrainState, metrics: Metrics) -> Stop | None:
        if step % self._every_steps or step == self._num_steps:
            return None
        with self._paused():
            run = self._run_of(step, state.all_params)
            own = own_generations(self._mined, run.run_dir).items()
            is_mined = any(one.get("checkpoint_step") == run.step and self._mined.accepts(number) for number, one in own)
            if distributed.agreed(not is_mined):
                mine_generation(run, self._mined, self._miner, source=self._source)
        return None


@contextlib.contextmanager
def only_miner(*negatives_dirs: Path) -> Iterator[None]:
    """Locks folders of negatives for one miner, and removes the remains of a killed miner."""
    with contextlib.ExitStack() as locks:
        for folder in negatives_dirs:
            locks.enter_context(addresses.only_one(folder / ".miner.lock", f"mining into {folder}"))
            outputs.remove_leftovers(folder)
        yield


def mined_steps(mined: MinedNegatives, run_dir: Path) -> set[int]:
    """The checkpoints of a run with a generation."""
    return {manifest["checkpoint_step"] for manifest in own_generations(mined, run_dir).values() if "checkpoint_step" in manifest}


def own_generations(mined: MinedNegatives, run_dir: Path) -> dict[int, Mapping[str, Any]]:
    """The manifests of the generations that a run's checkpoints mined, by number; not those of a warm-up, for example."""
    own = by_run(run_dir, mined.negatives_dir)[_RUN]
    return {number: manifest for number, manifest in mined.manifests().items() if manifest.get(_RUN, own) == own}


def by_run(run_dir: str | Path, negatives_dir: str | Path) -> dict[str, str]:
    """The facts of a generation that say whose it is: the run, and the way to it from the negatives, as both may be moved."""
    way = os.path.relpath(Path(run_dir).resolve(), Path(negatives_dir).resolve())
    return {"mined_by": addresses.named(str(run_dir)), _RUN: Path(way).as_posix()}


BATCHES_AHEAD = 8
"""Updates between accepting a generation and its first batch; more than any process makes batches in advance."""
LOOK_SECONDS = 0.01
"""The longest that a look waits for a generation that is being read."""


class FollowNegatives:
    """A hook that looks for a newer generation every `every_steps` updates.

    A look lets a thread read the generation, and a later look accepts it. The first process looks, and all accept the generation or
    none does: each has it in memory then, and the switch is on the disk before a batch is made by it. Whatever the miner does, the
    run continues with its current negatives.

    Args:
        run_dir: of a run that mines by itself, so that it depends on its seed alone: a look waits until the generation is read, and
            passes over generations of later updates, mined before the run was killed. None for a run with a miner beside it.
        sinks: get the generation, its staleness in updates since the checkpoint it was mined with, and its statistics.
    """

    def __init__(self, mined: MinedNegatives, *, every_steps: int, run_dir: Path | None, sinks: Sequence[Sink] = ()) -> None:
        self._mined, self._every_steps, self._run_dir, self._sinks = mined, every_steps, run_dir, sinks

    def __call__(self, step: int, state: TrainState, metrics: Metrics) -> Stop | None:
        if step % self._every_steps:
            return None
        within = None if self._run_dir else LOOK_SECONDS
        newest = self._mined.newer(within, lambda: self._later(step)) if distributed.is_first() else None
        number = distributed.agreed_number(newest or 0)
        if number and distributed.all_agree(self._mined.accepts(number, within)):
            first_step = max(step + BATCHES_AHEAD, self._mined.switches[-1].step + 1)
            self._mined.record(Switch(first_step, number))
        self._log(step)
        return None

    def _later(self, step: int) -> set[int]:
        """The generations that the run mined after this update."""
        own = own_generations(self._mined, self._run_dir) if self._run_dir else {}
        return {number for number, manifest in own.items() if manifest.get("checkpoint_step", 0) > step}

    def _log(self, step: int) -> None:
        manifest = self._mined.manifest_at(step)
        facts = {"negatives/generation": float(self._mined.generation_at(step))}
        if manifest.get("checkpoint_step", step + 1) <= step:  # another run's checkpoint has no bearing on this one's age
            facts["negatives/staleness"] = float(step - manifest["checkpoint_step"])
        facts |= {f"negatives/{name}": float(value) for name, value in manifest.get("statistics", {}).items()}
        for sink in self._sinks:
            sink(step, facts)
