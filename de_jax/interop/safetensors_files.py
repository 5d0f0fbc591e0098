"""The arrays of a folder in safetensors, one file or several; nothing is read before it is asked for, and nothing unpickled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from de_jax.files import schema
from de_jax.files.reading import is_there, regular_file
from de_jax.types import InputError

FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_INDEX = schema.record({"weight_map": schema.map_of(schema.file_name)})
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


def stored_arrays(folder: Path) -> dict[str, Callable[[], np.ndarray]]:
    """A function that reads an array, by the array's name.

    Raises:
        InputError: a folder without safetensors, a damaged file, or files that contradict the index.
    """
    if is_there(folder / FILE):
        return arrays_in(folder / FILE)
    if is_there(folder / INDEX_FILE):
        return _sharded(folder)
    pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    if pickles:
        raise InputError(
            f"{folder / pickles[0]} is a pickle, which can run any code and is never opened; convert it where you trust it, with "
            "transformers' AutoModel.from_pretrained(folder).save_pretrained(folder, safe_serialization=True)."
        )
    raise InputError(f"{folder} holds neither {FILE} nor {INDEX_FILE}; copy the model's weights there.")


def arrays_in(file: Path) -> dict[str, Callable[[], np.ndarray]]:
    """As `stored_arrays`, of one file."""
    return {name: _reader(file, name) for name in _names(file)}


def _sharded(folder: Path) -> dict[str, Callable[[], np.ndarray]]:
    shards = schema.read(folder / INDEX_FILE, _INDEX)["weight_map"]
    there = {shard: _names(folder / shard) for shard in sorted(set(shards.values()))}
    for name, shard in shards.items():
        if name not in there[shard]:
            raise InputError(f"{folder / shard} lacks {name}, which {INDEX_FILE} says it holds; copy both again.")
    found = {}
    for shard, names in there.items():
        for name in names:
            if name in found:
                raise InputError(f"{folder / shard} holds {name}, as another file of {INDEX_FILE} does; copy all of them again.")
            found[name] = _reader(folder / shard, name)
    return found


def _names(file: Path) -> list[str]:
    with _opened(file) as arrays:
        return list(arrays.keys())


def _reader(file: Path, name: str) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        with _opened(file) as arrays:
            try:
                return np.asarray(arrays.get_tensor(name))
            except (AttributeError, TypeError):  # numpy has no such type
                raise InputError(
                    f"{file}: {name} holds {arrays.get_slice(name).get_dtype()} values; save it as F32, BF16 or F16."
                ) from None

    return read


def _opened(file: Path) -> Any:
    import safetensors

    try:
        return safetensors.safe_open(regular_file(file), framework="numpy")
    except safetensors.SafetensorError as error:
        raise InputError(f"{file} is damaged or is no safetensors file ({error}); copy it again.") from None


def save(file: Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes arrays as one file, in the way that transformers asks for."""
    import safetensors.numpy

    file.parent.mkdir(exist_ok=True)
    in_rows = {name: np.asarray(array, order="C") for name, array in arrays.items()}  # else the package writes other numbers
    safetensors.numpy.save_file(in_rows, file, metadata={"format": "pt"})
