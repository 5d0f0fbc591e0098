"""The settings that a run was trained with, and the models that its parameters come from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from de_jax.files import buckets, schema
from de_jax.files.reading import read_lines
from de_jax.training.run.run_folder import ORIGIN_FILE, RECIPE_FILE, RUN
from de_jax.types import InputError


def read_settings(run_dir: str | Path) -> dict[str, str]:
    """The settings of a run as its config.gin has them, by name, macros replaced; none where it was not trained here.

    A run that no gin file describes has them in recipe.json: there, a setting's name is that of its function or class.
    """
    path, described = Path(run_dir) / "config.gin", Path(run_dir) / RECIPE_FILE
    if not path.exists() and described.exists():
        return dict(_named_settings("train", read_recipe_file(run_dir) or {}))
    settings: dict[str, str] = {}
    name = ""
    for number, line in read_lines(path) if path.exists() else ():
        if line[:1].isspace():  # gin writes a long value in the lines below its name, indented
            if not name:
                raise InputError(f"{path}, line {number}: an indented line without a setting above it.")
            settings[name] = f"{settings[name]} {line.strip()}".strip()
        elif line.startswith(("#", "import ", "from ")):
            name = ""
        elif " =" in line:
            name, _, value = line.partition(" =")
            name = name.strip()
            settings[name] = value.strip().removesuffix("\\").strip()
        else:
            raise InputError(f"{path}, line {number}: neither a setting nor a comment.")
    return {name: settings.get(value.removeprefix("%"), value) if value[:1] == "%" else value for name, value in settings.items()}


def read_recipe_file(run_dir: str | Path) -> dict[str, Any] | None:
    """The recipe of a run, as `recipe_file.to_json` gives it; None for a run of version 0.1, which lacks it.

    Raises:
        InputError: recipe.json is damaged.
    """
    path = Path(run_dir) / RECIPE_FILE
    found: dict[str, Any] | None = schema.read(path, schema.map_of(lambda value: value)) if path.is_file() else None
    return found


def origins(run_dir: str | Path) -> list[str]:
    """The models that a run's first parameters are from, runs in between passed through; none for random parameters.

    Raises:
        InputError: a description that is damaged.
    """
    run_dir = buckets.path_of(str(run_dir)) if buckets.is_bucket(run_dir) else Path(run_dir)
    if not RUN.is_in(run_dir):
        return [buckets.address_of(run_dir) or str(run_dir)]
    found: list[str] = []
    if (run_dir / ORIGIN_FILE).is_file():
        found = schema.read(run_dir / ORIGIN_FILE, schema.record({"from": schema.texts}))["from"]
    elif (recipe := read_recipe_file(run_dir)) and isinstance(start := recipe.get("initialization"), dict):
        init_from = start.get("init_from")
        values = init_from.values() if isinstance(init_from, dict) else [init_from]
        found = [value for value in values if isinstance(value, str)]
    return list(dict.fromkeys(source for one in found for source in (origins(one) if Path(one) != run_dir else [])))


def _named_settings(name: str, settings: dict[str, Any]) -> Iterator[tuple[str, str]]:
    scope = f"{name.rpartition('/')[0]}/".lstrip("/")  # of a source of a mixture
    for key, value in settings.items():
        if part := _name_of(value):
            yield f"{name}.{key}", f"@{scope}{part}"
            yield from _named_settings(f"{scope}{part}", value)
        elif isinstance(value, dict) and value and all(map(_name_of, value.values())):
            sources = {source: f"{source}/{_name_of(one)}" for source, one in value.items()}
            yield f"{name}.{key}", "{" + ", ".join(f"{source!r}: @{part}" for source, part in sources.items()) + "}"
            for source, part in sources.items():
                yield from _named_settings(part, value[source])
        else:
            yield f"{name}.{key}", repr(value)


def _name_of(described: Any) -> str:
    """The name of a function or class that recipe.json describes; "" for a value."""
    place = (described.get("function") or described.get("type") or "") if isinstance(described, dict) else ""
    return str(place).rpartition(".")[2]
