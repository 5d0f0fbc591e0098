"""T5X checkpoints in and out, in both of its layouts; nothing of T5X is imported.

checkpoint_<step>/checkpoint            msgpack: the tree, small arrays in it
                  target.<name>/        zarr, one folder for each large array
checkpoint_<step>/state/                since 2024: all arrays by Orbax
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from de_jax.files import folders
from de_jax.files.reading import read_bytes, regular_file
from de_jax.interop.pretrained import Origin, Pretrained, PretrainedSide, assemble, disassemble
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.t5 import T5Config
from de_jax.models.tower import PARTS, TowerConfig
from de_jax.training.optim import paths
from de_jax.types import Array, InputError, Params

MSGPACK_FILE, ORBAX_DIR = "checkpoint", "state"
MAX_LENGTH = 512  # tokens; a T5X checkpoint does not say what its texts were cut to
VERSION = 3  # of the msgpack layout; 2 differs in what bfloat16 looks like in zarr
CHUNK_BYTES = 64 * 2**20  # as T5X chooses
ARRAY_EXTENSION = 1  # flax's msgpack code of an array: (shape, dtype name, bytes)
DTYPES = ("float32", "bfloat16", "float16", "float64", "int32", "int64", "uint16", "uint32")
MAX_DEPTH, MAX_LAYERS = 32, 1024
MAX_COMPRESSION = 1100
"""Bytes of arrays for one on the disk: gzip cannot do better, so headers that say more lie."""
SIDES = {"query": "left_", "doc": "right_", "shared": ""}
"""What t5x_retrieval puts before the names of a tower's own parts."""


class Leaf(NamedTuple):
    """An array of a checkpoint that is not read yet."""

    shape: tuple[int, ...]
    num_bytes: int
    read: Callable[[], Array]


def recognises(folder: str | Path) -> bool:
    """Whether a folder looks like one T5X checkpoint."""
    return (Path(folder) / MSGPACK_FILE).is_file() or (Path(folder) / ORBAX_DIR).is_dir()


def read(folder: str | Path, *, ignored: Sequence[str] = ()) -> Pretrained:
    """The towers of a T5X checkpoint, their sizes those of its arrays; decoder and optimizer are left out.

    An encoder or encoder-decoder alone becomes a symmetric dual encoder with mean pooling and without a projection. Of two
    towers by t5x_retrieval, the left one is the query's.

    Args:
        folder: a `checkpoint_<step>` folder.
        ignored: regular expressions of names of arrays, such as "encoder/extra/.*", that may be left over.

    Raises:
        InputError: no checkpoint there, a damaged one, or one with arrays that are missing or that have no place.
    """
    folder = Path(folder)
    if not recognises(folder):
        raise InputError(f"{folder} holds neither {MSGPACK_FILE} nor {ORBAX_DIR}/; give a checkpoint_<step> folder of T5X.")
    # A pipe in a file's place would make tensorstore wait.
    num_bytes = sum(regular_file(file).stat().st_size for file in folder.rglob("*") if not file.is_dir())
    stored = _in_msgpack(folder) if (folder / MSGPACK_FILE).is_file() else _in_orbax(folder / ORBAX_DIR)
    leaves = {name: leaf for name, leaf in stored if not name.startswith("decoder/")}
    if sum(leaf.num_bytes for leaf in leaves.values()) > MAX_COMPRESSION * num_bytes:
        raise InputError(f"{folder} announces arrays far beyond the {num_bytes:,} bytes that it holds; it is damaged.")
    leaves = dict(_in_our_layout(folder, leaves))
    model = _model_of(folder, {name: leaf.shape for name, leaf in leaves.items()})
    like = model.shapes()
    reads = {name: leaf.read for name, leaf in leaves.items()}
    params = assemble(str(folder), reads, _origins(like), like, ignored=ignored)
    return Pretrained(model, params, PretrainedSide(None, MAX_LENGTH), PretrainedSide(None, MAX_LENGTH))


