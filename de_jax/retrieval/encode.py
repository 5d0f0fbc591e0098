"""Texts to embeddings, the device busy while the host lays out and fetches; `micro_batches` chooses the shapes."""

from __future__ import annotations

import collections
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from de_jax.data.stores.corpus import first_places, first_rows, text_hashes
from de_jax.data.text import input_policy
from de_jax.files import folders, outputs
from de_jax.retrieval import embedding_files, parts
from de_jax.retrieval.embedding_files import EMBEDDINGS, EmbeddingWriter
from de_jax.retrieval.index import aligned
from de_jax.retrieval.micro_batches import MicroBatch, Store, plan
from de_jax.retrieval.parts import Part
from de_jax.retrieval.sessions import Session
from de_jax.training.mesh import sharding
from de_jax.training.run.model_hash import model_hash
from de_jax.training.run.run_folder import Run
from de_jax.types import Array, InputError

TOKENS_PER_BATCH = {"cpu": 1024}
"""The default micro-batch of a device by jax backend; small ones stay in a processor's cache."""
TOKENS_PER_BATCH_ACCELERATOR = 65536
SMALL_BATCH, SMALL_BATCH_STEP, SMALL_LENGTH_MULTIPLE = 64, 4, 32
"""For a few texts: tokens of the smallest micro-batch, the growth factor of the next ones, and the divisor of all widths."""
BATCHES_AHEAD = 4
"""Batches dispatched before the oldest result is fetched; bounds the device memory."""
TEXTS_PER_SHARD = 32768
"""Texts that are laid out together."""

EncodeFn = Callable[[Array, Array], Array]
"""Packed token ids [b, L] and lengths [b, S], int32, to embeddings [b, S, D]; jitted, with the parameters bound as arguments."""
Progress = Callable[[int], object]
"""Called with the number of texts just finished; tqdm's `update` is one."""


def encode(
    encode_fn: EncodeFn,
    store: Store,
    *,
    max_length: int,
    rows: Int[np.ndarray, " r"] | None = None,
    tokens_per_batch: int | None = None,
    length_multiple: int | None = None,
    progress: Progress = lambda texts: None,
    writer: EmbeddingWriter | None = None,
) -> Float[np.ndarray, "r D"]:
    """Embeddings of a store's texts, float32, in the store's order. Texts with equal tokens are encoded once, so they are equal.

    Args:
        encode_fn, store: the tower and the tokenized texts.
        max_length: tokens, special ones included; longer texts are cut.
        rows: which texts, in which order; all by default.
        tokens_per_batch: tokens of a micro-batch, padding included; by default the fastest size measured on this backend.
        length_multiple: see `micro_batches.padded_length`; smaller wastes less work and compiles more.
        progress: called with the number of texts of each finished micro-batch.
        writer: the rows are its next block; it keeps the finished rows, so that the call continues after a kill.

    Raises:
        InputError: there is no text, or a parameter is below 1.
    """
    rows = np.arange(store.num_texts) if rows is None else np.asarray(rows)
    if not len(rows):
        raise InputError("there is no text to encode; give a store with at least one.")
    if writer is None:  # else it is said once for all blocks
        tell_cut(store, rows, max_length)
    tokens_per_batch = _checked_tokens_per_batch(tokens_per_batch, max_length, length_multiple)
    firsts = first_places(text_hashes(store, max_length, rows))
    distinct, copies = np.flatnonzero(is_first := firsts == np.arange(len(rows))), np.flatnonzero(~is_first)
    lengths = store.lengths(max_length)[rows[distinct]]
    packs = not isinstance(encode_fn, Session)
    batches = list(plan(lengths, tokens_per_batch=tokens_per_batch, length_multiple=length_multiple, packs=packs))
    order, ends = np.concatenate([one.positions for one in batches]), np.cumsum([len(one.positions) for one in batches])
    kept = writer.begin_block(rows[distinct[order]], ends) if writer else np.zeros((0, 0), np.float32)
    embeddings = aligned(len(rows), kept.shape[1]) if len(kept) else None
    if embeddings is not None:
        embeddings[distinct[order[: len(kept)]]] = kept
    progress(len(kept))
    left = batches[np.searchsorted(ends, len(kept), side="right") :]
    for positions, slots, result in _dispatched(encode_fn, store, rows[distinct], left, max_length):
        block = np.asarray(result, np.float32)  # [b, S, D]
        embeddings = aligned(len(rows), block.shape[-1]) if embeddings is None else embeddings
        embeddings[distinct[positions]] = found = block.reshape(-1, block.shape[-1])[slots]
        if writer:
            writer.keep(found)
        progress(len(positions))
    assert embeddings is not None
    embeddings[copies] = embeddings[firsts[copies]]
    progress(len(copies))
    return embeddings


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
    part: Part | None = None,
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
    tokens_per_batch = _checked_tokens_per_batch(tokens_per_batch, max_length, length_multiple)
    source = {
        "model": model_hash,
        "store": store.content_hash,
        "tokenizer": store.tokenizer_fingerprint,
        "max_length": max_length,
        "num_texts": store.num_texts,
    }
    folder, texts = Path(out_dir), range(store.num_texts)
    if part is None:
        parts.join(folder, lambda: first_rows(store, max_length))
    elif not EMBEDDINGS.is_in(folder):
        folder, texts = part.folder(folder), part.rows(store.num_texts, texts_per_shard)
        source |= {"num_texts": len(texts), "rows": [texts.start, texts.stop], "of": store.num_texts}
    if not texts:
        return
    with outputs.in_turn(folder):
        batching = {"tokens_per_batch": tokens_per_batch, "length_multiple": length_multiple}
        writer = EmbeddingWriter(folder, source, {**batching, "texts_per_shard": texts_per_shard})
        if writer.is_complete:
            return
        progress(writer.num_done)
        tell_cut(store, np.asarray(texts), max_length)
        firsts = first_rows(store, max_length)
        for start in range(texts.start + writer.num_done, texts.stop, texts_per_shard):
            rows = np.arange(start, min(start + texts_per_shard, texts.stop))
            there = known[0].find(known[1][rows]) if known else np.full(len(rows), -1)
            is_new, is_known = (there < 0) & (firsts[rows] == rows), there >= 0
            if not is_new.any() and not known and not writer.num_done:
                is_new[0] = True  # gives the number of dimensions
            if is_new.any():
                options: dict[str, Any] = {"max_length": max_length, "progress": progress, "writer": writer, **batching}
                encoded = encode(encode_fn, store, rows=rows[is_new], **options)
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


