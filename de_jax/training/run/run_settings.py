"""The settings, versions and devices that a run was trained with, and the models that its parameters come from."""

from __future__ import annotations

import platform
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from de_jax import __version__
from de_jax.files import addresses, outputs, reading
from de_jax.settings import Count, Record, list_of, map_of
from de_jax.training.run.run_folder import ORIGIN_FILE, RECIPE_FILE, RUN

_CLOSURE, _OPENS = "pretrained_tokenizer.<locals>.tokenizer", "de_jax.interop.fine_tuning.tokenizer_of"
"""The place of a model's tokenizer, before and now."""
ENVIRONMENT_FILE = "environment.json"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
_RECORDS = list_of(Record({"from_step": Count}))


def read_recipe_file(run_dir: str | Path) -> dict[str, Any] | None:
    """The recipe of a run, as `recipe_file.to_json` gives it; None for a folder without one, such as an imported model.

    Raises:
        InputError: recipe.json is damaged.
    """
    path = Path(run_dir) / RECIPE_FILE
    found: dict[str, Any] | None = reading.read_json(path, map_of(Any)) if path.is_file() else None
    return found and _of_today(found)


def origins(run_dir: str | Path) -> list[str]:
    """The models that a run's first parameters are from, runs in between passed through; none for random parameters.

    Raises:
        InputError: a description that is damaged.
    """
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


def _of_today(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe with the names that its settings have now."""
    start, data = recipe.get("initialization") or {}, recipe.get("data") or {}
    for source in (data.get("sources") or {"": data}).values():
        source.pop("share", None)
        options = source.get("options") or {}
        if "num_for_both" in source:
            options["num_for_both"] = source.pop("num_for_both")
        for name, tower in (("tokenizer", "query"), ("doc_tokenizer", "doc")):
            if str((options.get(name) or {}).get("function") if isinstance(options.get(name), dict) else "").endswith(_CLOSURE):
                init_from = start.get("init_from")
                model = init_from.get(tower) if isinstance(init_from, dict) else init_from
                options[name] = {"function": _OPENS, "source": model, "tower": tower}
    return recipe


def environment() -> dict[str, Any]:
    """What decides the bits of an update beside the settings: versions, devices and the number of processes."""
    versions = {name: metadata.version(name) for name in _PACKAGES}
    return {
        "de_jax": __version__,
        "python": platform.python_version(),
        **versions,
        "device": jax.devices()[0].device_kind,
        "num_devices": jax.device_count(),
        "num_processes": jax.process_count(),
        "machine": platform.machine(),
    }


def environments(run_dir: Path, step: int | None = None) -> list[dict[str, Any]]:
    """The environments of a run up to a step, each with the step `from_step` that it began at; none for runs of before 0.2.

    Raises:
        InputError: `environment.json` is damaged.
    """
    path = run_dir / ENVIRONMENT_FILE
    found: list[dict[str, Any]] = reading.read_json(path, _RECORDS) if path.is_file() else []
    return [one for one in found if step is None or one["from_step"] <= step]


def keep_environment(run_dir: Path, start_step: int, before: dict[str, Any] | None) -> None:
    """Adds the environment of a start to `environment.json`; warns if it differs from that of the checkpoint continued from."""
    here = environment()
    changed = [f"{name} {before.get(name)} is now {value}" for name, value in here.items() if before and before.get(name) != value]
    if changed:
        warnings.warn(f"{run_dir} continues elsewhere ({', '.join(changed)}), so its bits may differ from then on.", stacklevel=2)
    there = environments(run_dir)
    records = [one for one in there if one["from_step"] < start_step]
    if not records or {**records[-1], **here} != records[-1]:
        records.append({"from_step": start_step, **here})
    if records != there:
        outputs.write_json(run_dir / ENVIRONMENT_FILE, records)


def trained_with(records: list[dict[str, Any]]) -> str:
    """The environments in words: "de_jax 0.2.0, Python 3.11.7, jax 0.10.2 on 1 x cpu"."""
    told = (
        f"de_jax {one['de_jax']}, Python {one['python']}, jax {one['jax']} on {one['num_devices']} x {one['device']}"
        for one in records
    )
    return "; then ".join(dict.fromkeys(told))
