"""The files of T5X checkpoints, in both of its layouts; nothing of T5X is imported.

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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from de_jax.files.reading import read_bytes, regular_file
from de_jax.types import Array, InputError

MSGPACK_FILE, ORBAX_DIR = "checkpoint", "state"
VERSION = 3  # of the msgpack layout; 2 differs in what bfloat16 looks like in zarr
CHUNK_BYTES = 64 * 2**20  # as T5X chooses
ARRAY_EXTENSION = 1  # flax's msgpack code of an array: (shape, dtype name, bytes)


class Leaf(NamedTuple):
    """An array of a checkpoint that is not read yet."""

    shape: tuple[int, ...]
    read: Callable[[], Array]


def leaves_of(folder: Path) -> dict[str, Leaf]:
    """The arrays of all parameters of a checkpoint by name, in the layout that it has."""
    for path in folder.rglob("*"):
        if not path.is_dir():
            regular_file(path)  # tensorstore and gzip would wait for a pipe without end
    layout = _in_msgpack if (folder / MSGPACK_FILE).is_file() else _in_orbax
    with _damage_named(folder):
        return dict(layout(folder))


def write(folder: Path, arrays: Mapping[str, np.ndarray], step: int) -> None:
    """Writes parameters by name into an existing folder, in the msgpack layout, without an optimizer's state."""
    import msgpack

    target: dict[str, Any] = {}
    for name, array in sorted(arrays.items()):
        *parents, leaf = name.split("/")
        node = functools.reduce(lambda tree, parent: tree.setdefault(parent, {}), parents, target)
        node[leaf] = _write_zarr(folder, name, array) if array.ndim > 1 else _extension(array)
    state = {"step": _extension(np.asarray(step, np.int32)), "param_states": {}}
    content = {"version": VERSION, "optimizer": {"state": state, "target": target}}
    (folder / MSGPACK_FILE).write_bytes(msgpack.packb(content))


def _in_msgpack(folder: Path) -> Iterator[tuple[str, Leaf]]:
    import msgpack

    content = msgpack.unpackb(read_bytes(folder / MSGPACK_FILE))
    if content["version"] not in (2, VERSION):
        raise ValueError(f"version {content['version']}, not 2 or {VERSION}")
    return _walk(folder, content["optimizer"]["target"], ())


def _walk(folder: Path, node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Leaf]]:
    import msgpack

    name = "/".join(path)
    if isinstance(node, msgpack.ExtType):
        shape, dtype, data = msgpack.unpackb(node.data)
        array = np.frombuffer(data, np.dtype(dtype)).reshape([int(size) for size in shape])
        yield name, Leaf(array.shape, lambda: array)
    elif isinstance(node.get("kvstore"), dict):
        # The folder's name is after "path", in older files outside the description of the store; it is always beside the file.
        stored = Path(str(node["kvstore"].get("path") or node.get("path"))).name
        yield name, _zarr(folder / stored, {"driver": "file", "path": f"{folder / stored}/"})
    else:
        for key, child in node.items():
            yield from _walk(folder, child, (*path, key))


def _in_orbax(checkpoint: Path) -> Iterator[tuple[str, Leaf]]:
    """Of one database, or of a folder for each array."""
    import tensorstore

    folder = checkpoint / ORBAX_DIR
    store: dict[str, Any] = {"driver": "file", "path": f"{folder}/"}
    if (folder / "manifest.ocdbt").is_file():
        store = {"driver": "ocdbt", "base": store}
    for key in (key.decode() for key in tensorstore.KvStore.open(store).result().list().result()):
        if found := re.fullmatch(r"(?:optimizer\.)?target\.([^/]+)/\.zarray", key):
            array = key.removesuffix(".zarray")
            # The folder driver has no path beside its own.
            of_array = {**store, "path": array} if "base" in store else {**store, "path": store["path"] + array}
            yield found[1].replace(".", "/"), _zarr(folder / array, of_array)


def _zarr(folder: Path, store: dict[str, Any]) -> Leaf:
    import tensorstore

    # A chunk that is absent would be read as zeros.
    spec = {"driver": "zarr", "kvstore": store, "fill_missing_data_reads": False}
    array = tensorstore.open(spec, open=True, read=True).result()
    chunk: Any = array.chunk_layout.read_chunk.shape
    is_gzip = (array.spec().to_json()["metadata"].get("compressor") or {}).get("id") == "gzip"

    def read() -> Array:
        if is_gzip:
            _check_chunks(folder, math.prod(chunk) * array.dtype.numpy_dtype.itemsize)
        with _damage_named(folder):
            return array.read().result()

    return Leaf(array.shape, read)


def _check_chunks(folder: Path, num_bytes: int) -> None:
    """Whether each gzip chunk is whole and has the checksum at its end (RFC 1952), which tensorstore does not look at."""
    for chunk in folder.rglob("[0-9]*"):
        with _damage_named(chunk), contextlib.suppress(IsADirectoryError), gzip.open(chunk) as file:
            if len(file.read(num_bytes + 1)) != num_bytes:
                raise ValueError(f"it does not hold the {num_bytes:,} bytes of a chunk")


@contextlib.contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, OSError, RuntimeError, zlib.error) as error:
        reason = re.sub(r"\s*\[(source locations|tensorstore_spec)=.*", "", (str(error).splitlines() or [""])[0])
        raise InputError(f"{path} is no checkpoint of T5X or is damaged ({type(error).__name__}: {reason[:200]}).") from error


def _write_zarr(folder: Path, name: str, array: np.ndarray) -> dict[str, Any]:
    """Writes an array beside the msgpack file; returns the reference that replaces it in that file."""
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
