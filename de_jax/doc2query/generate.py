"""Queries for all documents of a corpus by a generator, on all devices of this process, written part by part."""

import collections
import dataclasses
import functools
import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from de_jax.data.expansion.generated_queries import EXPANSION, DocQueries, ExpansionWriter, read_expansion, read_plan
from de_jax.doc2query.generator_run import GeneratorRun
from de_jax.files import addresses, outputs
from de_jax.models.decoding import END_ID, PAD_ID, Decoding, generate
from de_jax.models.generator import Generator
from de_jax.retrieval import parts
from de_jax.retrieval.encode import Store
from de_jax.retrieval.parts import Part
from de_jax.settings import NonNegativeInt, PositiveInt, Seed
from de_jax.training.mesh import sharding
from de_jax.training.run.run_folder import model_hash
from de_jax.types import Array, InputError

_GOLDEN = 0x9E3779B9
"""2**32 divided by the golden ratio: seeds of further draws, far from each other and from those of users."""
LENGTH_MULTIPLE = 32
BATCHES_AHEAD = 2
ROUNDS = 20
"""In which documents with too few different queries get more."""


def generate_to_dir(
    run: GeneratorRun,
    store: Store,
    out_dir: str | Path,
    decoding: Decoding,
    *,
    seed: Seed = 0,
    min_distinct: NonNegativeInt = 0,
    docs_per_batch: PositiveInt = 16,
    docs_per_part: PositiveInt = 4096,
    about: dict[str, Any] | None = None,
    part: Part | None = None,
    progress: Callable[[int], object] = lambda docs: None,
) -> None:
    """Writes `decoding.num_queries` queries for every document; the same call after a kill continues and ends byte-equal.

    Args:
        out_dir: an expansion that is absent, or begun or completed by the same call; see `expansion.generated_queries`.
        min_distinct: different queries of a document at least: more draws replace repeated ones; 0 keeps all as drawn.
        docs_per_batch: documents at a time, of each device.
        docs_per_part: documents of a part; a call after a stop continues with the next part.
        about: more for the plan, such as the corpus's fingerprint.
        part: its documents go to `part.folder(out_dir)` instead, unless `out_dir` is complete; without a part, the call joins them.
    """
    if store.tokenizer_fingerprint != run.tokenizer.fingerprint:
        raise InputError("the documents were tokenized with another vocabulary than the generator's; tokenize them with its own.")
    decoding = within_vocabulary(decoding, run)
    plan = {
        **(about or {}),
        "generator": model_hash(repr(run.model), run.params),
        "decoding": dataclasses.asdict(decoding),
        "seed": seed,
        "max_doc_length": run.max_doc_length,
        "docs": store.content_hash,
        "num_docs": store.num_texts,
        "docs_per_batch": docs_per_batch,
        "docs_per_part": docs_per_part,
        "min_distinct": min_distinct or None,
    }
    folder, texts = Path(out_dir), range(store.num_texts)
    if part is None:
        _join(folder)
    elif not EXPANSION.is_in(folder):
        folder, texts = part.folder(folder), part.rows(store.num_texts, docs_per_part)
        plan |= {"num_docs": len(texts), "rows": [texts.start, texts.stop], "of": store.num_texts}
    if not texts:
        return
    with outputs.in_turn(folder):
        writer = ExpansionWriter(folder, plan)
        if writer.is_complete:
            return
        write = QueryWriter(run, decoding, seed=seed, docs_per_batch=docs_per_batch, min_distinct=min_distinct)
        done = min(writer.num_parts * docs_per_part, len(texts))
        progress(done)
        for start in range(texts.start + done, texts.stop, docs_per_part):
            rows = np.arange(start, min(start + docs_per_part, texts.stop))
            queries = write(store, rows, progress)
            writer.append(
                DocQueries(doc_id, own) for doc_id, own in zip(store.ids[start : start + len(rows)], queries, strict=True)
            )
        if write.num_few:
            warnings.warn(
                f"{write.num_few} documents have fewer than {min_distinct} different queries after {ROUNDS} more draws of each; "
                "draw from more tokens (top_k, top_p, temperature).",
                stacklevel=2,
            )
        # The generator's path has no effect on its queries, so a run may continue with another path.
        writer.finish(num_queries=len(texts) * decoding.num_queries, source=addresses.named(str(run.source)), step=run.step)


def _join(folder: Path) -> None:
    """Makes an expansion of its parts, if there are any, byte for byte what one job writes. It continues after a kill."""
    if EXPANSION.is_in(folder):
        parts.remove(folder)
    if not (shards := parts.complete(folder, EXPANSION, "docs_per_part")):
        return
    manifests = [EXPANSION.open(shard) for shard in shards]
    plans = [{**read_plan(shard), "num_docs": manifest["of"]} for shard, manifest in zip(shards, manifests, strict=True)]
    plan = {name: value for name, value in plans[0].items() if name not in ("format", "rows", "of")}
    with outputs.in_turn(folder):
        for shard, other in zip(shards, plans, strict=True):
            EXPANSION.require_same(shard, other, plan)
        writer = ExpansionWriter(folder, plan)
        files = [shard / name for shard, manifest in zip(shards, manifests, strict=True) for name in sorted(manifest["parts"])]
        for file in files[writer.num_parts :]:
            writer.append(read_expansion(file))
        num_queries = sum(manifest["num_queries"] for manifest in manifests)
        writer.finish(num_queries=num_queries, source=manifests[0]["source"], step=manifests[0]["step"])
    parts.remove(folder)


