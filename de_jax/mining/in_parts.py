"""Mining by several jobs: each encodes and searches a part of the documents, and the last one joins and chooses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from de_jax.files import folders, outputs
from de_jax.mining.generations import Generation
from de_jax.mining.mined_pairs import MinedPairs
from de_jax.mining.miner import Embedded, Miner, Wanted, index_of_docs, mine, wanted
from de_jax.mining.negatives import TrainingTexts
from de_jax.retrieval import encode, parts, reuse
from de_jax.retrieval.embedding_files import open_embeddings
from de_jax.retrieval.index import order_by_id
from de_jax.retrieval.parts import RANKING, Part
from de_jax.training.run.run_folder import Run
from de_jax.types import Ranking

Write = Callable[[MinedPairs, dict[str, Any]], Generation]


def mine_part(
    run: Run,
    texts: TrainingTexts,
    miner: Miner,
    part: Part,
    *,
    keep_as: str,
    write: Write,
    texts_per_shard: int = encode.TEXTS_PER_SHARD,
    progress: encode.Progress | None = None,
) -> Generation | list[Part]:
    """Does one part of mining; the call that completes the last part writes the generation, equal to that of one job.

    Embeddings and rankings of the parts lie in the run's folder, which all jobs see, until the generation is written. A call after
    a kill continues. Each part has an index of its own, so that only the exact index and "Flat" give the same ranking.

    Args:
        run: of one checkpoint, the same for all parts.
        texts: of the training pairs.
        miner: the settings of mining.
        part: of this job.
        keep_as: see `miner.embed`.
        write: writes the generation.
        texts_per_shard: see `encode.encode_to_dir`; the same for all parts.
        progress: told of documents encoded.

    Returns:
        The generation, or the parts that are missing; no part is missing where another job has joined them.

    Raises:
        InputError: parts by other settings, and what `mine` raises.
    """
    store = texts.passages or texts.doc_store
    whole = encode.cached_docs(run, store, keep_as, part=part, texts_per_shard=texts_per_shard, progress=progress)
    need = wanted(texts, miner)
    name = f"ranking_{_key(run, texts, miner, need)}"
    if found := parts.embeddings(whole, part):
        _, docs, rows = found
        folder = _ranking_folder(whole, part, name)
        if not RANKING.is_in(folder):
            queries = encode.queries(run, texts.query_store, rows=need.query_rows)
            parts.write_ranking(folder, _search(texts, miner, docs, rows, queries, need.depth))
    with outputs.in_turn(whole.with_name(f"{whole.name}.{name}")):
        if missing := _missing(whole, part, name):
            return missing
        if not (there := _rankings(whole, part, name)):  # another job has joined them
            return []
        parts.join(whole, part)
        reuse.keep(whole, reuse.text_hashes(store, run.doc.max_length))
        _, docs, _ = open_embeddings(whole)
        rankings = [parts.read_ranking(folder) for folder in there.values()]
        ranking = parts.merged(rankings, order_by_id(texts.doc_store.ids), need.depth)
        queries = encode.queries(run, texts.query_store, rows=need.query_rows)
        embedded = Embedded(run.step, need.query_rows, queries, docs, whole, {})
        pairs, facts = mine(embedded, texts, miner, ranking=ranking)
        generation = write(pairs, {**facts, "num_jobs": part.total})
        parts.remove(whole, part)
        return generation


def _search(texts: TrainingTexts, miner: Miner, docs: np.ndarray, rows: range, queries: np.ndarray, depth: int) -> Ranking:
    """The best documents of a part, by their rows in the corpus; its texts may be passages."""
    index, doc_rows = index_of_docs(docs, texts, miner, rows)
    found = index.search(queries, min(len(np.unique(doc_rows)), depth))
    first = int(doc_rows[0])
    return Ranking(np.where(np.asarray(found.doc_rows) < 0, -1, found.doc_rows + first).astype(np.int32), found.scores)


def _missing(whole: Path, part: Part, name: str) -> list[Part]:
    """The parts that are not done; none once all are joined."""
    if missing := parts.unfinished(whole, part):
        return missing
    there = _rankings(whole, part, name)
    return [one for one in part.all() if one not in there and parts.embeddings(whole, one)] if there else []


def _rankings(whole: Path, part: Part, name: str) -> dict[Part, Path]:
    """The parts that were searched."""
    there = {one: _ranking_folder(whole, one, name) for one in part.all()}
    return {one: folder for one, folder in there.items() if RANKING.is_in(folder)}


def _ranking_folder(whole: Path, part: Part, name: str) -> Path:
    own = part.folder(whole)
    return own.with_name(f"{own.name}-{name}")


def _key(run: Run, texts: TrainingTexts, miner: Miner, need: Wanted) -> str:
    """Tells this search from others: queries, depth and index."""
    queries = f"{encode.tower_hash(run, 'query')} {texts.query_store.content_hash} {run.query.max_length}"
    return folders.key_of(
        queries, str(need.depth), miner.index, str((miner.nprobe, miner.ef_search)), need.query_rows.tobytes().hex()
    )
