"""How each array of a state lies on the mesh: rules by parameter path, which the optimizer's state follows.

A rule {pattern: axes} names the axes of a parameter's LAST dimensions, so one rule serves a layer's kernel [E, F] and the kernels
of all layers in one array [layers, E, F]. The last rule whose pattern matches counts, a user's after the default ones; a parameter
that none matches lies on every device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from de_jax.training.mesh import sharding
from de_jax.training.optim import paths
from de_jax.types import InputError, Params, TrainState

Axes = Sequence[Any]
"""For each of the last dimensions None, the name of a mesh axis, or a tuple of names."""
Rules = Mapping[str, Axes]
"""Axes by pattern over parameter paths."""

DEFAULT_RULES: Rules = {
    # [V, E] by rows alone: split along E, the residual stream would lie so too, and XLA would sum activations, not gather kernels.
    ".*/embedding": (("tensor", "fsdp"), None),
    ".*/kernel": ("fsdp", "tensor"),  # [E, F]: into heads or the feed-forward width
    ".*/(out|wo)/kernel": ("tensor", "fsdp"),  # [F, E]: back to the residual stream
    ".*/projection/kernel": ("fsdp", None),  # [E, D]: every device has whole embeddings for the loss
    ".*/lora_a/kernel": ("fsdp", None),  # [E, r] and [r, F] of an adapter lie as the kernel [E, F] does
    ".*/lora_b/kernel": (None, "tensor"),
    ".*/(out|wo)/lora_a/kernel": ("tensor", None),
    ".*/(out|wo)/lora_b/kernel": (None, "fsdp"),
}
"""Tables, kernels in and kernels out, whatever the encoder; norms, biases and position scores are small and lie everywhere."""
CPU_OPTIONS = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
"""A step in the order that holds least: a quarter less scratch memory, in the same time, with the same bits."""


def state_shardings(state: TrainState, mesh: Mesh, user_rules: Rules | None = None) -> TrainState:
    """The sharding of every array of a state, in the same tree.

    A dimension that its axes do not divide is not split where the rule is a default one, and refused where it is the user's.

    Args:
        state: arrays or their shapes.
        mesh: as `sharding.make_mesh` gives it.
        user_rules: as above.

    Raises:
        InputError: a user's rule matches nothing, or cannot be followed; names the parameter.
    """
    user_rules = dict(user_rules or {})
    paths.check_patterns("sharding", list(user_rules), state.all_params)
    all_specs = paths.map_with_path(lambda path, leaf: _spec(path, tuple(leaf.shape), mesh, user_rules), state.all_params)
    specs = paths.part_like(all_specs, state.params)
    everywhere = sharding.replicated(mesh)
    return TrainState(
        step=everywhere,
        params=_on(mesh, specs),
        opt_state=paths.map_with_path(_follower(state.params, specs, mesh), state.opt_state),
        rng=everywhere,
        cache=jax.tree.map(lambda _: sharding.by_rows(mesh), state.cache),
        base=None if state.base is None else _on(mesh, paths.part_like(all_specs, state.base)),
    )


def with_shardings(abstract: Any, shardings: Any) -> Any:
    """A tree of shapes with the place of each array, as `Checkpoints.restore` wants it."""
    return jax.tree.map(lambda leaf, on: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on), abstract, shardings)


class CompiledStep(NamedTuple):
    """An update under jit, with the numbers that are arguments of its program."""

    program: Any
    numbers: tuple[Any, ...]

    def __call__(self, state: TrainState, batch: Any) -> Any:
        return self.program(state, batch, *self.numbers)

    def lower(self, state: TrainState, batch: Any) -> Any:
        return self.program.lower(state, batch, *self.numbers)


def compiled_step(train_step: Any, shardings: TrainState, mesh: Mesh) -> CompiledStep:
    """`train_step` under jit on the mesh; the state is donated. What `functools.partial` bound to it are arguments of it."""
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    numbers = tuple(getattr(train_step, "keywords", {}).values())
    program = jax.jit(
        sharding.traced_on(mesh, getattr(train_step, "func", train_step)),
        in_shardings=(shardings, sharding.by_rows(mesh), *[sharding.replicated(mesh)] * len(numbers)),
        out_shardings=(shardings, sharding.replicated(mesh)),  # as it lay, so that nothing is compiled again
        donate_argnums=0,
        compiler_options=CPU_OPTIONS if is_cpu else None,
    )
    return CompiledStep(program, numbers)


def _on(mesh: Mesh, specs: Any) -> Any:
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def _spec(path: str, shape: tuple[int, ...], mesh: Mesh, user_rules: Rules) -> PartitionSpec:
    for rules, is_users in ((user_rules, True), (DEFAULT_RULES, False)):
        found = [(pattern, axes) for pattern, axes in rules.items() if paths.matches([pattern], path)]
        if found:
            pattern, axes = found[-1]
            if is_users:
                _check_rule(pattern, axes, path, shape, mesh)
            return _fitting_spec(axes, shape, mesh)
    return PartitionSpec()


def _fitting_spec(axes: Axes, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """The axes of the last dimensions. Axes of one device are left out; an entry loses its last axes until the rest divide its
    dimension."""
    dims: list[Any] = [None] * max(len(shape) - len(axes), 0)
    for size, entry in zip(shape[len(dims) :], axes, strict=False):
        names = tuple(name for name in _names(entry) if mesh.shape[name] > 1)
        while size % _num_pieces(names, mesh):
            names = names[:-1]
        dims.append(names if len(names) > 1 else names[0] if names else None)
    while dims and dims[-1] is None:
        dims.pop()
    return PartitionSpec(*dims)


def _check_rule(pattern: str, axes: Axes, path: str, shape: tuple[int, ...], mesh: Mesh) -> None:
    where = f"the sharding rule {pattern!r} = {axes!r}"
    if isinstance(axes, str):
        raise InputError(f"{where} is one name; write a tuple, such as ({axes!r},), with an entry for each of the last dimensions.")
    names = [name for entry in axes for name in _names(entry)]
    if unknown := [name for name in names if name not in sharding.AXES]:
        raise InputError(f"{where} names the axis {unknown[0]!r}; the axes are {', '.join(map(repr, sharding.AXES))}, or None.")
    if len(names) > len(set(names)):
        raise InputError(f"{where} names an axis twice; each axis can split one dimension only.")
    if len(axes) > len(shape):
        raise InputError(f"{where} is of {len(axes)} dimensions, but '{path}' has the shape {shape}; give at most {len(shape)}.")
    for size, entry in zip(shape[len(shape) - len(axes) :], axes, strict=True):
        if size % (pieces := _num_pieces(_names(entry), mesh)):
            raise InputError(
                f"{where} splits a dimension of '{path}', shape {shape}, into {pieces} pieces, which do not divide {size}; "
                "change the rule or the mesh."
            )


def _follower(params: Params, specs: Any, mesh: Mesh) -> Any:
    """A function of (path, array of the optimizer's state) to its sharding.

    An array belongs to the parameter whose path its own path ends with: a moment has the parameter's shape, a factored one
    (Adafactor's row and column means) lacks one of its dimensions. Anything else, counts and placeholders, lies on every device.
    """
    shapes = [tuple(leaf.shape) for leaf in jax.tree.leaves(params)]
    known = dict(zip(paths.all_paths(params), zip(shapes, jax.tree.leaves(specs), strict=True), strict=True))

    def follow(path: str, leaf: Any) -> NamedSharding:
        parts = path.split("/")
        tails = ("/".join(parts[start:]) for start in range(len(parts)))
        owner = next((tail for tail in tails if tail in known), None)
        return NamedSharding(mesh, _following_spec(path, tuple(leaf.shape), *known[owner]) if owner else PartitionSpec())

    return follow


def _following_spec(path: str, shape: tuple[int, ...], param_shape: tuple[int, ...], spec: PartitionSpec) -> PartitionSpec:
    if shape == param_shape:
        return spec
    dims = list(spec) + [None] * (len(param_shape) - len(spec))
    dropped = [dim for dim in range(len(param_shape)) if param_shape[:dim] + param_shape[dim + 1 :] == shape]
    if not dropped:
        return PartitionSpec()
    # In a square parameter either dimension may be missing; optax's row means lack the later one.
    gone = dropped[-1] if "v_row" in path.split("/") else dropped[0]
    return PartitionSpec(*dims[:gone], *dims[gone + 1 :])


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _num_pieces(names: Sequence[str], mesh: Mesh) -> int:
    return math.prod(mesh.shape[name] for name in names)
