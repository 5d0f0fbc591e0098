"""What a run was made with, as JSON in `<run_dir>/recipe.json`: every setting by its name, functions and classes by their place."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from de_jax.data.files import write_json
from de_jax.data.reading import read_json
from de_jax.recipe import Recipe
from de_jax.types import InputError

FILE = "recipe.json"


def to_json(value: Any) -> Any:
    """A setting's value as JSON.

    A dataclass is {"type": "module.Name", field: value, ...}, a function {"function": "module.name", parameter: value, ...} with
    what `functools.partial` bound and the defaults of the rest, any other object {"type": "module.Name"}.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_json(entry) for key, entry in value.items()}
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"type": _place(type(value))} | fields
    if isinstance(value, list | tuple):
        return [to_json(entry) for entry in value]
    if isinstance(value, functools.partial) or inspect.isroutine(value) or inspect.isclass(value):
        return {"function": _place(value)} | {name: to_json(default) for name, default in _bound(value)}
    return {"type": _place(type(value))}


def write(recipe: Recipe, run_dir: Path) -> None:
    """Writes `recipe.json`."""
    write_json(run_dir / FILE, to_json(recipe))


def read(run_dir: Path) -> dict[str, Any] | None:
    """What `write` wrote; None for a run of version 0.1, which has none.

    Raises:
        InputError: it is damaged.
    """
    path = run_dir / FILE
    if not path.is_file():
        return None
    found = read_json(path)
    if not isinstance(found, dict):
        raise InputError(f"{path} is damaged: it holds no JSON object; copy it again, or remove it.")
    return found


def changes(recipe: Recipe, run_dir: Path) -> list[str]:
    """What the run that is there was made with otherwise, as "setting = value"; nothing where it has no `recipe.json`."""
    before = flat(read(run_dir) or {})
    here = flat(json.loads(json.dumps(to_json(recipe))))
    return [f"{path} = {value!r}" for path, value in here.items() if before and before.get(path) != value]


def flat(found: Any, above: str = "") -> dict[str, Any]:
    """Each setting under its path, such as "optimization.num_steps"."""
    if not isinstance(found, dict):
        return {above: found}
    return {path: value for key, entry in found.items() for path, value in flat(entry, f"{above}.{key}".lstrip(".")).items()}


def _bound(function: Any) -> Iterator[tuple[str, Any]]:
    """The parameters that have a value, with it."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some functions of C have no signature
        return
    positional = list(function.args) if isinstance(function, functools.partial) else []
    inner = function.func if isinstance(function, functools.partial) else function
    yield from zip(inspect.signature(inner).parameters, positional, strict=False)
    yield from ((one.name, one.default) for one in parameters if one.default is not one.empty)


def _place(value: Any) -> str:
    while isinstance(value, functools.partial):
        value = value.func
    return f"{value.__module__}.{value.__qualname__}"
