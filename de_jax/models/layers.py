"""Building blocks of encoders: matrix products in a low precision, linear maps, dropout, and layers one after another."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.core.scope import LazyRng
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Int

from de_jax.settings import Range
from de_jax.types import ROW_AXES, Array, Params

TABLE_STD = 0.02
"""Of a table's initial rows."""
STD_OF_TRUNCATED = 0.87962566103423978
"""Of the standard normal distribution between -2 and 2."""
PRODUCT = "product"
"""Rematerialisation may keep these values: products with parameters. Its policies do not see into `product`'s own derivative."""

HEAD_AXIS = "tensor"
"""The axis of the mesh along which kernels, and so the heads of attention, are split."""
LORA_A, LORA_B = "lora_a", "lora_b"
"""Where the parameters of a `Linear` hold those of its adapter, each a kernel: [E, r] and [r, F]."""
_target: contextvars.ContextVar[str | None] = contextvars.ContextVar("target", default=None)


def platform() -> str:
    """The platform that the model is compiled for: "cpu", "gpu" or "tpu"."""
    return _target.get() or jax.default_backend()


@contextlib.contextmanager
def compiling_for(platform: str) -> Iterator[None]:
    """A context in which programs are traced for another platform than JAX runs on."""
    token = _target.set(platform)
    try:
        yield
    finally:
        _target.reset(token)


def stream_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The precision of values between two products of precision `dtype`.

    A CPU's low-precision kernels write float32, and its element-wise code is fastest in it; accelerators wait for memory.
    """
    return jnp.dtype(jnp.float32) if platform() == "cpu" else dtype


def split_by_rows(x: Float[Array, "b ..."]) -> Float[Array, "b ..."]:
    """`x` with its rows on the devices that have those rows of the batch; of no effect if no mesh is set.

    Left alone, XLA may split the residual stream as the kernels are split (in a loop over layers it does), and then sums the
    activations of all rows on every device instead of gathering a layer's kernels.
    """
    if not set(ROW_AXES) <= set(jax.sharding.get_abstract_mesh().axis_names):
        return x
    return jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec(ROW_AXES))


def num_head_shares() -> int:
    """Among how many devices the heads of attention are divided."""
    return dict(jax.sharding.get_abstract_mesh().shape).get(HEAD_AXIS, 1)


def num_row_shares() -> int:
    """Among how many devices the rows of a batch are divided."""
    shape = dict(jax.sharding.get_abstract_mesh().shape)
    return math.prod(shape.get(axis, 1) for axis in ROW_AXES)


@functools.cache
def has_bfloat16_units() -> bool:
    """Whether this process's NVIDIA GPU multiplies bfloat16, from a compute capability of 8; true on a machine without a GPU."""
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        return True
    capability = str(getattr(device, "compute_capability", ""))  # "9.0"; "gfx90a" of ROCm
    return capability.partition(".")[0].isdecimal() and int(capability.partition(".")[0]) >= 8


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def product(subscripts: str, a: Float[Array, ...], b: Float[Array, ...], dtype: jnp.dtype) -> Float[Array, ...]:
    """`jnp.einsum` of two arrays in the precision of `a`, accumulated in float32 forward and backward.

    Autodiff's own derivative would multiply float32 gradients with bfloat16 arrays, which is done in float32.

    Args:
        subscripts: as in "ble,ef->blf"; an index of one operand is in the other or in the result.
        b: parameters come in float32, and their gradient is not rounded. Not a transposed array: to transpose its gradient, XLA
            would turn the operands round (see `_einsum`).
        dtype: of the result.
    """
    return _einsum(subscripts, a, b.astype(a.dtype), dtype)


