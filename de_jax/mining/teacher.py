"""A teacher's scores of training pairs and of the negatives mined for them, computed once, for losses that learn from a teacher.

<out_dir>/
    scores.tsv       query id, document id, score; every two texts once
    manifest.json    the texts and the teacher; written last
    progress.json    the same, while the folder is incomplete

Scores are kept part by part, so that a stopped teacher continues from the last part.
"""

import hashlib
import os
import shutil
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from de_jax.data.batches.teacher_scores import SCORES_FILE, TEACHER_SCORES
from de_jax.data.negatives import generations
from de_jax.data.sources.pair_store import open_pair_store
from de_jax.data.stores.corpus import TokenStore, build_token_store
from de_jax.data.text import beir
from de_jax.data.text.tokenizing import Tokenizer
from de_jax.files import folders, outputs
from de_jax.retrieval import corpus_embeddings, parts
from de_jax.retrieval.embedding_files import open_embeddings
from de_jax.training.run.run_folder import Run
from de_jax.types import PADDING_ID, InputError

PARTS_DIR = "embeddings"
PROGRESS_FILE = "progress.json"
_TEXTS_AT_ONCE = 8192

Score = Callable[[Sequence[tuple[str, str]]], Float[np.ndarray, " s"]]
"""(query id, document id) of some texts to the teacher's scores."""


class Candidates(NamedTuple):
    """The candidates for a teacher."""

    queries: dict[str, str]  # texts by id
    docs: dict[str, str]
    pairs: list[tuple[str, str]]  # (query id, document id), each once: documents of training pairs, and their negatives

    def fingerprint(self) -> str:
        """Equal for equal texts in equal order."""
        digest = hashlib.sha256()
        for query_id, doc_id in self.pairs:
            digest.update(f"{query_id}\t{doc_id}\n".encode())
        for texts in (self.queries, self.docs):
            for text_id, text in texts.items():
                digest.update(f"{text_id}\t{text}\n".encode())
        return digest.hexdigest()


def of_dataset(dataset_dir: str | Path, split: str, negatives_dir: str | Path = "", *, skip_empty: bool = False) -> Candidates:
    """The pairs of a BEIR folder's split, and their negatives in the newest whole generation of a folder."""
    qrels = beir.read_qrels(beir.find_qrels(dataset_dir, split))
    pairs = {(query, doc): None for query, judged in qrels.items() for doc, grade in judged.items() if grade >= 1}
    found = dict(pairs)
    if negatives_dir:
        for mined in generations.read(generations.open_newest(negatives_dir)).lines():
            if (mined.query_id, mined.doc_id) in pairs:
                found |= {(mined.query_id, doc_id): None for doc_id in mined.neg_doc_ids}
    queries = _wanted(beir.find_file(dataset_dir, "queries"), {query for query, _ in found}, skip_empty=skip_empty)
    docs = _wanted(beir.find_file(dataset_dir, "corpus"), {doc for _, doc in found}, with_title=True, skip_empty=skip_empty)
    return Candidates(queries, docs, [(query, doc) for query, doc in found if query in queries and doc in docs])


def of_pair_store(pairs_dir: str | Path) -> Candidates:
    """The pairs of a folder of pairs with the negatives in it; texts are what their tokens spell."""
    store = open_pair_store(pairs_dir)
    docs = store.pairs[:, 1:] if store.neg_docs is None else np.concatenate([store.pairs[:, 1:], store.neg_docs], axis=1)
    query_ids, doc_ids = store.query_store.ids, store.doc_store.ids
    rows = zip(store.pairs[:, 0].tolist(), docs.tolist(), strict=True)
    found = {(query, doc): None for query, scored in rows for doc in scored if doc != PADDING_ID}
    return Candidates(
        dict(spelt(store.query_store, store.query_tokenizer, sorted({query for query, _ in found}))),
        dict(spelt(store.doc_store, store.doc_tokenizer, sorted({doc for _, doc in found}))),
        [(query_ids[query], doc_ids[doc]) for query, doc in found],
    )


