"""The saved form of a recipe, `recipe.json`: every setting by name, functions and classes by their place."""

import dataclasses
import functools
import importlib
import inspect
import math
import numbers
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from de_jax.files import addresses, reading
from de_jax.files.outputs import write_json
from de_jax.settings import ABSENT, Record, is_config, list_of, map_of, settings_of, with_values
from de_jax.training.mesh import distributed
from de_jax.training.run.run_folder import CHECKPOINTS_DIR, DATA_FILE, ORIGIN_FILE, RECIPE_FILE, RUN, complete_steps
from de_jax.types import InputError

MOST_ENTRIES = 1000
"""Of a list that is written out; a longer one is data, and its length stands for it."""
_PACKAGE = __name__.partition(".")[0]


def to_json(value: Any) -> Any:
    """A setting's value as JSON.

    A dataclass is {"type": "module.Name", field: value, ...}, a function {"function": "module.name", parameter: value, ...} with
    what `functools.partial` bound and the defaults of the rest, any other object {"type": "module.Name"}. Data stay out: of rows,
    as `table_pairs` takes them, and of long lists only the number is written.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return addresses.address_of(value) or value
    if isinstance(value, numbers.Integral):  # NumPy's too
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else str(float(value))  # JSON has no word for the others
    if isinstance(value, Mapping):
        return {str(key): to_json(entry) for key, entry in value.items()}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple) and (len(value) > MOST_ENTRIES or any(isinstance(entry, Mapping) for entry in value)):
        return {"type": _place(type(value)), "num_entries": len(value)}
    if isinstance(value, list | tuple):
        return [to_json(entry) for entry in value]
    is_function = isinstance(value, functools.partial) or inspect.isroutine(value) or inspect.isclass(value)
    known = settings_of(value).values() if is_function or is_config(value) else ()
    values = {one.name: to_json(one.value) for one in known if one.value is not ABSENT and one.name != "share"}
    return {"function" if is_function else "type": _place(value if is_function else type(value))} | values


def load(path: str | Path, *, allow_imports: bool = False, **given: Any) -> Any:
    """The recipe of a run; see `Recipe.load`."""
    path = Path(path) / RECIPE_FILE if Path(path).is_dir() else Path(path)
    found = read_recipe_file(path.parent) if path.name == RECIPE_FILE else reading.read_json(path, map_of(Any))
    if found is None:
        raise InputError(f"{path} does not exist; give the folder of a run, or a file of Recipe.save.")
    read = _Reader(str(path), allow_imports, (found.get("initialization") or found).get("seed"))
    return read.value({name: value for name, value in found.items() if name not in given}, "recipe", **given)


def read_recipe_file(run_dir: str | Path) -> dict[str, Any] | None:
    """The recipe of a run, as `recipe_file.to_json` gives it; None for a folder without one, such as an imported model."""
    path = Path(run_dir) / RECIPE_FILE
    return reading.read_json(path, map_of(Any)) if path.is_file() else None


def origins(run_dir: str | Path) -> list[str]:
    """The models that a run's first parameters are from, runs in between passed through; none for random parameters."""
    run_dir = addresses.path_of(str(run_dir)) if addresses.is_bucket(run_dir) else Path(run_dir)
    if not RUN.is_in(run_dir):
        return [addresses.address_of(run_dir) or str(run_dir)]
    found: list[str] = []
    if (run_dir / ORIGIN_FILE).is_file():
        found = reading.read_json(run_dir / ORIGIN_FILE, Record({"from": list_of(str)}))["from"]
    elif (recipe := read_recipe_file(run_dir)) and isinstance(start := recipe.get("initialization"), dict):
        init_from = start.get("init_from")
        values = init_from.values() if isinstance(init_from, dict) else [init_from]
        found = [value for value in values if isinstance(value, str)]
    return list(dict.fromkeys(source for one in found for source in (origins(one) if Path(one) != run_dir else [])))


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Makes values of JSON. A class must be a dataclass, and functions are not called, so that a file alone runs no code."""

    file: str
    allow_imports: bool
    seed: int | None  # of the run; a seed that is equal follows it

    def value(self, found: Any, name: str, /, **given: Any) -> Any:
        """The value of the setting called `name`; `given` are fields of a dataclass beside those found."""
        if isinstance(found, list):
            return tuple(self.value(entry, name) for entry in found)
        if found in ("inf", "-inf", "nan"):
            return float(found)
        place = (found.get("function") or found.get("type")) if isinstance(found, dict) else None
        if not isinstance(place, str) or "." not in place:
            return {key: self.value(entry, f"{name}.{key}") for key, entry in found.items()} if isinstance(found, dict) else found
        if "num_entries" in found:
            raise self._lost(name, f"{found['num_entries']} entries")
        target = self._at(place, name)
        values = {key: self.value(entry, f"{name}.{key}") for key, entry in found.items() if key not in ("function", "type")}
        known = settings_of(target)
        if "function" in found:
            bound = {key: value for key, value in values.items() if key not in known or to_json(value) != to_json(known[key].value)}
            return functools.partial(target, **bound) if bound else target
        if not dataclasses.is_dataclass(target):
            raise self._lost(name, f"an object of {place}")
        follows = "seed" in known and known["seed"].value is None and values.get("seed") == self.seed
        own = {key: value for key, value in values.items() if key in known and not (follows and key == "seed")}
        made: Any = target
        return made(**own, **given)

    def _at(self, place: str, name: str) -> Any:
        module, _, label = place.rpartition(".")
        if module.partition(".")[0] != _PACKAGE and not self.allow_imports:
            trust = "if you trust it, set allow_imports=True, --allow_imports in a command"
            raise InputError(f"{self.file}: {name} is {place}, code from outside {_PACKAGE}; {trust}.")
        try:
            return getattr(importlib.import_module(module), label)
        except (ImportError, AttributeError):
            raise self._lost(name, place) from None

    def _lost(self, name: str, what: str) -> InputError:
        part = name.split(".")[1] if "." in name else name
        return InputError(f"{self.file}: {name} was {what}, which a file does not hold; give {part}=... beside the folder.")


def keep(recipe: Any, run_dir: Path) -> None:
    """Writes `recipe.json`; warns if a continued run has other settings than this `Recipe`."""
    if changed := changes(recipe, run_dir):
        warnings.warn(f"{run_dir} continues with other settings than it had: {'; '.join(changed)}.", stacklevel=3)
    if distributed.is_first():
        write_json(run_dir / RECIPE_FILE, to_json(recipe))


def keep_data(fingerprints: Mapping[str, str], run_dir: Path) -> None:
    """Writes `TrainingSet.fingerprints` to `data.json`, by which a continued run is compared with its data; warns of others."""
    changed = _changed_data(fingerprints, run_dir)
    if changed and complete_steps(run_dir / CHECKPOINTS_DIR):
        warnings.warn(
            f"{run_dir} continues on {changed}: its best score and what follows from it are of both. For a run on the new data "
            "alone, take another run_dir.",
            stacklevel=3,
        )
    if distributed.is_first() and (changed or not (run_dir / DATA_FILE).is_file()):
        write_json(run_dir / DATA_FILE, dict(fingerprints))


def _changed_data(fingerprints: Mapping[str, str], run_dir: Path) -> str:
    """In words, that a run's data are other than in its `data.json`; "" if they are the same, or there is no such file."""
    path = run_dir / DATA_FILE
    before = reading.read_json(path, map_of(str)) if path.is_file() else fingerprints
    changed = sorted(name for name in {*before, *fingerprints} if before.get(name) != fingerprints.get(name))
    sources = f" ({', '.join(changed)})" if any(changed) else ""  # a source that is no mixture has no name
    return f"other data than it had{sources}" if changed else ""


