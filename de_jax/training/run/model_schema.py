"""The JSON description of a model, derived from its configuration classes."""

from __future__ import annotations

import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from de_jax.files import schema
from de_jax.files.folders import Kind
from de_jax.models.dual_encoder import ARCHITECTURES, OWN_ENCODERS, require_known_encoder
from de_jax.models.generator import Generator
from de_jax.models.t5 import T5Config
from de_jax.models.tower import PARTS, TowerConfig
from de_jax.training.step.adapters import Lora
from de_jax.types import InputError

T = TypeVar("T")

MAX_SIZE = 1 << 24
"""Of a vocabulary, a width, a number of heads."""
MAX_LAYERS = 256
"""An encoder is traced layer by layer before its weights are looked at, so a number without bounds would hang."""

_MAY_BE_ZERO = ("position_offset", "num_token_types", "num_buckets", "first_global")

_LAYERS = schema.integer(0, MAX_LAYERS)
_ABOVE_ZERO = schema.number(1e-9)


def _encoder_of(kind: type) -> schema.Check:
    """Sizes are at least 1, except for sizes that an encoder may lack; of an encoder of a user's own, integers are any."""
    if kind not in OWN_ENCODERS:
        return schema.of_class(kind, num_layers=_LAYERS)
    sizes = {name: schema.integer(1, MAX_SIZE) for name, hint in typing.get_type_hints(kind).items() if hint is int}
    may_be_zero = {"num_layers": _LAYERS, **dict.fromkeys(_MAY_BE_ZERO, schema.integer(0, MAX_SIZE))}
    return schema.of_class(kind, **sizes | {name: check for name, check in may_be_zero.items() if name in sizes})


def _encoder(value: Any) -> dict[str, Any]:
    name = schema.record({"architecture": schema.text})(value)["architecture"]
    require_known_encoder(name)
    fields = {key: one for key, one in value.items() if key != "architecture"}
    return {"architecture": name, **_encoder_of(ARCHITECTURES[name])(fields)}


_TOWER = schema.of_class(TowerConfig, encoder=_encoder, projection_dim=schema.nullable(schema.integer(1, MAX_SIZE)))


DUAL_ENCODER = schema.record(
    {
        "query": _TOWER,
        "doc": _TOWER,
        "shared": schema.list_of(schema.constant(*PARTS)),
        "initial_temperature": schema.nullable(_ABOVE_ZERO),
    }
)
ADAPTERS = schema.of_class(
    Lora, rank=schema.integer(1, MAX_SIZE), alpha=_ABOVE_ZERO, dropout=schema.number(0, 1), trained=schema.texts
)
GENERATOR = schema.of_class(Generator, t5=_encoder_of(T5Config), num_decoder_layers=schema.nullable(_LAYERS))


def described(kind: Kind, folder: Path, make: Callable[[dict[str, Any]], T]) -> tuple[dict[str, Any], T]:
    """The manifest of a folder of this kind, and the model under its "model", which `make` (the class's `from_json`) makes.

    Raises:
        InputError: as `Kind.read_manifest` and `built`.
    """
    description = kind.read_manifest(folder)
    return description, built(folder / kind.file, make, description["model"])


def built(file: Path, make: Callable[[dict[str, Any]], T], model: dict[str, Any]) -> T:
    """The model of a description that fits its schema; settings that exclude each other are named with the file."""
    try:
        return make(model)
    except InputError as error:
        told = str(error)
        raise InputError(told if told.startswith(str(file)) else f"{file}: {told}") from None
