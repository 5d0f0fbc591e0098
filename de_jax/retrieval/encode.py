"""Texts to embeddings, the device busy while the host lays out and fetches; with little padding, in few shapes.

Short texts are packed, several in a row; a single text has a narrow row. Longer ones have a row each and are taken longest
first: a batch is as wide as its longest text, rounded up, and its number of rows follows from that width alone, so that each width
is compiled once. Too few of them to fill a batch are packed with the short ones if they fit in such a row.
"""

import collections
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, get_args, runtime_checkable

import jax
import numpy as np
from jaxtyping import Float, Int

from de_jax.data.batches import layout
from de_jax.data.stores.corpus import first_places, text_hashes
from de_jax.data.text import input_policy
from de_jax.models.static import StaticConfig
from de_jax.retrieval.embedding_files import EmbeddingWriter
from de_jax.retrieval.index import ALIGNMENT
from de_jax.retrieval.sessions import Session
from de_jax.training.mesh import sharding
from de_jax.training.run.run_folder import Run, model_hash
from de_jax.types import Array, Backend, InputError, Packed

TOKENS_PER_BATCH = {"cpu": 1024}
"""The default micro-batch of a device by jax backend; small ones stay in a processor's cache."""
TOKENS_PER_BATCH_ACCELERATOR = 65536
SMALL_BATCH, SMALL_BATCH_STEP, SMALL_LENGTH_MULTIPLE = 64, 4, 32
"""For a few texts: tokens of the smallest micro-batch, the growth factor of the next ones, and the divisor of all widths."""
BATCHES_AHEAD = 4
"""Batches dispatched before the oldest result is fetched; bounds the device memory."""

EncodeFn = Callable[[Array, Array], Array]
"""Packed token ids [b, L] and lengths [b, S], int32, to embeddings [b, S, D]; jitted, with the parameters bound as arguments."""
Progress = Callable[[int], object]
"""Called with the number of texts just finished; tqdm's `update` is one."""


class Packing(NamedTuple):
    """Texts of at most so many tokens are packed, into rows of so many tokens and at most so many texts."""

    text: int
    row: int
    texts: int
    sizes: int  # numbers of rows that a batch may have, up to a full one: few shapes, also from one call to the next
    alone: int  # the least width of a single text


SHORT = {"cpu": Packing(32, 64, 16, sizes=8, alone=16)}
"""By backend. A CPU computes scores of all pairs of tokens in a row, and compiles in seconds."""
SHORT_ACCELERATOR = Packing(256, 256, 64, sizes=1, alone=256)
"""Nearly all texts take one shape, whose program compiles for tens of seconds."""
NO_PACKING = Packing(0, 0, 1, sizes=8, alone=1)
LENGTHS_PER_DOUBLING = {"cpu": 8}
"""How many widths of longer texts there are by default between one power of two and the next, by backend."""
LENGTHS_PER_DOUBLING_ACCELERATOR = 4
WIDTHS_OF_TABLE = 4
"""How many widths there are in all where a text's tokens are only looked up: padding costs less than another program."""
TILE_ACCELERATOR = 8
"""Accelerators compute in tiles of 8 rows, so widths between two multiples of it would gain nothing."""


@runtime_checkable
class Store(layout.Store, Protocol):
    """The interface of tokenized texts for encoding, such as `de_jax.data.stores.corpus.TokenStore`."""

    def lengths(self, max_length: int) -> np.ndarray:
        """Tokens of each text after truncation, int32 [n]."""

    @property
    def ids(self) -> Sequence[str]: ...

    num_texts: int
    content_hash: str
    tokenizer_fingerprint: str


class MicroBatch(NamedTuple):
    """One call of the encoder: which texts of the request, where each lies, and the shape; the other rows are filler."""

    positions: np.ndarray
    row: np.ndarray
    place: np.ndarray
    num_rows: int
    row_length: int
    max_texts: int

    def tokens(self, store: Store, rows: np.ndarray, max_length: int) -> Packed:
        """The texts of the batch, which are the `rows` of the store, cut to `max_length`."""
        chosen = rows[self.positions]
        padded = store.pad(chosen, max_length, self.row_length)
        sizes = np.count_nonzero(padded, axis=1).astype(np.int32)
        shape = {"num_rows": self.num_rows, "row_length": self.row_length, "max_texts": self.max_texts}
        return layout.fill(padded, sizes, self.row, self.place, **shape)


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
        tokens_per_batch: tokens of a micro-batch, padding included; by default the fastest size measured on this backend.
        length_multiple: see `padded_length`; smaller wastes less work and compiles more.
        writer: the rows are its next block; it keeps the finished rows, so that the call continues after a kill.
    """
    rows = np.arange(store.num_texts) if rows is None else np.asarray(rows)
    if not len(rows):
        raise InputError("there is no text to encode; give a store with at least one.")
    if writer is None:  # else it is said once for all blocks
        tell_cut(store, rows, max_length)
    tokens_per_batch = checked_tokens_per_batch(tokens_per_batch, max_length, length_multiple)
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


def queries(run: Run, store: Store, **options: Any) -> Float[np.ndarray, "r D"]:
    """Query embeddings by a `Run`; `options` are `encode`'s."""
    return encode(encode_fn(run, "query"), store, **run_options(run, "query", options))


