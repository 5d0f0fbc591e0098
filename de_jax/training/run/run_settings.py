"""The settings that a run was trained with, and the models that its parameters come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from de_jax.files import addresses, reading
from de_jax.settings import Record, list_of, map_of
from de_jax.training.run.run_folder import ORIGIN_FILE, RECIPE_FILE, RUN

_CLOSURE, _OPENS = "pretrained_tokenizer.<locals>.tokenizer", "de_jax.interop.fine_tuning.tokenizer_of"
"""The place of a model's tokenizer, before and now."""


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