def write(folder: str | Path, model: DualEncoder, params: Params, step: int) -> None:
    """Writes a checkpoint in the msgpack layout, without an optimizer's state; `read` gives it back bit for bit.

    Args:
        folder: appears by rename; T5X looks for the name `checkpoint_<step>`.
        model: of T5 towers.
        params: its parameters.
        step: updates done.

    Raises:
        InputError: a tower that is not T5, or a learned temperature, for which T5X has no place.
    """
    import msgpack

    if model.initial_temperature is not None or not all(isinstance(t.encoder, T5Config) for t in (model.query, model.doc)):
        raise InputError("a T5X checkpoint holds T5 towers without a learned temperature; choose another format.")
    with folders.atomic_dir(folder) as temporary:
        target: dict[str, Any] = {}
        for name, array in sorted(disassemble(params, _origins(params)).items()):
            *parents, leaf = name.split("/")
            node = functools.reduce(lambda tree, parent: tree.setdefault(parent, {}), parents, target)
            node[leaf] = _write_zarr(temporary, name, array) if array.ndim > 1 else _extension(array)
        state = {"step": _extension(np.asarray(step, np.int32)), "param_states": {}}
        content = {"version": VERSION, "optimizer": {"state": state, "target": target}}
        (temporary / MSGPACK_FILE).write_bytes(msgpack.packb(content))


def _place(part: str, side: str) -> str:
    """Where the arrays of a part of a tower are."""
    embedder = f"{side}encoder/token_embedder" if side else "token_embedder"
    return {"embedder": embedder, "encoder": f"{side}encoder", "projection": f"{side}projection_layer"}[part]


def _origins(params: Params) -> dict[str, Origin]:
    """T5X's name of each parameter."""
    origins = {}
    for path in paths.all_paths(params):
        owner, part, name = path.split("/", 2)
        origins[path] = Origin(f"{_place(part, SIDES[owner])}/{name}")
    return origins