def _product_backward(subscripts: str, dtype: jnp.dtype, operands: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    a, b = operands
    left, right, result = _split(subscripts)
    gradient = gradient.astype(a.dtype)
    of_a = _einsum(f"{result},{right}->{left}", gradient, b.astype(a.dtype), stream_dtype(a.dtype)).astype(a.dtype)
    if platform() == "cpu" and b.ndim == 2 and b.shape[0] > b.shape[1]:
        # A CPU copies the first operand transposed. The narrower one is first here, and XLA is kept from turning both round again.
        turned = jax.lax.optimization_barrier(_einsum(f"{result},{left}->{right[::-1]}", gradient, a, stream_dtype(b.dtype)))
        return of_a, turned.T.astype(b.dtype)
    return of_a, _einsum(f"{left},{result}->{right}", a, gradient, stream_dtype(b.dtype)).astype(b.dtype)


product.defvjp(lambda subscripts, a, b, dtype: (product(subscripts, a, b, dtype), (a, b)), _product_backward)


def _einsum(subscripts: str, a: Array, b: Array, dtype: jnp.dtype) -> Array:
    left, right, result = _split(subscripts)
    outer = next(index for index in result if (index in left) != (index in right))
    if outer in right:
        # XLA turns the operands round when the result lists the second one's indices first; on a CPU (jaxlib 0.10) it then
        # finds no kernel for low precision and fails.
        subscripts, a, b = f"{right},{left}->{result}", b, a
    # An accelerator's default for float32 is fewer bits (TF32, bfloat16).
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 and platform() != "cpu" else None
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=dtype)


def _split(subscripts: str) -> tuple[str, str, str]:
    operands, result = subscripts.split("->")
    left, right = operands.split(",")
    return left, right, result


class _Draw(NamedTuple):
    """A parameter that `drawn_together` is asked for; `place` stands for it among the others until all are known."""

    draw: nn.initializers.Initializer
    key: Array
    place: Array


_draws: contextvars.ContextVar[list[_Draw] | None] = contextvars.ContextVar("draws", default=None)


@functools.cache
def normal(std: float, truncated: bool) -> nn.initializers.Initializer:
    """Draws of this standard deviation; `truncated` ones come from a normal distribution that is cut at two of its own."""
    draw = nn.initializers.truncated_normal(std / STD_OF_TRUNCATED) if truncated else nn.initializers.normal(std)

    def later(key: Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> Array:
        draws = _draws.get()
        if draws is None:
            return draw(key, shape, dtype)
        draws.append(_Draw(draw, key, jnp.zeros(shape, dtype)))
        return draws[-1].place

    return later


def drawn_together(init: Callable[[], Params]) -> Params:
    """The parameters that `init` makes, those of all layers that are alike by one draw with the same keys.

    A GPU's compiler needs a fifth of a second for each draw, and the layers of an encoder have a hundred of them.
    """
    draws: list[_Draw] = []
    token = _draws.set(draws)
    try:
        params = init()
    finally:
        _draws.reset(token)
    alike = collections.defaultdict(list)
    for one in draws:
        alike[one.draw, one.place.shape, one.place.dtype].append(one)
    drawn: dict[int, Array] = {}
    for (draw, *size), group in alike.items():
        # Without barriers, XLA would compute all keys in each draw, and the whole draw for each of its parts.
        keys = jax.lax.optimization_barrier(jnp.stack([jax.lax.optimization_barrier(one.key) for one in group]))
        values = jax.lax.optimization_barrier(jax.vmap(lambda key: draw(key, *size))(keys))  # noqa: B023, called at once
        drawn |= {id(one.place): values[number] for number, one in enumerate(group)}
    return jax.tree.map(lambda leaf: drawn.get(id(leaf), leaf), params)


class Linear(nn.Module):
    """A linear map: float32 kernel with `normal` initial values of a deviation, multiplied in `dtype`; a bias is zero at first."""

    features: int
    std: float
    dtype: jnp.dtype
    use_bias: bool = False
    truncated: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "b L e"]) -> Float[Array, "b L f"]:
        kernel = self.param("kernel", normal(self.std, self.truncated), (x.shape[-1], self.features))
        y = checkpoint_name(product("ble,ef->blf", x.astype(self.dtype), kernel, stream_dtype(self.dtype)), PRODUCT)
        if not self.use_bias:
            return y
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return y + bias[None, None, :].astype(y.dtype)


class Matrix(nn.Module):
    """Parameters under a name of their own, as a table or as a kernel, so that one pattern finds all that are alike."""

    rows: int
    columns: int
    kind: str = "embedding"
    draw: nn.initializers.Initializer = nn.initializers.normal(TABLE_STD)

    @nn.compact
    def __call__(self) -> Float[Array, "rows columns"]:
        return self.param(self.kind, self.draw, (self.rows, self.columns))


def first_of_text(segments: Int[Array, "b L"]) -> Int[Array, "b L"]:
    """The place in its row of the first token of each token's own text; padding after the last text counts as a text."""
    place = jnp.broadcast_to(jnp.arange(segments.shape[1])[None, :], segments.shape)
    is_first = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return jax.lax.cummax(jnp.where(is_first, place, 0), axis=1)