def ended(recipe: Any, fingerprints: Mapping[str, str], run_dir: Path, step: int) -> str:
    """The sentence about a run that ended before, with what this call would have otherwise."""
    changed = [*changes(recipe, run_dir), *filter(None, [_changed_data(fingerprints, run_dir)])]
    other = f"; for {'; '.join(changed)}, take another run_dir" if changed else ""
    return f"{run_dir} already ended at step {step}; nothing was trained{other}."


def check_continues(recipe: Any, run_dir: Path) -> None:
    """Refuses to continue a run with another optimizer, whose state is another."""
    of_state = ("optimization.optimizer.function", "optimization.alternate")
    if not complete_steps(run_dir / CHECKPOINTS_DIR):
        return
    for change in changes(recipe, run_dir):
        if change.startswith(of_state):
            setting, parameters = change.replace("optimization", "Optimization", 1), f"Initialization.init_from={str(run_dir)!r}"
            raise InputError(
                f"{run_dir} cannot continue with {setting}: its optimizer state is that of the setting it had. Take another "
                f"run_dir, with {parameters} for its parameters."
            )


def changes(recipe: Any, run_dir: Path) -> list[str]:
    """The settings that differ from the existing run's, as "setting = value" with the new value."""
    before = read_recipe_file(run_dir)
    return [] if before is None else list(_differences(before, to_json(recipe), ""))


def _differences(before: Any, here: Any, path: str) -> Iterator[str]:
    """A setting that the earlier recipe did not know was empty; where a function or class lives does not matter."""
    if isinstance(before, dict) and isinstance(here, dict):
        for name in (name for name in dict.fromkeys((*here, *before)) if name in before or here[name]):
            yield from _differences(before.get(name), here.get(name, ...), f"{path}.{name}".lstrip("."))
    elif here is ...:
        if before:  # an empty setting may be one that there is no longer
            yield f"{path} is not set"
    elif path.rpartition(".")[2] in ("type", "function") and isinstance(before, str) and isinstance(here, str):
        if before.rpartition(".")[2] != here.rpartition(".")[2]:
            yield f"{path} = {here.rpartition('.')[2]!r}"
    elif before != here:
        place = (here.get("function") or here.get("type")) if isinstance(here, dict) else None
        yield f"{path} = {place.rpartition('.')[2] if place else repr(here)}"


def with_seeds(recipe: Any, run_dir: str | Path = "") -> Any:
    """The recipe with a value for every seed that it leaves open: that of the run in `run_dir`, else `Initialization.seed`."""
    before = read_recipe_file(run_dir) if run_dir else None
    return _seeded(recipe, getattr(recipe, "initialization", recipe).seed, before)


def _seeded(value: Any, seed: int, before: Any) -> Any:
    before = before if isinstance(before, dict) else {}
    if isinstance(value, Mapping):
        return {name: _seeded(entry, seed, before.get(name)) for name, entry in value.items()}
    if not (is_config(value) or isinstance(value, functools.partial) or inspect.isfunction(value)):
        return value
    own = {name: one.value for name, one in settings_of(value).items() if one.value is not ABSENT}
    new = {name: _seeded(entry, seed, before.get(name)) for name, entry in own.items()}
    if "seed" in own and own["seed"] is None:
        new["seed"] = seed if before.get("seed") is None else before["seed"]
    changed = {name: entry for name, entry in new.items() if entry is not own[name]}
    return with_values(value, **changed) if changed else value


def _place(value: Any) -> str:
    while isinstance(value, functools.partial):
        value = value.func
    return f"{value.__module__}.{value.__qualname__}"