def queries(run: Run, store: Store, **options: Any) -> Float[np.ndarray, "r D"]:
    """Query embeddings by a `Run`; `options` are `encode`'s."""
    options = _run_options(run, "query", options)
    return encode(encode_fn(run, "query"), store, **options)


def docs(run: Run, store: Store, **options: Any) -> Float[np.ndarray, "r D"]:
    """Document embeddings by a `Run`; `options` are `encode`'s."""
    options = _run_options(run, "doc", options)
    return encode(encode_fn(run, "doc"), store, **options)


def docs_to_dir(run: Run, store: Store, out_dir: str | Path, **options: Any) -> None:
    """Writes document embeddings by a `Run`; `options` are `encode_to_dir`'s."""
    options = _run_options(run, "doc", options)
    encode_to_dir(encode_fn(run, "doc"), store, out_dir, model_hash=tower_hash(run, "doc"), **options)


def cached_docs(
    run: Run,
    store: Store,
    name: str,
    *,
    max_length: int | None = None,
    part: Part | None = None,
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
    if not EMBEDDINGS.is_in(out_dir):
        hashes = text_hashes(store, max_length)
        before = embedding_files.find_known(folder, model=model, max_length=max_length)
        known = (before, hashes) if before else None
        options = {"max_length": max_length, "texts_per_shard": texts_per_shard, "progress": progress}
        docs_to_dir(run, store, out_dir, known=known, part=part, **options)
        if part is None:
            embedding_files.keep_hashes(out_dir, hashes)
    return out_dir


def embeddings_dir(run_dir: Path, name: str = "") -> Path:
    """Where a run keeps embeddings of documents: all, or those under one name."""
    return run_dir / "embeddings" / name


def encode_fn(run: Run, tower: str) -> EncodeFn:
    """One tower ("query" or "doc") of a `Run` as a jitted function of packed texts; the same model is compiled once a process.

    The rows of a batch are split over the devices that the parameters lie on; those of a run that was loaded, which lie on one
    device, are copied to all of this process. Where parameters are spread over several processes, all of them call this with
    equal tokens, and each gets all embeddings.
    """
    if run.model.query == run.model.doc and not {"query", "doc"} & set(run.params):
        tower = "doc"  # one program serves both
    if run.backend != "jax":
        return Session(run, tower)
    params, mesh = run.model.inference_params(run.params, tower), _mesh_of(run)
    if mesh.size == 1:
        return functools.partial(_jitted(run.model, tower), params)
    if sharding.mesh_of(params) is None:
        params = jax.device_put(params, sharding.replicated(mesh))
    on_every_device = _jitted(run.model, tower, mesh)

    def encode_rows(tokens: Int[np.ndarray, "b L"], lengths: Int[np.ndarray, "b S"]) -> Float[Array, "b S D"]:
        missing = -len(tokens) % sharding.num_row_shares(mesh)
        whole = [np.pad(rows, ((0, missing), (0, 0))) for rows in (tokens, lengths)]
        placed = [jax.make_array_from_process_local_data(sharding.by_rows(mesh), rows, rows.shape) for rows in whole]
        return on_every_device(params, *placed)[: len(tokens)]

    return encode_rows


def batching_for(run: Run, num_tokens: int) -> dict[str, Any]:
    """`tokens_per_batch` and `length_multiple` for so many tokens in all; smaller and fewer shapes where one batch holds them.

    So a few queries are not computed as a full batch, and queries of any length need few compiled programs.
    """
    num_shares = sharding.num_row_shares(_mesh_of(run))
    if num_tokens > _default_tokens_per_batch():
        return {"tokens_per_batch": _default_tokens_per_batch() * num_shares, "length_multiple": None}
    tokens_per_batch = SMALL_BATCH
    while tokens_per_batch < num_tokens:
        tokens_per_batch *= SMALL_BATCH_STEP
    return {"tokens_per_batch": tokens_per_batch * num_shares, "length_multiple": SMALL_LENGTH_MULTIPLE}


def tower_hash(run: Run, tower: str) -> str:
    """The model hash of one tower: equal exactly when it gives equal embeddings."""
    params = {name: run.params[name] for name in (tower, "shared") if name in run.params}
    backend = "" if run.backend == "jax" else f" {run.backend} 2"  # int8 by tokens
    return model_hash(f"{tower} {run.model.as_function()!r}{backend}", params)


def name_with_hashes(name: str, run: Run) -> str:
    """A model's name and its towers' hashes, which tell it from another model of that name."""
    return " ".join([name, *(tower_hash(run, tower)[:16] for tower in ("query", "doc"))])


def _dispatched(
    encode_fn: EncodeFn, store: Store, rows: np.ndarray, batches: Sequence[MicroBatch], max_length: int
) -> Iterator[tuple[np.ndarray, np.ndarray, Array]]:
    """(positions, slots, embeddings) of each batch, `BATCHES_AHEAD` in advance of the consumer, which waits as it copies."""
    in_flight: collections.deque[tuple[np.ndarray, np.ndarray, Array]] = collections.deque()
    for batch in batches:
        packed = batch.tokens(store, rows, max_length)
        in_flight.append((batch.positions, packed.slots, encode_fn(packed.tokens, packed.lengths)))
        if len(in_flight) > BATCHES_AHEAD:
            yield in_flight.popleft()
    yield from in_flight


def tell_cut(store: Store, rows: Int[np.ndarray, " r"], max_length: int) -> None:
    """Warns about texts that are longer than the model reads, if they are one in a hundred or more."""
    lengths = store.lengths(sys.maxsize)[rows]
    if np.mean(lengths > max_length) >= 0.01:
        input_policy.tell_cut("encoding", "texts", lengths, "max_length", max_length)


def _fill_copies(block: np.ndarray, copies: np.ndarray, firsts: np.ndarray, num_done: int, writer: EmbeddingWriter) -> None:
    """Gives copies in a block the embeddings of their first texts, which stand in it or in those written before.

    The embedding of a text that another job encodes stays 0 until the parts are joined.
    """
    here = copies[firsts[copies] >= 0]
    block[here] = block[firsts[here]]
    before = copies[(firsts[copies] < 0) & (firsts[copies] + num_done >= 0)]
    if len(before):
        block[before] = writer.written()[firsts[before] + num_done]


def _checked_tokens_per_batch(tokens_per_batch: int | None, max_length: int, length_multiple: int | None) -> int:
    tokens_per_batch = _default_tokens_per_batch() if tokens_per_batch is None else tokens_per_batch
    values = {"tokens_per_batch": tokens_per_batch, "max_length": max_length, "length_multiple": length_multiple}
    for name, value in values.items():
        if value is not None and value < 1:
            raise InputError(f"{name} is {value}; give at least 1.")
    return tokens_per_batch


def _run_options(run: Run, tower: str, options: dict[str, Any]) -> dict[str, Any]:
    """The defaults of a caller: the run's length, and one device's micro-batch times the devices that share its rows."""
    options = {"max_length": run.side(tower).max_length, **options}
    run.model.check_length(tower, options["max_length"])
    run.model.check_tokenizer(tower, run.side(tower).tokenizer)
    if options.get("tokens_per_batch") is None:
        options["tokens_per_batch"] = _default_tokens_per_batch() * sharding.num_row_shares(_mesh_of(run))
    return options


def _mesh_of(run: Run) -> jax.sharding.Mesh:
    """Where a run's parameters lie while it is trained; otherwise all devices of this process."""
    return sharding.mesh_of(run.params) or sharding.make_mesh(devices=jax.local_devices())


def _default_tokens_per_batch() -> int:
    return TOKENS_PER_BATCH.get(jax.default_backend(), TOKENS_PER_BATCH_ACCELERATOR)


@functools.lru_cache(maxsize=16)
def _jitted(model: Any, tower: str, mesh: jax.sharding.Mesh | None = None) -> Callable[..., Array]:
    def encode_rows(params: Any, tokens: Array, lengths: Array) -> Array:
        return model.encode_rows(tower, params, tokens, lengths=lengths)

    if mesh is None:
        return jax.jit(encode_rows)
    return jax.jit(sharding.traced_on(mesh, encode_rows), out_shardings=sharding.replicated(mesh))