def _model_of(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> DualEncoder:
    of_left = dict(zip(PARTS, ("embedding", "encoder_norm/scale", "kernel"), strict=True))
    shared = tuple(part for part, name in of_left.items() if f"{_place(part, 'left_')}/{name}" not in shapes)
    towers = {}
    for tower in ("query", "doc"):
        embedder, encoder, projection = (_place(part, "" if part in shared else SIDES[tower]) for part in PARTS)
        kernel = shapes.get(f"{projection}/kernel")
        towers[tower] = TowerConfig(
            encoder=_encoder_of(folder, shapes, embedder, encoder),  # type: ignore[arg-type]
            projection_dim=kernel[-1] if kernel else None,
            projection_bias=f"{projection}/bias" in shapes,
        )
    return DualEncoder(towers["query"], towers["doc"], shared)


def _encoder_of(folder: Path, shapes: Mapping[str, tuple[int, ...]], embedder: str, encoder: str) -> T5Config:
    first = f"{encoder}/layers_0"
    bias_per_layer = f"{first}/relpos_bias/rel_embedding" in shapes
    try:
        vocab_size, model_dim = shapes[f"{embedder}/embedding"]
        num_heads, num_buckets = shapes[f"{first if bias_per_layer else encoder}/relpos_bias/rel_embedding"]
        _, joined_heads = shapes[f"{first}/attention/query/kernel"]
        mlp_dim, _ = shapes[f"{first}/mlp/wo/kernel"]
    except KeyError as error:
        raise InputError(f"{folder} holds no array {error}, so it is no T5 encoder.") from None
    except ValueError:
        raise InputError(f"{folder} holds an embedding, bias or kernel that is not a matrix; it is no T5 encoder.") from None
    if not joined_heads or not num_heads or joined_heads % num_heads:
        raise InputError(f"{folder}: {joined_heads} columns of {first}/attention/query/kernel are not for {num_heads} heads.")
    return T5Config(
        vocab_size=vocab_size,
        model_dim=model_dim,
        num_layers=len({name.split("/")[1] for name in shapes if re.match(rf"{encoder}/layers_\d+/", name)}),
        num_heads=num_heads,
        head_dim=joined_heads // num_heads,
        mlp_dim=mlp_dim,
        activation="gated_gelu" if f"{first}/mlp/wi_0/kernel" in shapes else "relu",
        num_buckets=num_buckets,
        bias_per_layer=bias_per_layer,
        dtype="float32",
    )


def _in_our_layout(folder: Path, leaves: Mapping[str, Leaf]) -> Iterator[tuple[str, Leaf]]:
    """Scanned layers one by one, and kernels with an axis of heads without it."""
    for name, leaf in leaves.items():
        scanned = re.fullmatch(r"((?:left_|right_)?encoder)/encoder/(.*)", name)
        if not scanned:
            yield name, _joined_heads(name, leaf)
            continue
        if len(leaf.shape) < 2 or not 0 < leaf.shape[1] <= MAX_LAYERS:
            raise InputError(f"{folder}: {name} has shape {leaf.shape}, but its second axis should be that of the layers.")
        num_layers = leaf.shape[1]
        stacked = functools.cache(leaf.read)  # read once for all its layers
        for layer in range(num_layers):
            one = Leaf(
                (leaf.shape[0], *leaf.shape[2:]),
                leaf.num_bytes // num_layers,
                lambda stacked=stacked, layer=layer: stacked()[:, layer],  # type: ignore[misc]
            )
            yield f"{scanned[1]}/layers_{layer}/{scanned[2]}", _joined_heads(name, one)


def _joined_heads(name: str, leaf: Leaf) -> Leaf:
    if len(leaf.shape) != 3 or not (kernel := re.search(r"attention/(query|key|value|out)/kernel$", name)):
        return leaf
    first, second, third = leaf.shape
    shape = (first * second, third) if kernel[1] == "out" else (first, second * third)
    return Leaf(shape, leaf.num_bytes, lambda: leaf.read().reshape(shape))


def _in_msgpack(folder: Path) -> Iterator[tuple[str, Leaf]]:
    """Name and leaf of all parameters of the msgpack layout."""
    import msgpack

    file = folder / MSGPACK_FILE
    try:
        content = msgpack.unpackb(read_bytes(file))
    except (ValueError, TypeError, RecursionError, MemoryError, msgpack.UnpackException) as error:
        raise InputError(f"{file} is not a T5X checkpoint, or is cut off ({error or 'not msgpack'}).") from None
    version = content.get("version") if isinstance(content, dict) else None
    if version not in (2, VERSION):
        raise InputError(f"{file} is not a T5X checkpoint of version 2 or {VERSION}, but of {version}.")
    optimizer = content.get("optimizer")
    target = optimizer.get("target") if isinstance(optimizer, dict) else None
    if not isinstance(target, dict):
        raise InputError(f"{file} holds no optimizer/target, where T5X keeps the parameters.")
    return _walk(folder, target, ())


def _walk(folder: Path, node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Leaf]]:
    import msgpack

    name = "/".join(path)
    if isinstance(node, msgpack.ExtType):
        yield name, _inline(folder, name, node)
    elif not isinstance(node, dict) or len(path) > MAX_DEPTH or not all(isinstance(key, str) for key in node):
        raise InputError(f"{folder / MSGPACK_FILE}: {name[:100]} is neither an array nor a tree of arrays.")
    elif isinstance(node.get("kvstore"), dict):
        # The folder's name is after "path", in older files outside the description of the store; it is always beside the file.
        stored = Path(str(node["kvstore"].get("path") or node.get("path"))).name
        yield name, _zarr(folder / stored, {"driver": "file", "path": f"{folder / stored}/"})
    else:
        for key, child in node.items():
            yield from _walk(folder, child, (*path, key))


def _inline(folder: Path, name: str, extension: Any) -> Leaf:
    import msgpack

    try:
        shape, dtype, data = msgpack.unpackb(extension.data)
        if extension.code != ARRAY_EXTENSION or dtype not in DTYPES:
            raise ValueError(f"{dtype} is no type of numbers")
        array = np.frombuffer(data, np.dtype(dtype)).reshape([int(size) for size in shape])
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise InputError(f"{folder / MSGPACK_FILE}: {name} is not an array ({error}).") from None
    return Leaf(array.shape, array.nbytes, lambda: array)