def docs(run: Run, store: Store, **options: Any) -> Float[np.ndarray, "r D"]:
    """Document embeddings by a `Run`; `options` are `encode`'s."""
    return encode(encode_fn(run, "doc"), store, **run_options(run, "doc", options))


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
    """Options of `encode` for so many tokens in all: smaller and fewer shapes where one batch holds them.

    So a few queries are not computed as a full batch, and queries of any length need few compiled programs.
    """
    if num_tokens > _default_tokens_per_batch():
        return {}
    tokens_per_batch = SMALL_BATCH
    while tokens_per_batch < num_tokens:
        tokens_per_batch *= SMALL_BATCH_STEP
    tokens_per_batch *= sharding.num_row_shares(_mesh_of(run))
    return {"tokens_per_batch": tokens_per_batch, "length_multiple": SMALL_LENGTH_MULTIPLE}


def tower_hash(run: Run, tower: str) -> str:
    """The model hash of one tower: equal exactly when it gives equal embeddings."""
    params = {name: run.params[name] for name in (tower, "shared") if name in run.params}
    backend = "" if run.backend == "jax" else f" {run.backend} 3"  # int8 by tokens, exact on every processor
    return model_hash(f"{tower} {run.model.as_function()!r}{backend}", params)


def is_by(run: Run, model_hash: str) -> bool:
    """Whether a run's document tower gave embeddings of this hash, on any backend and in float32 or bfloat16."""
    models = [run.model.with_dtype(dtype) for dtype in (None, "float32", "bfloat16")]
    runs = (run._replace(model=model, backend=backend) for backend in get_args(Backend) for model in models)
    return any(model_hash == tower_hash(of_kind, "doc") for of_kind in runs)


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


def aligned(num_rows: int, dim: int) -> Float[np.ndarray, "r D"]:
    """An array to be filled, which a CPU searches where it is."""
    memory = np.empty(4 * num_rows * dim + ALIGNMENT, np.uint8)
    return memory[-memory.ctypes.data % ALIGNMENT :][: 4 * num_rows * dim].view(np.float32).reshape(num_rows, dim)


def tell_cut(store: Store, rows: Int[np.ndarray, " r"], max_length: int) -> None:
    """Warns about texts that are longer than the model reads, if they are one in a hundred or more."""
    lengths = store.lengths(sys.maxsize)[rows]
    if np.mean(lengths > max_length) >= 0.01:
        input_policy.tell_cut("encoding", "texts", lengths, "max_length", max_length)


def checked_tokens_per_batch(tokens_per_batch: int | None, max_length: int, length_multiple: int | None) -> int:
    tokens_per_batch = _default_tokens_per_batch() if tokens_per_batch is None else tokens_per_batch
    given = (("tokens_per_batch", tokens_per_batch), ("max_length", max_length), ("length_multiple", length_multiple))
    if wrong := next((f"{name} is {value}" for name, value in given if value is not None and value < 1), None):
        raise InputError(f"{wrong}; give at least 1.")
    return tokens_per_batch


