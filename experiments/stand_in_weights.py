"""The papers' recipes, read in a folder that stands in for the weights, which cannot be had everywhere.

A recipe of `recipes/paper/` can be read in such a folder, dry-run and planned, but not trained; see `reproduction.stand_ins`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path

from de_jax.configurables import read_recipe
from de_jax.gin_settings import RECIPES_DIR
from de_jax.recipe import Recipe
from reproduction import stand_ins
from reproduction.needs import Sources

PAPERS = "recipes/paper/"


def rows() -> list[str]:
    """The names of all rows, such as "samtone/base_sde"."""
    folder = RECIPES_DIR / PAPERS
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.glob("*/*.gin"))


def write_models(folder: Path) -> None:
    """Writes a stand-in of each model under its own name."""
    models = Sources(folder, folder / "runs").weights
    stand_ins.write_models(model._replace(put=folder / name) for name, model in models.items())


def read_row(row: str, settings: Sequence[str] = ()) -> Recipe:
    """A row's recipe, with settings beside its own, in a working directory with the models; describes the runs that it starts from.

    Each of these runs has the name of the row that makes it.
    """
    text = (RECIPES_DIR / PAPERS / f"{row}.gin").read_text(encoding="utf-8")
    for run in re.findall(r'^MODEL = "runs/(.*)"', text, re.MULTILINE):
        if not Path("runs", run).exists():
            recipe = read_row(run)
            stand_ins.describe(Path("runs", run), recipe.model, recipe.options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*holds an encoder alone")
        return read_recipe([f"{PAPERS}{row}.gin"], settings)
