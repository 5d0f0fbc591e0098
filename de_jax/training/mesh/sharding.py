"""The mesh, and how a batch lies on it; `sharding_rules` lays out a state."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, TypeVar

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int32

from de_jax.settings import LARGEST, Range, checked
from de_jax.types import ROW_AXES, InputError, Packed

B = TypeVar("B", bound=tuple[Any, ...])

AXES = ("data", "fsdp", "tensor")
# Copied to the devices before they are needed.
BATCHES_AHEAD = 2
NumDevices = Annotated[int, Range(-1, LARGEST)]


@checked
def make_mesh(data: NumDevices = -1, fsdp: NumDevices = 1, tensor: NumDevices = 1, *, devices: Sequence[Any] | None = None) -> Mesh:
    """The devices as a grid of data x fsdp x tensor.

    Neighbours along `tensor`, then along `fsdp`, are close to each other, and of one host as long as it has enough devices.

    Args:
        data: copies of the parameters, each for its share of a batch's rows. -1, for one of the three, takes all devices
            that the other two leave.
        fsdp: devices that share one copy of the parameters and of the optimizer's state, and split rows as `data` does.
        tensor: devices that share the products of one row: heads, the feed-forward width, the vocabulary.
        devices: by default all, of every process.

    Raises:
        InputError: sizes that the devices cannot have.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = _sizes({"data": data, "fsdp": fsdp, "tensor": tensor}, len(devices))
    chosen = devices[: math.prod(sizes)]
    if len({device.process_index for device in chosen}) < len({device.process_index for device in devices}):
        raise InputError(
            f"a mesh of {_product(sizes)} leaves out all devices of a process; with several processes it must take devices of each."
        )
    # jax.make_mesh refuses sizes that cut an axis of the chips' grid, 4 x 16 on 8 x 8, everywhere but on v5e.
    grid = mesh_utils.create_device_mesh(sizes, chosen, allow_split_physical_axes=True)
    # Auto axes: JAX's default would be Explicit ones, which put shardings into every type.
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check_batch_size(batch_size: int, mesh: Mesh, num_chunks: int = 1) -> None:
    """Refuses a global batch whose rows cannot be split evenly over the mesh, and there into chunks."""
    num_shares = num_row_shares(mesh)
    pieces = num_shares * num_chunks
    if batch_size % pieces:
        lower = batch_size - batch_size % pieces
        along = "" if num_shares == mesh.size else f" along {' and '.join(ROW_AXES)}"
        chunks = f" times {num_chunks} chunks" if num_chunks > 1 else ""
        raise InputError(
            f"batch_size {batch_size} is not divisible by the {num_shares} devices of the mesh{along}{chunks}; "
            f"take {lower or pieces} or {lower + pieces}, or fewer devices{' or chunks' if chunks else ''}."
        )


def num_row_shares(mesh: Mesh) -> int:
    """How many pieces the rows of a batch are split into."""
    return math.prod(mesh.shape[axis] for axis in ROW_AXES)


def host_share(mesh: Mesh, process_index: int | None = None) -> tuple[int, int]:
    """(index, number) of the share of every batch's rows that a process reads.

    Processes whose devices hold the same rows, because `tensor` reaches over several hosts, have the same index.

    Args:
        mesh: as `make_mesh` gives it.
        process_index: by default this process.

    Raises:
        InputError: the rows do not fall to the processes in equal, separate shares.
    """
    process_index = jax.process_index() if process_index is None else process_index
    by_rows_ = mesh.devices.reshape(num_row_shares(mesh), -1)
    owners = [frozenset(device.process_index for device in devices) for devices in by_rows_]
    groups = list(dict.fromkeys(owners))
    if len({owners.count(group) for group in groups}) > 1 or sum(map(len, groups)) > len(frozenset().union(*groups)):
        raise InputError(
            f"a mesh of {_product(mesh.shape.values())} does not split the rows of a batch evenly over {jax.process_count()} "
            "processes; make `tensor` divide the devices of a process, or be a multiple of them."
        )
    return next(index for index, group in enumerate(groups) if process_index in group), len(groups)


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh that arrays were placed on; None for arrays of a single device that no mesh was named for."""
    mesh = getattr(getattr(jax.tree.leaves(tree)[0], "sharding", None), "mesh", None)
    return mesh if isinstance(mesh, Mesh) else None


def traced_on(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, to be compiled, with the mesh set while it is traced, so that a model finds the axes that split its rows."""

    @functools.wraps(function)
    def on_mesh(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*args)

    return on_mesh


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def by_rows(mesh: Mesh) -> NamedSharding:
    """Rows split over the devices."""
    return NamedSharding(mesh, PartitionSpec(ROW_AXES))


def place(batch: B, mesh: Mesh) -> B:
    """This host's numpy rows as one global array per field, split by rows; copies to the devices without waiting.

    Args:
        batch: a named tuple of arrays, such as `Batch`.
        mesh: the devices.
    """
    sharding = by_rows(mesh)

    def place_texts(texts: Any) -> Any:
        if isinstance(texts, Packed):
            texts = texts._replace(slots=_global_slots(texts, mesh))
        return jax.tree.map(lambda rows: jax.make_array_from_process_local_data(sharding, np.asarray(rows)), texts)

    return type(batch)(*(None if field is None else place_texts(field) for field in batch))  # type: ignore[arg-type]


def _global_slots(texts: Packed, mesh: Mesh) -> Int32[np.ndarray, ...]:
    """Slots among the packed rows of all hosts, from slots among this host's own."""
    num_rows, max_texts = texts.lengths.shape
    num_global = num_rows * host_share(mesh)[1]
    pieces = by_rows(mesh).addressable_devices_indices_map((num_global,)).values()
    own = np.unique(np.concatenate([np.arange(num_global)[piece] for piece in pieces if piece]))  # this host's rows among all
    row, place = np.divmod(texts.slots, max_texts)
    return np.where(texts.slots < 0, texts.slots, own[row] * max_texts + place).astype(np.int32)


def placed(batches: Iterator[B], mesh: Mesh) -> Iterator[B]:
    """`place` over an iterator, BATCHES_AHEAD before they are needed, so that copies overlap with computation."""
    waiting: list[B] = []
    for batch in batches:
        waiting.append(place(batch, mesh))
        if len(waiting) > BATCHES_AHEAD:
            yield waiting.pop(0)
    yield from waiting


def describe(array: Any) -> str:
    """How an array lies on its mesh, as a person reads it: "replicated" or the axes of its dimensions."""
    spec = getattr(getattr(array, "sharding", None), "spec", None)
    return "replicated" if not spec or all(axis is None for axis in spec) else str(tuple(spec))


def _sizes(asked: dict[str, int], available: int) -> tuple[int, ...]:
    fixed = math.prod(size for size in asked.values() if size != -1)
    written = ", ".join(f"{axis}={size}" for axis, size in asked.items())
    if list(asked.values()).count(-1) > 1 or any(size < 1 and size != -1 for size in asked.values()):
        raise InputError(f"a mesh of {written} cannot be; give sizes of at least 1, and -1 for one axis at most.")
    if fixed > available:
        raise InputError(
            f"the mesh asks for {fixed} devices, but there are {available}; it is {written}: make one of them smaller."
        )
    if -1 in asked.values() and available % fixed:
        raise InputError(
            f"the {available} devices cannot be shared out as {written}; the sizes that are given must divide {available}."
        )
    return tuple(available // fixed if size == -1 else size for size in asked.values())


def _product(sizes: Any) -> str:
    return " x ".join(map(str, sizes))
