"""Mining by several jobs: each encodes and searches a part of the documents, and the last one joins and chooses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from de_jax.data.batches.pair_batches import TrainingPairs
from de_jax.data.negatives.generations import Generation
from de_jax.files import folders, leases, mirrors
from de_jax.mining.miner import Embedded, Miner, Wanted, index_of_docs, wanted
from de_jax.retrieval import encode, parts, reuse
from de_jax.retrieval.embedding_files import EMBEDDINGS, open_embeddings
from de_jax.retrieval.index import order_by_id
from de_jax.retrieval.parts import RANKING, Part
from de_jax.training.run.run_folder import Run
from de_jax.types import Ranking

Choose = Callable[[Embedded, Ranking], Generation]
"""Chooses negatives from a ranking of all documents, and writes them."""


class Searched(NamedTuple):
    """A part that was encoded and searched, or that was left out because it has no documents."""

    run: Run
    texts: TrainingPairs
    part: Part
    need: Wanted
    whole: Path  # the folder of the embeddings of all documents
    name: str  # of the rankings of this search
    has_texts: bool  # the part has documents


def search_part(
    run: Run,
    texts: TrainingPairs,
    miner: Miner,
    part: Part,
    *,
    keep_as: str,
    texts_per_shard: int = encode.TEXTS_PER_SHARD,
    progress: encode.Progress | None = None,
) -> Searched:
    """Encodes one part of the documents and searches it for all queries; a call after a kill continues.

    Embeddings and rankings of the parts lie in the run's folder, which all jobs see, until they are joined. Each part has an index
    of its own, so that only the exact index and "Flat" give the ranking of one job.

    Args:
        run: of one checkpoint, the same for all parts.
        texts: of the training pairs.
        miner: the settings of mining.
        part: of this job.
        keep_as: see `miner.embed`.
        texts_per_shard: see `encode.encode_to_dir`; the same for all parts.
        progress: told of documents encoded.

    Raises:
        InputError: parts by other settings.
    """
    store = texts.passages or texts.doc_store
    whole = encode.cached_docs(run, store, keep_as, part=part, texts_per_shard=texts_per_shard, progress=progress)
    need = wanted(texts, miner)
    name = f"ranking_{_key(run, texts, miner, need)}"
    if found := parts.embeddings(whole, part):
        _, docs, rows = found
        folder = _ranking_folder(whole, part, name)
        mirrors.bring(folder)  # another machine may have searched this part
        if not RANKING.is_in(folder):
            queries = encode.queries(run, texts.query_store, rows=need.query_rows)
            parts.write_ranking(folder, _search(texts, miner, docs, rows, queries, need.depth))
    return Searched(run, texts, part, need, whole, name, found is not None)


def join_parts(searched: Searched, choose: Choose) -> Generation | list[Part]:
    """Writes the generation once all parts are searched, equal to that of one job; whichever job asks first then does it.

    Args:
        searched: the part of this job.
        choose: is given what one job would have found.

    Returns:
        The generation, or the parts that are missing; no part is missing where another job has joined them.

    Raises:
        InputError: parts by other settings, and what `choose` raises.
    """
    run, texts, part, need, whole, name, _ = searched
    parts.look(whole)
    if missing := _missing(searched):
        return missing
    with leases.in_turn(parts.folder_of(whole)):
        parts.fetch(whole)
        there = _rankings(whole, part, name, is_here=True)
        missing = _missing(searched, is_here=True)
        if missing or not there:  # another job has joined them, or was killed as it removed them
            return missing
        parts.join(whole, part)
        reuse.keep(whole, reuse.text_hashes(texts.passages or texts.doc_store, run.doc.max_length))
        _, docs, _ = open_embeddings(whole)
        rankings = [parts.read_ranking(folder) for folder in there.values()]
        ranking = parts.merged(rankings, order_by_id(texts.doc_store.ids), need.depth)
        queries = encode.queries(run, texts.query_store, rows=need.query_rows)
        generation = choose(Embedded(run.step, need.query_rows, queries, docs, whole, {}), ranking)
        parts.remove(whole)
        return generation


def _search(texts: TrainingPairs, miner: Miner, docs: np.ndarray, rows: range, queries: np.ndarray, depth: int) -> Ranking:
    """The best documents of a part, by their rows in the corpus; its texts may be passages."""
    index, doc_rows = index_of_docs(docs, texts, miner, rows)
    found = index.search(queries, min(len(np.unique(doc_rows)), depth))
    first = int(doc_rows[0])
    return Ranking(np.where(np.asarray(found.doc_rows) < 0, -1, found.doc_rows + first).astype(np.int32), found.scores)


def _missing(searched: Searched, *, is_here: bool = False) -> list[Part]:
    """The parts that are not done; none once all are joined. See `parts.is_done`."""
    whole, part, name = searched.whole, searched.part, searched.name
    if searched.has_texts and not RANKING.is_in(_ranking_folder(whole, part, name)):
        return []  # it was removed by the job that joined it
    if missing := parts.unfinished(whole, part, is_here=is_here):
        return missing
    others = [one for one in part.all() if one not in (there := _rankings(whole, part, name, is_here=is_here))]
    if not EMBEDDINGS.is_in(whole):
        return [one for one in others if parts.is_done(one.folder(whole), EMBEDDINGS, is_here=is_here)]
    manifest = EMBEDDINGS.read_manifest(whole)
    return [one for one in others if there and one.rows(manifest["num_texts"], manifest["texts_per_shard"])]


def _rankings(whole: Path, part: Part, name: str, *, is_here: bool) -> dict[Part, Path]:
    """The parts that were searched."""
    there = {one: _ranking_folder(whole, one, name) for one in part.all()}
    return {one: folder for one, folder in there.items() if parts.is_done(folder, RANKING, is_here=is_here)}


def _ranking_folder(whole: Path, part: Part, name: str) -> Path:
    own = part.folder(whole)
    return own.with_name(f"{own.name}-{name}")


def _key(run: Run, texts: TrainingPairs, miner: Miner, need: Wanted) -> str:
    """Tells this search from others: queries, depth and index."""
    queries = f"{encode.tower_hash(run, 'query')} {texts.query_store.content_hash} {run.query.max_length}"
    return folders.key_of(
        queries, str(need.depth), miner.index, str((miner.nprobe, miner.ef_search)), need.query_rows.tobytes().hex()
    )