def run_options(run: Run, tower: str, options: dict[str, Any]) -> dict[str, Any]:
    """The defaults of a caller: the run's length, one device's micro-batch times the devices that share its rows, and widths."""
    side = {"query": run.query, "doc": run.doc}[tower]
    options = {"max_length": side.max_length, **options}
    run.model.check_length(tower, options["max_length"])
    run.model.check_tokenizer(tower, side.tokenizer)
    if options.get("tokens_per_batch") is None:
        options["tokens_per_batch"] = _default_tokens_per_batch() * sharding.num_row_shares(_mesh_of(run))
    if options.get("length_multiple") is None and isinstance(getattr(run.model, tower).encoder, StaticConfig):
        options["length_multiple"] = -(-options["max_length"] // WIDTHS_OF_TABLE)
    return options


def _mesh_of(run: Run) -> jax.sharding.Mesh:
    """Where a run's parameters lie while it is trained; otherwise all devices of this process."""
    return sharding.mesh_of(run.params) or sharding.make_mesh(devices=jax.local_devices())


def _default_tokens_per_batch() -> int:
    return TOKENS_PER_BATCH.get(jax.default_backend(), TOKENS_PER_BATCH_ACCELERATOR)


def plan(
    lengths: Int[np.ndarray, " n"], *, tokens_per_batch: int, length_multiple: int | None = None, packs: bool = True
) -> Iterator[MicroBatch]:
    """Micro-batches over all texts, in one shape for each width; only the last of a width has filler rows.

    Args:
        lengths: tokens of each text.
        tokens_per_batch: bound of rows times width, except for a single longer row.
        length_multiple: see `padded_length`.
        packs: whether short texts share rows; else each text has its own.
    """
    packing = SHORT.get(jax.default_backend(), SHORT_ACCELERATOR) if packs else NO_PACKING
    order = np.argsort(-lengths, kind="stable").astype(np.int32)
    if len(order) == 1 and (width := max(packing.alone, 1 << (int(lengths[0]) - 1).bit_length())) < packing.row:
        yield MicroBatch(order, order, order, 1, width, 1)  # a query waits for no row's other tokens
        return
    long = order[: int(np.count_nonzero(lengths > packing.text))]
    start = previous = 0
    while start < len(long):
        row_length = padded_length(int(lengths[long[start]]), length_multiple)
        num_rows = _num_rows(row_length, tokens_per_batch)
        if row_length <= packing.row and len(long) - start < num_rows:
            break
        positions = long[start : start + num_rows]
        if row_length != previous:  # else a program for full batches is there
            num_rows = min(num_rows, layout.round_up(len(positions), max(1, num_rows // packing.sizes)))
        row, previous = np.arange(len(positions), dtype=np.int32), row_length
        yield MicroBatch(positions, row, np.zeros_like(row), num_rows, row_length, 1)
        start += num_rows
    short = order[min(start, len(long)) :]
    if len(short):
        yield from _packed(short, lengths[short], _num_rows(packing.row, tokens_per_batch), packing)


def padded_length(longest: int, length_multiple: int | None) -> int:
    """How wide a batch is made whose longest text has `longest` tokens.

    Args:
        longest: tokens.
        length_multiple: the result is a multiple of it. None takes a share of the power of two above `longest` that depends on
            the backend.
    """
    if length_multiple is None:
        backend = jax.default_backend()
        steps = LENGTHS_PER_DOUBLING.get(backend, LENGTHS_PER_DOUBLING_ACCELERATOR)
        smallest = 1 if backend == "cpu" else TILE_ACCELERATOR
        length_multiple = max(smallest, 2 ** max(0, longest - 1).bit_length() // (2 * steps))
    return layout.round_up(longest, length_multiple)


def _packed(texts: np.ndarray, lengths: np.ndarray, most_rows: int, packing: Packing) -> Iterator[MicroBatch]:
    """Batches of as many rows each, so that a few rows more than a batch do not cost a second full one."""
    row, place = layout.fit(lengths, packing.row, packing.texts)
    needed = int(row.max()) + 1
    num_rows = min(most_rows, layout.round_up(-(-needed // -(-needed // most_rows)), max(1, most_rows // packing.sizes)))
    order = np.argsort(row, kind="stable")
    ends = np.searchsorted(row[order], np.arange(num_rows, needed + num_rows, num_rows))
    for batch, members in enumerate(np.split(order, ends[:-1])):
        yield MicroBatch(texts[members], row[members] - batch * num_rows, place[members], num_rows, packing.row, packing.texts)


def _num_rows(row_length: int, tokens_per_batch: int) -> int:
    num_rows = tokens_per_batch // row_length
    return num_rows // 8 * 8 if num_rows >= 8 else max(1, num_rows)


@functools.lru_cache(maxsize=16)
def _jitted(model: Any, tower: str, mesh: jax.sharding.Mesh | None = None) -> Callable[..., Array]:
    def encode_rows(params: Any, tokens: Array, lengths: Array) -> Array:
        return model.encode_rows(tower, params, tokens, lengths=lengths)

    if mesh is None:
        return jax.jit(encode_rows)
    return jax.jit(sharding.traced_on(mesh, encode_rows), out_shardings=sharding.replicated(mesh))
