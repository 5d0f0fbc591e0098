"""Mining by a run while it trains: one generation from given parameters, and a hook that makes one every so many updates."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from de_jax.files import leases, outputs
from de_jax.files.progress import progress_bar
from de_jax.mining import generations
from de_jax.mining.generations import Generation
from de_jax.mining.miner import Miner, Score, embed, mine
from de_jax.mining.negatives import MinedNegatives
from de_jax.training.mesh import distributed
from de_jax.training.run.fit import Stop
from de_jax.training.run.run_folder import Run
from de_jax.types import Metrics, Params, TrainState

KEPT_AS = "mining"
"""A miner's folder for its newest embeddings, under <run_dir>/embeddings."""


def mine_generation(
    run: Run, mined: MinedNegatives, miner: Miner, *, source: str = "", score: Score | None = None
) -> Generation | None:
    """Mines and writes the next generation. If several processes train, all of them call this, and the first one writes.

    A process that trains or mines alone keeps the embeddings in the run's folder, and after a kill the same call continues with
    them. Several processes keep them in memory.

    Args:
        run: its parameters rank.
        mined: the pairs, and the folder of generations.
        miner: the settings of mining.
        source: of a mixture; its embeddings are kept apart.
        score: see `miner.mine`.

    Raises:
        InputError: earlier generations were mined from other texts, or as in `mine`.
    """
    texts, kept_as = mined.texts, f"{KEPT_AS}_{source}" if source else KEPT_AS
    store = texts.passages or texts.doc_store
    with progress_bar(total=store.num_texts, desc=f"encode, step {run.step}", unit=" docs", delay=0.5, leave=False) as bar:
        embedded = embed(run, texts, keep_as=kept_as if distributed.is_alone() else None, progress=bar.update)
    if not distributed.is_first():
        return None
    previous = mined.newest()
    pairs, facts = mine(embedded, texts, miner, previous=previous and previous.rows["neg_docs"], score=score)
    number = mined.next_number()
    facts = {**texts.hashes, "mined_by": str(run.run_dir), "checkpoint_step": run.step, **facts}
    generation = generations.write_generation(mined.negatives_dir, number, pairs, facts)
    if embedded.folder is not None:
        for folder in (run.run_dir / "embeddings" / kept_as).glob("step_*"):
            if folder != embedded.folder:
                shutil.rmtree(folder)
    return generation


class MineNegatives:
    """A hook that mines a generation every `every_steps` updates, with the parameters of that update.

    Training waits for it, so that a run depends only on its seed. After a kill, an update that already has a generation is skipped.

    Args:
        run_of: makes a run from the number of updates and the parameters.
        mined: the run's negatives.
        miner: the settings of mining.
        every_steps: updates between two generations.
        num_steps: updates of the whole run; nothing is mined after the last.
        source: see `mine_generation`.
        on_seconds: is called with the seconds that mining took.
        before: is called before mining; waits for the step, and may raise.
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
        on_seconds: Callable[[float], None] = lambda seconds: None,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        self._run_of, self._mined, self._miner = run_of, mined, miner
        self._every_steps, self._num_steps, self._source = every_steps, num_steps, source
        self._on_seconds, self._before = on_seconds, before

    def __call__(self, step: int, state: TrainState, metrics: Metrics) -> Stop | None:
        if step % self._every_steps or step == self._num_steps:
            return None
        self._before()
        if distributed.agreed(not _is_mined(self._mined, step)):
            start = time.monotonic()
            mine_generation(self._run_of(step, state.all_params), self._mined, self._miner, source=self._source)
            self._on_seconds(time.monotonic() - start)
        return None


@contextlib.contextmanager
def only_miner(negatives_dir: Path) -> Iterator[None]:
    """Locks the folder of negatives for one miner, and removes the remains of a killed miner.

    Raises:
        InputError: another miner is at work there.
    """
    with leases.only_one(negatives_dir / ".miner.lock", f"mining into {negatives_dir}"):
        outputs.remove_leftovers(negatives_dir)
        yield


def mined_steps(mined: MinedNegatives) -> set[int]:
    """The checkpoints with a generation."""
    return {manifest["checkpoint_step"] for manifest in mined.manifests().values() if "checkpoint_step" in manifest}


def _is_mined(mined: MinedNegatives, step: int) -> bool:
    """Whether there is a whole generation of a checkpoint."""
    numbers = [number for number, manifest in mined.manifests().items() if manifest.get("checkpoint_step") == step]
    return any(mined.accepts(number) for number in numbers)
