"""Low-rank adapters: trained products are added to the kernels of an unchanged pretrained model (LoRA: Hu et al. 2022).

A kernel ".../query/kernel" [E, F] has its adapter beside it: ".../query/lora_a/kernel" [E, r] and ".../query/lora_b/kernel" [r, F].
Patterns over parameter paths name adapters as they name all other parameters.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Float

from de_jax.models.layers import LORA_A, LORA_B, with_lora
from de_jax.settings import PositiveFloat, PositiveInt, ShareBelowOne, check_fields
from de_jax.training.optim import paths
from de_jax.types import Array, Batch, Embeddings, InputError, Params

ADAPTER = rf".*/({LORA_A}|{LORA_B})/kernel"
"""The paths of all adapters."""
_ABLE = re.compile(r"(query|doc|shared)/encoder/.*/kernel")
_MATRIX = ".*/(kernel|embedding)"
_LAYER = re.compile(r"(.*/layers_)(\d+)(/.*)")
_ADAPTERS = 1
"""Folded into the key that makes the base, for the key that makes its adapters."""


@dataclasses.dataclass(frozen=True)
class Lora:
    """LoRA (Hu et al. 2022, arXiv 2106.09685): next to a kernel W, x W + alpha / r * dropout(x) A B; A and B are trained.

    A starts uniform in +-1 / sqrt(E), as in peft, and B at zero, so that the first step has the pretrained model. All other
    parameters are the base: they have neither a gradient nor a place in the optimizer's state, and a run saves them once.

    Attributes:
        pattern: of the paths of the kernels that get an adapter, all in encoders; by default those of attention, as
            in recipes/lora.gin. Hu et al., section 4.2, adapt `query` and `value` alone.
        rank: r, at most the smaller dimension of each of these kernels.
        alpha: the product is scaled by alpha / rank.
        dropout: share of an adapter's input that is dropped while training.
        trained: patterns of parameters of the base that are trained whole beside the adapters, such as a fresh projection:
            ("shared/projection/.*",). peft calls it `modules_to_save`.
        base_dtype: of the stored kernels and embedding tables of the base. "bfloat16" halves their memory; an encoder that
            multiplies in bfloat16 rounds its kernels so in any case.

    Example:
        >>> params = {"shared": {"encoder": {"layers_0": {"wi": {"kernel": jnp.ones((4, 6))}}}}}
        >>> lora = Lora(pattern=".*/wi/kernel", rank=2, alpha=4.0)
        >>> trained, base = lora.split(lora.added_to(params, jax.random.key(0)))
        >>> paths.all_paths(trained)
        ['shared/encoder/layers_0/wi/lora_a/kernel', 'shared/encoder/layers_0/wi/lora_b/kernel']
        >>> paths.all_paths(base)
        ['shared/encoder/layers_0/wi/kernel']
    """

    pattern: str = ".*/attention/(query|key|value|out)/kernel"
    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    dropout: ShareBelowOne = 0.0
    trained: Sequence[str] = ()
    base_dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "trained", tuple(self.trained))

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank

    def kernels(self, params: Params) -> dict[str, Any]:
        """The kernels that get an adapter, of a model without any, by path; refuses patterns and ranks that do not fit."""
        leaves = paths.by_path(params)
        try:
            found = {path: leaf for path, leaf in leaves.items() if re.fullmatch(self.pattern, path)}
        except re.error as error:
            raise InputError(f"Lora.pattern {self.pattern!r} is not a regular expression: {error}.") from None
        able = list(dict.fromkeys(_LAYER.sub(r"\g<1>0\g<3>", path) for path in leaves if _ABLE.fullmatch(path)))
        near = " or ".join(map(repr, difflib.get_close_matches(self.pattern, able, 2, 0.0)))
        if not found:
            raise InputError(f"Lora.pattern {self.pattern!r} matches no parameter; a kernel near it is {near or 'not there'}.")
        for path, leaf in found.items():
            if not _ABLE.fullmatch(path):
                raise InputError(
                    f"Lora.pattern {self.pattern!r} matches {path}, but only kernels of encoders get adapters, such as {near}; "
                    "name other trained parameters in Lora.trained."
                )
            if len(leaf.shape) != 2:
                raise InputError(
                    f"Lora.pattern {self.pattern!r} matches {path}, but its shape is {tuple(leaf.shape)}; only matrices get "
                    "adapters."
                )
            if self.rank > min(leaf.shape):
                raise InputError(
                    f"Lora.rank is {self.rank}, but {path} has the shape {tuple(leaf.shape)}; give at most {min(leaf.shape)}."
                )
        paths.check_patterns("Lora.trained", self.trained, params)
        if twice := [path for path in found if paths.matches(self.trained, path)]:
            raise InputError(f"Lora.trained matches {twice[0]}, which has an adapter; leave it out of one of the two.")
        return found

    def added_to(self, params: Params, rng: Array) -> Params:
        """`params` with fresh adapters, float32; raises as `kernels`."""
        whole = paths.by_path(params)
        for number, (path, kernel) in enumerate(self.kernels(params).items()):
            (num_in, num_out), bound = kernel.shape, kernel.shape[0] ** -0.5
            a, b = _places(path)
            whole[a] = jax.random.uniform(jax.random.fold_in(rng, number), (num_in, self.rank), minval=-bound, maxval=bound)
            whole[b] = jnp.zeros((self.rank, num_out))
        return paths.tree_of(whole)

    def is_trained(self, path: str) -> bool:
        """Whether a parameter is an adapter, or trained whole beside them."""
        return paths.matches((ADAPTER, *self.trained), path)

    def split(self, params: Params) -> tuple[Params, Params]:
        """The trained parameters, and the base in its stored precision."""
        trained, base = {}, {}
        for path, leaf in paths.by_path(params).items():
            if self.is_trained(path):
                trained[path] = leaf
            else:
                base[path] = leaf.astype(self.base_dtype) if paths.matches((_MATRIX,), path) else leaf
        return paths.tree_of(trained), paths.tree_of(base)

    def merged(self, params: Params) -> Params:
        """The parameters of a model without adapters that gives the same embeddings: W + alpha / rank * A B, float32.

        Each lies where its kernel did.
        """
        whole = paths.by_path(params)
        for path in [path for path in whole if path.endswith(f"/{LORA_A}/kernel")]:
            kernel_path = path.replace(f"/{LORA_A}/", "/")
            a, b = (whole.pop(place) for place in _places(kernel_path))
            kernel = whole[kernel_path]
            added = _sum(kernel, a, b, self.scale)
            whole[kernel_path] = jax.device_put(added, kernel.sharding) if isinstance(kernel, jax.Array) else added
        return paths.tree_of(whole)


@dataclasses.dataclass(frozen=True)
class AdaptedModel:
    """A model with adapters, as a step sees it. A tower without trained parameters runs without dropout.

    Attributes:
        model: with `init(rng)`, and `embed(params, batch, rng, without_dropout=towers)`.
        adapters: which, and how they are made.
    """

    model: Any
    adapters: Lora

    def init(self, rng: Array) -> Params:
        """The model's fresh parameters, and adapters."""
        return self.adapters.added_to(self.model.init(rng), jax.random.fold_in(rng, _ADAPTERS))

    def embed(self, params: Params, batch: Batch, rng: Array | None = None) -> Embeddings:
        """The model's embeddings, its kernels adapted."""
        with with_lora(scale=self.adapters.scale, dropout_rate=self.adapters.dropout):
            return self.model.embed(_alike(params), batch, rng, without_dropout=self.still_towers(params))

    def check(self, params: Params) -> None:
        """Refuses adapters that would change no embedding, as those of an encoder that multiplies without `layers.Linear`."""
        tokens = jnp.ones((1, 2), jnp.int32)

        def embeddings(params: Params) -> Any:
            e = self.embed(params, Batch(query=tokens, doc=tokens, query_id=None, doc_id=None))
            return e.query, e.doc

        from de_jax.losses.combination import leaves_read

        read = {paths.path_of(path) for path in leaves_read(embeddings, params)}
        if unread := [path for path in paths.all_paths(params) if re.fullmatch(ADAPTER, path) and path not in read]:
            raise InputError(
                f"the adapter {unread[0]} would change no embedding; an encoder of your own applies adapters where it multiplies "
                "by de_jax.models.layers.Linear."
            )

    def still_towers(self, params: Params) -> tuple[str, ...]:
        """The towers whose encoders give the same embeddings in every update."""
        moving = [path for path in paths.all_paths(params) if self.adapters.is_trained(path)]
        of_tower = lambda tower: re.compile(rf"{tower}/.*|shared/(embedder|encoder)/.*")  # noqa: E731
        return tuple(tower for tower in ("query", "doc") if not any(map(of_tower(tower).fullmatch, moving)))