def places_of(segments: Int[Array, "b L"]) -> Int[Array, "b L"]:
    """A token's place within its own text, from 0; 0 for padding."""
    return jnp.where(segments > 0, jnp.arange(segments.shape[1])[None, :] - first_of_text(segments), 0)


class Dropout(nn.Module):
    """Zeroes a share of the values and scales the others up, so that the mean stays; see `HashedDropout`.

    Args:
        rate: the share, rounded to a multiple of 2^-16; the scale is that of the rounded share.
        per_text: all tokens of a text share one draw [E], as T5X has it (`broadcast_dims=(-2,)`); else each value has its own.
    """

    rate: float
    per_text: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, ...], deterministic: bool, segments: Int[Array, "b L"] | None = None) -> Float[Array, ...]:
        """`x` with values dropped; `segments`, which text of its row a token of `x` [b, L, E] belongs to, is for `per_text`."""
        if deterministic or round(self.rate * 2**16) == 0:
            return x
        if not self.per_text:
            return self.hashed()(x)
        assert segments is not None
        places = jnp.arange(x.size, dtype=jnp.uint32).reshape(x.shape)
        return self.hashed().at(jnp.take_along_axis(places, first_of_text(segments)[..., None], axis=1), x)

    def hashed(self) -> HashedDropout:
        """Of one array, which may be as large as attention weights are.

        Seeds are the key's, mixed with a hash of this module's path. Keys by `make_rng` are some fifty operations each, and an
        encoder has twenty: they took a third of a step's compilation on a CPU.
        """
        assert self.scope is not None
        key, number = LazyRng.create(self.scope.rngs["dropout"]), self.scope.rng_counters["dropout"]
        self.scope.rng_counters["dropout"] += 1
        digest = hashlib.sha256(repr((*key.suffix, number)).encode()).digest()
        seeds = (jax.random.key_data(key.rng)[:2] ^ np.frombuffer(digest, np.uint32, 2)) * np.uint32(0x7FEB352D)
        return HashedDropout(seeds ^ (seeds >> 15), min(round(self.rate * 2**16), 2**16 - 1))


class HashedDropout(NamedTuple):
    """Dropout that decides on a value by a hash of its place in the array, and of seeds.

    Two multiplications a value where threefry has twenty rounds, and so little that it is computed wherever the value is. The
    constants are those of lowbias32 (Wellons 2018). Places repeat after 2^32.
    """

    seeds: Any  # uint32 [2]
    dropped: int  # of 65,536

    def __call__(self, x: Float[Array, ...], together: int = 1) -> Float[Array, ...]:
        """`x` with values dropped, so many neighbours of the last axis at once."""
        sizes = (*x.shape[:-1], x.shape[-1] // together)
        strides = [math.prod(sizes[axis + 1 :]) % 2**32 for axis in range(x.ndim)]
        places = [jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) for axis in range(x.ndim)]
        places[-1] //= np.uint32(together)
        return self.at(
            functools.reduce(jnp.add, (place * np.uint32(stride) for place, stride in zip(places, strides, strict=True))), x
        )

    def at(self, places: Array, x: Array) -> Array:
        """Of values at these places, uint32, of an array."""
        bits = places ^ self.seeds[0]
        bits = (bits ^ (bits >> 16)) * np.uint32(0x7FEB352D)
        bits = (bits ^ (bits >> 15) ^ self.seeds[1]) * np.uint32(0x846CA68B)
        bits = (bits ^ (bits >> 16)) >> 16
        return jnp.where(bits >= self.dropped, x * (2**16 / (2**16 - self.dropped)), jnp.zeros_like(x))


def first_weight(query: Float[Array, "b L H d"], all_heads: int) -> Array:
    """The place of this device's first attention weight among those of all devices, uint32."""
    rows, length, heads, _ = query.shape
    if num_row_shares() * num_head_shares() == 1:
        return jnp.uint32(0)
    row, head = (jax.lax.axis_index(axis).astype(jnp.uint32) for axis in (ROW_AXES, HEAD_AXIS))
    return (row * (rows * all_heads) + head * heads) * length**2