def spelt(store: TokenStore, tokenizer: Tokenizer, rows: Sequence[int]) -> Iterator[tuple[str, str]]:
    """The id of each text in some rows, and what its tokens spell."""
    for start in range(0, len(rows), _TEXTS_AT_ONCE):
        chunk = rows[start : start + _TEXTS_AT_ONCE]
        texts = tokenizer.decode(store.tokens_of(np.asarray(chunk)))
        yield from zip((store.ids[row] for row in chunk), texts, strict=True)


def write(
    out_dir: str | Path,
    candidates: Candidates,
    teacher: str,
    make_score: Callable[[], Score],
    *,
    settings: Mapping[str, Any] = types.MappingProxyType({}),
    pairs_per_part: int = 4096,
    part: parts.Part | None = None,
    progress: Callable[[int], object] = lambda number: None,
) -> None:
    """Writes the teacher's scores; the same call after a kill continues, and a complete folder stays as it is.

    Args:
        make_score: opens the teacher; not called for a complete folder.
        part: its pairs go to `part.folder(out_dir)` instead, unless `out_dir` is complete; without a part, the call joins them.
    """
    folder = Path(out_dir)
    plan = {"teacher": teacher, **settings, "texts": candidates.fingerprint(), "num_scores": len(candidates.pairs)}
    pairs, shards = candidates.pairs, [] if part else parts.complete(folder, TEACHER_SCORES, "pairs_per_part")
    if part and not TEACHER_SCORES.is_in(folder):
        folder, rows = part.folder(folder), part.rows(len(pairs), pairs_per_part)
        plan |= {"num_scores": len(rows), "rows": [rows.start, rows.stop], "of": len(pairs), "pairs_per_part": pairs_per_part}
        pairs = pairs[rows.start : rows.stop]
    if not pairs:
        return
    with outputs.in_turn(folder):
        if _is_complete(folder, plan):
            parts.remove(folder)
            return
        outputs.make_folder(folder)
        outputs.write_json(folder / PROGRESS_FILE, plan)
        if shards:
            _join(folder, shards, plan)
        (folder / SCORES_FILE).touch()
        written = (folder / SCORES_FILE).read_bytes()
        os.truncate(folder / SCORES_FILE, written.rfind(b"\n") + 1)  # without the rest of a line that a kill cut off
        progress(num_done := written.count(b"\n"))
        score = make_score() if num_done < len(pairs) else None
        for start in range(num_done, len(pairs), pairs_per_part):
            block = pairs[start : start + pairs_per_part]
            assert score
            scores = np.asarray(score(block), np.float32)
            if not np.isfinite(scores).all():
                query_id, doc_id = block[int(np.argmin(np.isfinite(scores)))]
                raise InputError(f"the teacher's score of query {query_id} and document {doc_id} is not a finite number.")
            lines = (f"{query}\t{doc}\t{value:.9g}\n" for (query, doc), value in zip(block, scores.tolist(), strict=True))
            outputs.append_text(folder / SCORES_FILE, "".join(lines))
            progress(len(block))
        shutil.rmtree(folder / PARTS_DIR, ignore_errors=True)
        TEACHER_SCORES.complete(folder, plan, [SCORES_FILE])
        (folder / PROGRESS_FILE).unlink()
    parts.remove(folder)


def _join(folder: Path, shards: Sequence[Path], plan: Mapping[str, Any]) -> None:
    """Writes the scores of all parts as the file of one job."""
    for shard in shards:
        manifest = TEACHER_SCORES.open(shard)
        TEACHER_SCORES.require_same(shard, {**manifest, "num_scores": manifest["of"]}, plan)
    with outputs.atomic_file(folder / SCORES_FILE) as unfinished, open(unfinished, "wb") as file:
        for shard in shards:
            file.write((shard / SCORES_FILE).read_bytes())


