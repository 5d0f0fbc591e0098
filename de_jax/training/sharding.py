"""The mesh, and how a state and a batch lie on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from de_jax.types import Batch, InputError

DATA_AXIS = "data"


def make_mesh(data: int = -1) -> Mesh:
    """The first `data` devices in a row, along which the rows of a batch are split.

    Args:
        data: number of devices; -1 takes all.

    Raises:
        InputError: more devices are asked for than there are.
    """
    available = jax.device_count()
    num_devices = available if data == -1 else data
    if not 1 <= num_devices <= available:
        raise InputError(f"the mesh asks for {data} devices, but there are {available}; set make_mesh.data to -1 to use all.")
    # Auto axes: JAX's default would be Explicit ones, which put shardings into every type.
    return jax.make_mesh((num_devices,), (DATA_AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:num_devices])


def check_batch_size(batch_size: int, mesh: Mesh, num_chunks: int = 1) -> None:
    """Refuses a global batch whose rows cannot be split evenly over the mesh, and there into chunks."""
    pieces = mesh.size * num_chunks
    if batch_size % pieces:
        lower = batch_size - batch_size % pieces
        chunks = f" times {num_chunks} chunks" if num_chunks > 1 else ""
        raise InputError(
            f"batch_size {batch_size} is not divisible by the {mesh.size} devices of the mesh{chunks}; "
            f"take {lower or pieces} or {lower + pieces}, or fewer devices{' or chunks' if chunks else ''}."
        )


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def by_rows(mesh: Mesh) -> NamedSharding:
    """Rows split over the devices."""
    return NamedSharding(mesh, PartitionSpec(DATA_AXIS))


def place(batch: Batch, mesh: Mesh) -> Batch:
    """This host's numpy rows as one global array per field, split by rows; copies to the devices without waiting."""
    sharding = by_rows(mesh)
    return jax.tree.map(lambda rows: jax.make_array_from_process_local_data(sharding, np.asarray(rows)), batch)


def placed(batches: Iterator[Batch], mesh: Mesh, ahead: int = 2) -> Iterator[Batch]:
    """`place` over an iterator, `ahead` batches before they are needed, so that copies overlap with computation."""
    waiting: list[Batch] = []
    for batch in batches:
        waiting.append(place(batch, mesh))
        if len(waiting) > ahead:
            yield waiting.pop(0)
    yield from waiting


def describe(array: Any) -> str:
    """How an array lies on its mesh, as a person reads it: "replicated" or the axes of its dimensions."""
    spec = getattr(getattr(array, "sharding", None), "spec", None)
    return "replicated" if not spec or all(axis is None for axis in spec) else str(tuple(spec))