def gelu(x: Float[Array, ...]) -> Float[Array, ...]:
    """x times the normal distribution function of x (Hendrycks and Gimpel 2016), in float32: 1 + erf cancels below -2."""
    wide = x.astype(jnp.float32)
    return (0.5 * wide * (1 + jax.lax.erf(wide * 0.5**0.5))).astype(x.dtype)


def gated(activation: Callable[[Array], Array], gate: Float[Array, "b L F"], x: Float[Array, "b L F"]) -> Float[Array, "b L F"]:
    """`activation(gate) * x`; accelerators write the gradients of both once, where four products would each compute them."""
    if platform() != "cpu":
        gate, x = jax.lax.optimization_barrier((gate, x))
    return activation(gate) * x


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "identity": lambda x: x,
    "tanh": jnp.tanh,
    "relu": nn.relu,
    "gelu": gelu,
    "gelu_tanh": nn.gelu,
    "silu": nn.silu,
}


Remat = Literal["none", "dots", "full"]
NumLayers = Annotated[int, Range(0, 1000)]


def make_layers(layer: type[nn.Module], config: Any) -> list[nn.Module]:
    """An encoder's layers, to be bound as its `layers`; each is called with (x, segments, deterministic, *context)."""
    return [_rematerialised(layer, config.remat)(config) for _ in range(config.num_layers)]


def through_layers(
    encoder: Any, x: Float[Array, "b L E"], segments: Int[Array, "b L"], deterministic: bool, *context: Any, of_layer: Any = None
) -> Float[Array, "b L E"]:
    """`x` after all of `encoder.layers`, which `make_layers` made.

    `context` are further arguments of every layer; of `of_layer`, a tree of arrays [layers, ...], each gets its own entries last.
    """
    own = lambda entry: () if of_layer is None else (entry,)  # noqa: E731
    if not encoder.config.scan_layers or encoder.is_initializing() or not encoder.layers:
        for number, layer in enumerate(encoder.layers):
            entry = jax.tree.map(lambda array: array[number], of_layer)  # noqa: B023, called at once
            x = layer(x, segments, deterministic, *context, *own(entry))
        return x
    # The layers as a loop over their stacked parameters: one layer is compiled, whatever their number.
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(layer.variables["params"] for layer in encoder.layers))
    keys = None if deterministic else jax.random.split(encoder.make_rng("dropout"), len(encoder.layers))
    unbound = type(encoder.layers[0])(encoder.config, parent=None)

    def one(x: Array, scanned: tuple[Any, Array | None, Any]) -> tuple[Array, None]:
        layer_params, key, entry = scanned
        rngs = None if key is None else {"dropout": key}
        return unbound.apply({"params": layer_params}, x, segments, deterministic, *context, *own(entry), rngs=rngs), None

    return jax.lax.scan(one, x, (params, keys, of_layer))[0]


def _rematerialised(layer: type[nn.Module], remat: Remat) -> type[nn.Module]:
    if remat == "none":
        return layer
    policy = jax.checkpoint_policies.save_only_these_names(PRODUCT) if remat == "dots" else None
    return nn.remat(layer, policy=policy, static_argnums=(3,), prevent_cse=True)  # `deterministic`, after `self`


def with_lora(*, scale: float, dropout_rate: float) -> contextlib.AbstractContextManager[None]:
    """Within it, a `Linear` with an adapter (LoRA: Hu et al. 2022) gives x W + scale * dropout(x) A B; other modules do as ever.

    Adapters are looked for in the parameters, and W is never summed with A B. `scale` is alpha / r, and `dropout_rate` is of an
    adapter's input, wherever the model's own dropout is on.
    """
    dropout = Dropout(dropout_rate, parent=None)

    def with_adapter(call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        y, linear = call(*args, **kwargs), context.module
        if not isinstance(linear, Linear) or context.method_name != "__call__" or not linear.has_variable("params", LORA_A):
            return y
        kernel: Callable[[str], Array] = lambda name: linear.get_variable("params", name)["kernel"]  # noqa: E731
        x: Array = args[0]
        if dropout_rate and linear.has_rng("dropout"):
            x = dropout.apply({}, x, False, rngs={"dropout": linear.make_rng("dropout")})
        between = stream_dtype(linear.dtype)
        low = product("ble,er->blr", x.astype(linear.dtype), kernel(LORA_A), between)
        return y + scale * product("blr,rf->blf", low.astype(linear.dtype), kernel(LORA_B), between)

    return nn.intercept_methods(with_adapter)