@functools.partial(jax.jit, static_argnums=3)
def _sum(kernel: Float[Array, "E F"], a: Float[Array, "E r"], b: Float[Array, "r F"], scale: float) -> Float[Array, "E F"]:
    return kernel.astype(jnp.float32) + scale * jnp.einsum("er,rf->ef", a, b, precision="highest")


def _places(kernel_path: str) -> tuple[str, str]:
    """The paths of the adapter of a kernel."""
    stem = kernel_path.removesuffix("kernel")
    return f"{stem}{LORA_A}/kernel", f"{stem}{LORA_B}/kernel"


def _alike(params: Params) -> Params:
    """With an adapter of zeros where the same kernel of another layer has one: layers that are a loop have the same parameters."""
    whole = paths.by_path(params)
    same: dict[Any, list[str]] = {}
    for path, leaf in whole.items():
        same.setdefault((_LAYER.sub(r"\g<1>\g<3>", path), leaf.shape), []).append(path)
    for kernels in same.values():
        adapters = [_places(path) for path in kernels]
        first = next((own for own in adapters if own[0] in whole), ())
        absent = [pair for own in adapters for pair in zip(own, first, strict=False) if pair[0] not in whole]
        whole |= {path: jnp.zeros_like(whole[like]) for path, like in absent}
    return paths.tree_of(whole)
