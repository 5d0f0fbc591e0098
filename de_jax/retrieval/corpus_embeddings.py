"""The embeddings of a corpus in a folder: encoded whole or in parts, kept by model, texts and length, and found again."""

from pathlib import Path
from typing import Any

import numpy as np

from de_jax.data.stores.corpus import first_rows, text_hashes
from de_jax.files import folders, outputs
from de_jax.retrieval import embedding_files, encode, parts
from de_jax.retrieval.embedding_files import EMBEDDINGS, EmbeddingWriter
from de_jax.retrieval.encode import EncodeFn, Progress, Store, checked_tokens_per_batch, run_options, tell_cut, tower_hash
from de_jax.training.run.run_folder import Run

TEXTS_PER_SHARD = 32768
"""Texts that are laid out together."""


def encode_to_dir(
    encode_fn: EncodeFn,
    store: Store,
    out_dir: str | Path,
    *,
    max_length: int,
    model_hash: str,
    tokens_per_batch: int | None = None,
    length_multiple: int | None = None,
    texts_per_shard: int = TEXTS_PER_SHARD,
    known: tuple[embedding_files.Known, np.ndarray] | None = None,
    part: parts.Part | None = None,
    progress: Progress = lambda texts: None,
) -> None:
    """Writes a store's embeddings to a folder; the same call after a kill loses half a minute, and ends byte-equal.

    The folder is one of `embedding_files`. A complete one of the same model and store is left as it is.

    Args:
        out_dir: a folder that is absent, empty, begun or completed by the same call.
        model_hash: identifies this tower, as `tower_hash(run, "doc")` does.
        texts_per_shard: texts that are laid out together; a part has a multiple of them.
        known: embeddings by the same tower, and the hash of each text of the store; such texts are copied from there.
        part: writes its texts to `part.folder(out_dir)` instead, unless `out_dir` is complete; without a part, the call joins them.
        encode_fn, store, max_length, tokens_per_batch, length_multiple, progress: as for `encode`.

    Raises:
        InputError: `out_dir` belongs to another model, store or batching; names the first difference.
    """
    tokens_per_batch = checked_tokens_per_batch(tokens_per_batch, max_length, length_multiple)
    source = {
        "model": model_hash,
        "store": store.content_hash,
        "tokenizer": store.tokenizer_fingerprint,
        "max_length": max_length,
        "num_texts": store.num_texts,
    }
    folder, texts = Path(out_dir), range(store.num_texts)
    if part is None:
        parts.join(folder, lambda: first_rows((store, max_length)))
    elif not EMBEDDINGS.is_in(folder):
        folder, texts = part.folder(folder), part.rows(store.num_texts, texts_per_shard)
        source |= {"num_texts": len(texts), "rows": [texts.start, texts.stop], "of": store.num_texts}
    if not texts:
        return
    with outputs.in_turn(folder):
        batching = {"tokens_per_batch": tokens_per_batch, "length_multiple": length_multiple}
        writer = EmbeddingWriter(folder, source, {**batching, "texts_per_shard": texts_per_shard})
        tell_cut(store, np.asarray(texts), max_length)  # whoever encoded them
        if writer.is_complete:
            return
        progress(writer.num_done)
        firsts = first_rows((store, max_length))
        for start in range(texts.start + writer.num_done, texts.stop, texts_per_shard):
            rows = np.arange(start, min(start + texts_per_shard, texts.stop))
            there = known[0].find(known[1][rows]) if known else np.full(len(rows), -1)
            is_new, is_known = (there < 0) & (firsts[rows] == rows), there >= 0
            if not is_new.any() and not known and not writer.num_done:
                is_new[0] = True  # gives the number of dimensions
            if is_new.any():
                options: dict[str, Any] = {"max_length": max_length, "progress": progress, "writer": writer, **batching}
                encoded = encode.encode(encode_fn, store, rows=rows[is_new], **options)
            else:
                encoded = (known[0].embeddings if known else writer.written())[:0]
            block = np.zeros((len(rows), encoded.shape[1]), np.float32)
            block[is_new] = encoded
            if known:
                block[is_known] = known[0].embeddings[there[is_known]]
            _fill_copies(block, np.flatnonzero(~is_new & ~is_known), firsts[rows] - start, start - texts.start, writer)
            progress(len(rows) - len(encoded))
            writer.append(block)
        writer.finish(store.ids[texts.start : texts.stop])


def to_dir(run: Run, tower: str, store: Store, out_dir: str | Path, **options: Any) -> None:
    """Writes embeddings by a tower of a `Run`; `options` are `encode_to_dir`'s."""
    options = run_options(run, tower, options)
    encode_to_dir(encode.encode_fn(run, tower), store, out_dir, model_hash=tower_hash(run, tower), **options)


def cached_docs(
    run: Run,
    store: Store,
    name: str,
    *,
    max_length: int | None = None,
    part: parts.Part | None = None,
    texts_per_shard: int = TEXTS_PER_SHARD,
    progress: Progress = lambda texts: None,
) -> Path:
    """The folder of the document embeddings, kept under `<run_dir>/embeddings/<name>` by model, texts and length.

    An equal corpus that was encoded under another name is found there. Of a corpus that has changed only new texts are encoded.
    With a `part`, only its texts are, into a folder beside; see `encode_to_dir`.
    """
    max_length, model = max_length or run.doc.max_length, tower_hash(run, "doc")
    key = folders.key_of(f"{model} {store.content_hash} {max_length}")
    folder = embeddings_dir(run.run_dir)
    out_dir = next(folder.glob(f"*/step_*-{key}"), folder / name / f"step_{run.step}-{key}")
    if EMBEDDINGS.is_in(out_dir):
        tell_cut(store, np.arange(store.num_texts), max_length)
    else:
        hashes = text_hashes(store, max_length)
        before = embedding_files.find_known(folder, model=model, max_length=max_length)
        known = (before, hashes) if before else None
        options = {"max_length": max_length, "texts_per_shard": texts_per_shard, "progress": progress}
        to_dir(run, "doc", store, out_dir, known=known, part=part, **options)
        if part is None:
            embedding_files.keep_hashes(out_dir, hashes)
    return out_dir


def embeddings_dir(run_dir: Path, name: str = "") -> Path:
    """Where a run keeps embeddings of documents: all, or those under one name."""
    return run_dir / "embeddings" / name


def _fill_copies(block: np.ndarray, copies: np.ndarray, firsts: np.ndarray, num_done: int, writer: EmbeddingWriter) -> None:
    """Gives copies in a block the embeddings of their first texts, which stand in it or in those written before.

    The embedding of a text that another job encodes stays 0 until the parts are joined.
    """
    here = copies[firsts[copies] >= 0]
    block[here] = block[firsts[here]]
    before = copies[(firsts[copies] < 0) & (firsts[copies] + num_done >= 0)]
    if len(before):
        block[before] = writer.written()[firsts[before] + num_done]