def by_run(run: Run, candidates: Candidates, out_dir: str | Path, part: parts.Part | None = None) -> Score | None:
    """The scores of a dual encoder: inner products of its embeddings, which are made now and stay in `out_dir` until all is done.

    With a `part`, that of the texts is embedded, and there is no score; without, the embeddings of all parts are joined.
    """
    if run.doc.max_passages > 1:
        raise InputError("score pairs takes documents of one passage, and this run has several; take another teacher.")
    found: dict[str, tuple[dict[str, int], np.ndarray]] = {}
    for tower, texts in (("query", candidates.queries), ("doc", candidates.docs)):
        folder, side = Path(out_dir) / PARTS_DIR, run.side(tower)
        tokens = f"{tower}_tokens_{part.number}_of_{part.total}" if part else f"{tower}_tokens"
        store = build_token_store(texts.items(), side.tokenizer, folder / tokens, progress=False)
        corpus_embeddings.to_dir(run, tower, store, folder / tower, part=part)
        if not part:
            ids, embeddings, _ = open_embeddings(folder / tower)
            found[tower] = {text_id: row for row, text_id in enumerate(ids)}, embeddings
    if part:
        return None
    (query_rows, queries), (doc_rows, docs) = found["query"], found["doc"]

    def score(pairs: Sequence[tuple[str, str]]) -> Float[np.ndarray, " s"]:
        rows = [query_rows[query] for query, _ in pairs], [doc_rows[doc] for _, doc in pairs]
        return np.einsum("sD,sD->s", queries[rows[0]], docs[rows[1]])

    return score


def by_cross_encoder(model: str, candidates: Candidates, *, batch_size: int = 32, max_length: int | None = None) -> Score:
    """The logits of a cross-encoder that sentence-transformers opens."""
    try:
        import torch
        from sentence_transformers import CrossEncoder
    except ImportError as error:
        raise InputError(f"a cross-encoder needs the package {error.name}; run pip install sentence-transformers.") from None
    try:  # without safetensors the weights would be a pickle
        encoder = CrossEncoder(model, num_labels=None, max_length=max_length, model_kwargs={"use_safetensors": True})
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"{model} cannot be opened as a cross-encoder: {reason}") from None
    if encoder.config.num_labels != 1:
        raise InputError(
            f"{model} gives {encoder.config.num_labels} numbers for two texts; take a cross-encoder that gives one score."
        )

    def score(pairs: Sequence[tuple[str, str]]) -> Float[np.ndarray, " s"]:
        texts = [(candidates.queries[query], candidates.docs[doc]) for query, doc in pairs]
        options = {"batch_size": batch_size, "show_progress_bar": False, "activation_fn": torch.nn.Identity()}
        return np.asarray(encoder.predict(texts, **options), np.float32)

    return score


def _wanted(file: Path, ids: set[str], *, skip_empty: bool, with_title: bool = False) -> dict[str, str]:
    """The texts of some ids, without empty texts; raises InputError for an unknown id."""
    texts, empty = beir.read_texts(file, with_title=with_title, skip_empty=skip_empty)
    found = {text_id: text for text_id, text in zip(texts.ids, texts.texts, strict=True) if text_id in ids}
    beir.require_known(ids - set(empty), found, f"{file}: ids without a text")
    return found


def _is_complete(folder: Path, plan: dict[str, Any]) -> bool:
    is_complete, is_begun = TEACHER_SCORES.is_in(folder), (folder / PROGRESS_FILE).is_file()
    if is_complete:
        TEACHER_SCORES.require_same(folder, TEACHER_SCORES.open(folder), plan)
    elif is_begun:
        TEACHER_SCORES.require_same(folder, outputs.read_json(folder / PROGRESS_FILE), plan)
    elif [path.name for path in folder.glob("*")] != [PARTS_DIR]:  # which jobs with a part of the texts left there
        folders.require_replaceable(folder, None)
    return is_complete
