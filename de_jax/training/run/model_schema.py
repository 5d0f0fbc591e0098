"""The JSON description of a model, derived from its configuration classes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from de_jax.files.folders import Kind
from de_jax.models.dual_encoder import ARCHITECTURES, DualEncoder, require_known_encoder
from de_jax.models.generator import Generator
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig
from de_jax.settings import Record, hints, of_class
from de_jax.training.step.adapters import Lora
from de_jax.types import InputError

T = TypeVar("T")


def _encoder(value: Any) -> dict[str, Any]:
    name = Record({"architecture": str})(value)["architecture"]
    require_known_encoder(name)
    fields = {key: one for key, one in value.items() if key != "architecture"}
    return {"architecture": name, **of_class(ARCHITECTURES[name])(fields)}


_TOWER = of_class(TowerConfig, encoder=_encoder)
DUAL_ENCODER = Record({**hints(DualEncoder), "query": _TOWER, "doc": _TOWER})
ADAPTERS = of_class(Lora)
GENERATOR = of_class(Generator, t5=of_class(T5Config))


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
