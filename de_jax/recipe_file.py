"""The recipe of a run as JSON in `<run_dir>/recipe.json`: every setting by name, functions and classes by their place."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import numbers
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from de_jax.files import buckets, schema
from de_jax.files.outputs import atomic_file, write_json
from de_jax.training.mesh import distributed
from de_jax.training.run.run_folder import CHECKPOINTS_DIR, DATA_FILE, RECIPE_FILE, complete_steps
from de_jax.training.run.run_settings import read_recipe_file, read_settings

MOST_ENTRIES = 1000
"""Of a list that is written out; a longer one is data, and its length stands for it."""


def to_json(value: Any) -> Any:
    """A setting's value as JSON.

    A dataclass is {"type": "module.Name", field: value, ...}, a function {"function": "module.name", parameter: value, ...} with
    what `functools.partial` bound and the defaults of the rest, any other object {"type": "module.Name"}. Data stay out: of rows,
    as `table_pairs` takes them, and of long lists only the number is written.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return buckets.address_of(value) or value
    if isinstance(value, numbers.Integral):  # NumPy's too
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else str(float(value))  # JSON has no word for the others
    if isinstance(value, Mapping):
        return {str(key): to_json(entry) for key, entry in value.items()}
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"type": _place(type(value))} | fields
    if isinstance(value, list | tuple) and (len(value) > MOST_ENTRIES or any(isinstance(entry, Mapping) for entry in value)):
        return {"type": _place(type(value)), "num_entries": len(value)}
    if isinstance(value, list | tuple):
        return [to_json(entry) for entry in value]
    if isinstance(value, functools.partial) or inspect.isroutine(value) or inspect.isclass(value):
        return {"function": _place(value)} | {name: to_json(default) for name, default in _bound(value)}
    return {"type": _place(type(value))}


def keep(recipe: Any, run_dir: Path, gin: str = "") -> None:
    """Writes `recipe.json`, and `config.gin` if there is one; warns if a continued run has other settings.

    Args:
        recipe: a `Recipe`.
        run_dir: a run that is described.
        gin: the recipe as a gin file; "" for one in Python.
    """
    if changed := changes(recipe, run_dir, gin):
        warnings.warn(f"{run_dir} continues with other settings than it had: {'; '.join(changed)}.", stacklevel=3)
    if distributed.is_first():
        write_json(run_dir / RECIPE_FILE, to_json(recipe))
        if gin:
            with atomic_file(run_dir / "config.gin") as temporary:
                temporary.write_text(gin)


def keep_data(fingerprints: Mapping[str, str], run_dir: Path) -> None:
    """Writes `data.json`, by which a continued run is told apart from one on other data; warns if they are others.

    Args:
        fingerprints: of the sources by name, see `TrainingSet.fingerprints`.
        run_dir: a run that is described.
    """
    path = run_dir / DATA_FILE
    before = schema.read(path, schema.map_of(schema.text)) if path.is_file() else None
    if before is not None and complete_steps(run_dir / CHECKPOINTS_DIR):
        changed = sorted(name for name in {*before, *fingerprints} if before.get(name) != fingerprints.get(name))
        if changed:
            sources = f" ({', '.join(changed)})" if any(changed) else ""  # a source that is no mixture has no name
            warnings.warn(
                f"{run_dir} continues on other data than it had{sources}: its best score and what follows from it are of both. For "
                "a run on the new data alone, take another run_dir.",
                stacklevel=3,
            )
    if distributed.is_first() and before != fingerprints:
        write_json(path, dict(fingerprints))


def changes(recipe: Any, run_dir: Path, gin: str = "") -> list[str]:
    """The settings that differ from the existing run's, as "setting = value" with the new value.

    Args:
        recipe: the recipe of the continued run.
        run_dir: the run; one of version 0.1 has no `recipe.json`, so its `config.gin` is held against `gin`.
        gin: the recipe as a gin file.
    """
    described = read_recipe_file(run_dir)
    if described is not None:
        before, here = _flat(described), _flat(to_json(recipe))
        changed = [f"{path} = {value!r}" for path, value in here.items() if _was(before, path) != value]
        gone = [path for path in before if not any(_is_at(path, other) or _is_at(other, path) for other in here)]
        return changed + [f"{path} is not set" for path in gone]
    written = read_settings(run_dir)
    lines = {line.partition(" = ")[0]: line for line in gin.splitlines() if not line.startswith("#")}
    squeezed = {name: f"{name} = {value}".replace(" ", "") for name, value in written.items()}
    return [line for name, line in lines.items() if squeezed.get(name, line.replace(" ", "")) != line.replace(" ", "")]


def _was(before: dict[str, Any], path: str) -> Any:
    """The earlier value; a setting that the earlier recipe did not know, of a later version for example, was None."""
    return before.get(path, ... if any(_is_at(other, path) for other in before) else None)


def _is_at(path: str, other: str) -> bool:
    """Whether a path is another one or below it."""
    return f"{path}.".startswith(f"{other}.")


def _flat(found: Any, path: str = "") -> dict[str, Any]:
    """Each setting under its path, such as "optimization.num_steps"; where a function or class lives does not matter."""
    if isinstance(found, dict):
        if not found:
            return {path: None}
        return {key: value for name, entry in found.items() for key, value in _flat(entry, f"{path}.{name}".lstrip(".")).items()}
    is_place = path.rpartition(".")[2] in ("type", "function") and isinstance(found, str)
    return {path: found.rpartition(".")[2] if is_place else found}


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