def _in_orbax(folder: Path) -> Iterator[tuple[str, Leaf]]:
    """Name and leaf of all parameters of the Orbax layout, in one database or in a folder for each."""
    import tensorstore

    store: dict[str, Any] = {"driver": "file", "path": f"{folder}/"}
    if (folder / "manifest.ocdbt").is_file():
        store = {"driver": "ocdbt", "base": store}
    with _damage_named(folder):
        keys = [key.decode() for key in tensorstore.KvStore.open(store).result().list().result()]
    for key in keys:
        if found := re.fullmatch(r"(?:optimizer\.)?target\.([^/]+)/\.zarray", key):
            array = key.removesuffix(".zarray")
            # The folder driver has no path beside its own.
            of_array = {**store, "path": array} if "base" in store else {**store, "path": store["path"] + array}
            yield found[1].replace(".", "/"), _zarr(folder / array, of_array)


def _zarr(folder: Path, store: dict[str, Any]) -> Leaf:
    import tensorstore

    with _damage_named(folder):
        # A chunk that is absent would be read as zeros.
        spec = {"driver": "zarr", "kvstore": store, "fill_missing_data_reads": False}
        array = tensorstore.open(spec, open=True, read=True).result()
    chunk: Any = array.chunk_layout.read_chunk.shape
    if math.prod(chunk) > math.prod(array.shape):
        raise InputError(f"{folder}: a chunk is larger than the array; the checkpoint is damaged.")
    is_gzip = (array.spec().to_json()["metadata"].get("compressor") or {}).get("id") == "gzip"

    def read() -> Array:
        if is_gzip:
            _check_chunks(folder, math.prod(chunk) * array.dtype.numpy_dtype.itemsize)
        with _damage_named(folder):
            return array.read().result()

    return Leaf(array.shape, math.prod(array.shape) * array.dtype.numpy_dtype.itemsize, read)


def _check_chunks(folder: Path, num_bytes: int) -> None:
    """Whether each gzip chunk is whole and has the checksum at its end (RFC 1952), which tensorstore does not look at."""
    for chunk in folder.rglob("[0-9]*"):
        if not chunk.is_file():
            continue
        try:
            with gzip.open(chunk) as file:
                is_whole = len(file.read(num_bytes + 1)) == num_bytes
        except (EOFError, zlib.error, OSError):
            is_whole = False
        if not is_whole:
            raise InputError(f"{folder} is missing or damaged (the chunk {chunk.name} is cut off or is not as it was written).")


@contextlib.contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, OSError, RuntimeError, NotImplementedError) as error:
        reason = re.sub(r"\s*\[(source locations|tensorstore_spec)=.*", "", str(error).splitlines()[0])
        raise InputError(f"{path} is missing or damaged ({reason[:200]}).") from error


def _write_zarr(folder: Path, name: str, array: np.ndarray) -> dict[str, Any]:
    """Writes an array beside the msgpack file; gives what stands for it there."""
    import tensorstore

    stored = f"target.{name.replace('/', '.')}"
    num_rows = max(1, min(len(array), CHUNK_BYTES // max(1, array[0].nbytes)))
    metadata = {
        "shape": list(array.shape),
        "chunks": [num_rows, *array.shape[1:]],
        "compressor": {"id": "gzip", "level": 1},
        "dtype": array.dtype.str,
    }
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{folder / stored}/"}, "metadata": metadata}
    tensorstore.open(spec, create=True).result().write(array).result()
    return {**spec, "dtype": array.dtype.name, "kvstore": {"driver": "file", "path": stored}}


def _extension(array: np.ndarray) -> Any:
    import msgpack

    return msgpack.ExtType(ARRAY_EXTENSION, msgpack.packb((array.shape, array.dtype.name, array.tobytes())))