class QueryWriter:
    """A generator, compiled for the devices of this process: documents of a store to their queries.

    `num_few` counts the documents so far with fewer than `min_distinct` different queries, after up to `ROUNDS` new draws.
    """

    def __init__(self, run: GeneratorRun, decoding: Decoding, *, seed: int, docs_per_batch: int, min_distinct: int = 0) -> None:
        if min_distinct > decoding.num_queries or (min_distinct and decoding.method != "sample"):
            raise InputError(
                f"min_distinct is {min_distinct}, but {decoding.method} writes {decoding.num_queries} queries of a document; it is "
                "for draws (sample), and at most their number."
            )
        self._run, self._decoding, self._seed, self._min_distinct = run, decoding, seed, min_distinct
        self.num_few = 0
        self._mesh = sharding.make_mesh(devices=jax.local_devices())
        self._batch_size = docs_per_batch * sharding.num_row_shares(self._mesh)
        self._params = jax.device_put(run.model.inference_params(run.params), sharding.replicated(self._mesh))

    def __call__(
        self, store: Store, rows: Int[np.ndarray, " r"], progress: Callable[[int], object] | None = None
    ) -> list[list[str]]:
        """The queries of each document of `rows`."""
        found = self._drawn(store, rows, self._seed, progress)
        for number in range(1, ROUNDS + 1):
            if not (few := [place for place, own in enumerate(found) if len(_distinct(own)) < self._min_distinct]):
                return found
            more = self._drawn(store, rows[few], (self._seed + number * _GOLDEN) % 2**32)
            for place, own in zip(few, more, strict=True):
                found[place] = _replenished(found[place], own)
        self.num_few += sum(len(_distinct(own)) < self._min_distinct for own in found)
        return found

    def _drawn(
        self, store: Store, rows: Int[np.ndarray, " r"], seed: int, progress: Callable[[int], object] | None = None
    ) -> list[list[str]]:
        found: list[list[str]] = [[]] * len(rows)
        for places, tokens in self._dispatched(store, rows, np.uint32(seed)):
            texts = self._texts(np.asarray(tokens)[: len(places)])
            for place, queries in zip(places.tolist(), texts, strict=True):
                found[place] = queries
            if progress:
                progress(len(places))
        return found

    def _dispatched(self, store: Store, rows: np.ndarray, seed: np.uint32) -> Iterator[tuple[np.ndarray, Array]]:
        """(places in `rows`, tokens [b, N, T]), longest documents first, some batches in advance of the consumer."""
        lengths, max_length = store.lengths(self._run.max_doc_length)[rows], self._run.max_doc_length
        order = np.argsort(-lengths, kind="stable")
        in_flight: collections.deque[tuple[np.ndarray, Array]] = collections.deque()
        for start in range(0, len(rows), self._batch_size):
            places = order[start : start + self._batch_size]
            width = min(-(-int(lengths[places[0]]) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, max_length)
            docs = np.zeros((self._batch_size, width), np.int32)
            docs[: len(places)] = store.pad(rows[places], max_length, width)
            seeds = np.zeros(self._batch_size, np.uint32)
            seeds[: len(places)] = [seed_of(store.ids[int(row)]) for row in rows[places]]
            on_devices = (jax.device_put(array, sharding.by_rows(self._mesh)) for array in (docs, seeds))
            compiled = _jitted(self._run.model, self._decoding, self._mesh)
            in_flight.append((places, compiled(self._params, *on_devices, seed)))
            if len(in_flight) > BATCHES_AHEAD:
                yield in_flight.popleft()
        yield from in_flight

    def _texts(self, tokens: Int[np.ndarray, "b N T"]) -> list[list[str]]:
        rows = [row[(row != PAD_ID) & (row != END_ID)] for row in tokens.reshape(-1, tokens.shape[-1])]
        texts = [" ".join(text.split()) for text in self._run.tokenizer.decode(rows)]
        return [texts[start : start + tokens.shape[1]] for start in range(0, len(texts), tokens.shape[1])]


def _distinct(queries: Sequence[str]) -> set[str]:
    return {query for query in queries if query}


def _replenished(queries: Sequence[str], more: Sequence[str]) -> list[str]:
    """Queries with others out of `more` in the place of blank and repeated ones, as far as these go."""
    fresh = iter([query for query in dict.fromkeys(more) if query and query not in queries])
    return [query if query and query not in queries[:place] else next(fresh, query) for place, query in enumerate(queries)]


def within_vocabulary(decoding: Decoding, run: GeneratorRun) -> Decoding:
    """The same, for tokens that both the generator and its tokenizer have."""
    return dataclasses.replace(decoding, num_tokens=min(run.tokenizer.vocab_size, run.model.t5.vocab_size))


def seed_of(doc_id: str) -> int:
    """A document's own seed, 32 bits: by its id, so that it does not change with the corpus around it."""
    return int.from_bytes(hashlib.sha256(doc_id.encode()).digest()[:4], "little")


@functools.lru_cache(maxsize=16)
def _jitted(model: Generator, decoding: Decoding, mesh: jax.sharding.Mesh) -> Callable[..., Array]:
    def write(params: Any, docs: Array, seeds: Array, seed: Array) -> Array:
        return generate(model, params, docs, seeds, seed, decoding)

    return jax.jit(sharding.traced_on(mesh, write), out_shardings=sharding.replicated(mesh))
