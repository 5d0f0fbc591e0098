"""Documents as they are searched with generated queries (He et al. 2023): S views each, the mean of the views, or one long text."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from de_jax.data.expansion.document_texts import ExpandedTexts, corpus_expansion, document_expansion
from de_jax.data.expansion.query_store import open_queries
from de_jax.data.stores.corpus import TokenStore
from de_jax.files import outputs
from de_jax.retrieval import encode
from de_jax.retrieval.embedding_files import EmbeddingWriter
from de_jax.training.run.run_folder import Run
from de_jax.types import InputError

_ROWS = 1 << 16
"""Views that are averaged at a time."""


class Expansion(NamedTuple):
    """How documents are expanded.

    `path` is an output of `de-jax doc2query`; each document gets the first `num_queries` of its queries. `form` is one of:

    - "views": a vector for each query, and the best vector counts. This is the paper's corpus expansion.
    - "typical": the mean of these vectors, scaled to length 1 if the model's embeddings are.
    - "typical_as_is": the mean without scaling.
    - "document": the queries follow the document's text, one after another.
    """

    path: str
    num_queries: int = 10
    form: str = "views"
    max_query_length: int = 32

    @property
    def is_typical(self) -> bool:
        """Whether a document is the mean of its views."""
        return self.form.startswith("typical")

    def normalizes(self, run: Run) -> bool:
        """Whether such means are scaled to length 1 again."""
        return self.form == "typical" and bool(run.model.doc.normalize)


def texts(run: Run, docs: TokenStore, expansion: Expansion) -> ExpandedTexts:
    """The texts of a corpus that a run encodes, the documents in order."""
    if run.doc.max_passages > 1:
        raise InputError("documents of several passages are not expanded; set max_passages to 1.")
    queries = open_queries(expansion.path, docs, run.doc.tokenizer, outputs.cache_dir() / "token_stores")
    make = document_expansion if expansion.form == "document" else corpus_expansion
    return make(docs, queries, expansion.num_queries, max_query_length=expansion.max_query_length)


def typical_to_dir(
    run: Run,
    docs: TokenStore,
    views: ExpandedTexts,
    out_dir: str | Path,
    *,
    normalize: bool,
    texts_per_shard: int = 32768,
    progress: encode.Progress = lambda views: None,
    **options: Any,
) -> None:
    """Writes the typical representations of a corpus; after a kill, the same call continues and ends byte-equal."""
    options = {"max_length": run.doc.max_length, **options}
    source = {
        "model": encode.tower_hash(run, "doc"),
        "store": views.content_hash,
        "tokenizer": views.tokenizer_fingerprint,
        "max_length": options["max_length"],
        "num_texts": docs.num_texts,
        "means_of_views": "of length 1" if normalize else "as they are",
    }
    with outputs.in_turn(Path(out_dir)):
        writer = EmbeddingWriter(Path(out_dir), source, {**options, "texts_per_shard": texts_per_shard})
        if writer.is_complete:
            return
        firsts = np.searchsorted(views.doc_rows, np.arange(docs.num_texts + 1))
        docs_per_shard = max(1, texts_per_shard // int(np.diff(firsts).max()))
        encode.tell_cut(views, np.arange(views.num_texts), options["max_length"])
        progress(int(firsts[writer.num_done]))
        for start in range(writer.num_done, docs.num_texts, docs_per_shard):
            rows = np.arange(firsts[start], firsts[min(start + docs_per_shard, docs.num_texts)])
            embeddings = encode.docs(run, views, rows=rows, progress=progress, writer=writer, **options)
            writer.append(typical(embeddings, views.doc_rows[rows] - start, normalize=normalize))
        writer.finish(docs.ids)


def typical(embeddings: Any, doc_rows: Int[np.ndarray, " m"], *, normalize: bool) -> Float[np.ndarray, "n D"]:
    """The mean of each document's views [m, D], which may be memory-mapped: the typical representation.

    `doc_rows` is the document of each view, every one from 0 on; `normalize` scales the means, which are shorter, to length 1.
    """
    sums = np.zeros((int(doc_rows[-1]) + 1, embeddings.shape[1]))
    for start in range(0, len(doc_rows), _ROWS):
        np.add.at(sums, doc_rows[start : start + _ROWS], np.asarray(embeddings[start : start + _ROWS], np.float64))
    means = sums / np.bincount(doc_rows)[:, None]
    if normalize:
        means /= np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-12)
    return means.astype(np.float32)
