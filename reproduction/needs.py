"""Needs of the papers' runs beside their recipes: data, pretrained models and earlier runs, and which of them are missing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from de_jax import gin_settings
from de_jax.gin_settings import RECIPES_DIR, Setting
from de_jax.settings import Check, Count, Maybe, Record, list_of, map_of, relative, some_text
from de_jax.types import InputError
from reproduction import tables
from reproduction.yaml_files import read_yaml

RECIPES = "recipes/paper/"
RUNS = "runs/"
_NAMED = re.compile(r"\{(\w+)\}")


class Source(NamedTuple):
    """A data set or a pretrained model."""

    name: str
    what: str
    put: Path  # its folder
    files: tuple[str, ...]  # patterns below it; each must match a file
    origin: str  # where to get it; "" if `make` derives it from others
    make: tuple[str, ...]  # command lines
    needs: tuple[str, ...] = ()  # data sets that these read
    sizes: str = ""  # of a model, as a config.json; "" for a published run
    docs: int = 0  # of a corpus
    queries: int = 0  # to train on

    @property
    def missing_files(self) -> list[str]:
        return [pattern for pattern in self.files if not any(self.put.glob(pattern))]


class Training(NamedTuple):
    """The data of a run, and the settings that go with them."""

    data: tuple[str, ...]
    settings: tuple[str, ...]
    stand_ins: Mapping[str, str]  # data, by the paths that recipes name


class Run(NamedTuple):
    """A training run: a recipe, the name of its `Training`, and a seed. All papers share their runs."""

    recipe: str  # under recipes/paper, without .gin
    training: str
    seed: int

    @property
    def folder(self) -> str:
        return f"{self.recipe}-{self.training}-seed{self.seed}"


class Needs(NamedTuple):
    """The needs of a run, and the command line that trains it."""

    sources: tuple[Source, ...]
    first: tuple[Run, ...]  # whose parameters it starts from
    gin_file: str
    bindings: tuple[str, ...]  # of gin, NAME=VALUE

    @property
    def arguments(self) -> list[str]:
        """The flags of `de-jax train`, except --run_dir."""
        return [f"--gin_file={self.gin_file}", *(f"--gin.{one}" for one in self.bindings)]


class Sources:
    """Data, pretrained models and trainings of sources.yaml, below one folder.

    Args:
        data_dir: holds data and models, each in its own `put`.
        runs_dir: gets the runs.

    Raises:
        InputError: sources.yaml is malformed.
    """

    def __init__(self, data_dir: str | Path, runs_dir: str | Path) -> None:
        self._bound: dict[str, gin_settings.Settings] = {}
        self._path = tables.TABLES_DIR / f"{tables.SOURCES}.yaml"
        found = read_yaml(self._path, _SOURCES)
        self.data_dir, self._runs_dir, self._first_on = Path(data_dir), Path(runs_dir), found["first_on"]
        self._put = {name: self.data_dir / one["put"] for name, one in found["data"].items()}
        self.data = {name: self._source(name, one, self._put[name]) for name, one in found["data"].items()}
        self.weights = {name: self._model(name, one) for name, one in found["weights"].items()}
        self.trainings = {
            name: Training(tuple(one["data"]), tuple(one["settings"]), one["stand_ins"]) for name, one in found["trainings"].items()
        }

    def filled(self, text: str) -> str:
        """A text in which each {name} of a data set is replaced by its folder."""
        places = {name: str(path) for name, path in self._put.items()} | {"data_dir": str(self.data_dir)}
        return _NAMED.sub(lambda match: places.get(match[1], match[0]), text)

    def run_dir(self, run: Run) -> Path:
        """The folder of a run."""
        return self._runs_dir / run.folder

    def of_data(self, names: Iterable[str]) -> list[Source]:
        """Data sets by name, each after what makes it if it is missing.

        Raises:
            InputError: sources.yaml lacks a name.
        """
        found: list[Source] = []
        for name in names:
            if name not in self.data:
                raise InputError(f"{self._path} describes no data called {name!r}.")
            source = self.data[name]
            found += [*(self.of_data(source.needs) if source.missing_files else ()), source]
        return found

    def needs_of(self, run: Run) -> Needs:
        """The needs of a run, from its recipe's own settings. Opens no model, and works while data and models are missing.

        A recipe that mines during training mines in the training process, at every checkpoint unless it sets `mine_every_steps`.

        Raises:
            InputError: an unknown recipe or training.
        """
        if run.training not in self.trainings:
            raise InputError(f"{self._path} describes no training called {run.training!r}.")
        training = self.trainings[run.training]
        gin_file = f"{RECIPES}{run.recipe}.gin"
        if gin_file not in self._bound:
            self._bound[gin_file] = gin_settings.read([gin_file])
        bound = self._bound[gin_file]
        sources = self.of_data(training.data)
        bindings = [
            *(self.filled(one) for one in training.settings),
            f"Initialization.seed={run.seed}",
            f"PairsOptions.seed={run.seed}",
        ]
        first: list[Run] = []
        for setting, (value, *_) in bound.items():
            for text in (part for part in gin_settings.values_in(value) if isinstance(part, str)):
                if text in training.stand_ins:
                    *needed, source = self.of_data([training.stand_ins[text]])
                    sources += needed
                elif text in self.weights:
                    source = self.weights[text]
                elif text.startswith(RUNS) and _is_recipe(recipe := text.removeprefix(RUNS)):
                    first.append(Run(recipe, self._first_on.get(recipe, run.training), run.seed))
                    bindings.append(f"{setting}={self.run_dir(first[-1])}")
                    continue
                else:
                    continue
                sources.append(source)
                bindings.append(f"{setting}={source.put}")
        save_every = _value(bound, Setting("", "Logging", "save_every_steps"))
        if (
            Setting("", "HardNegatives", "miner") in bound
            and save_every
            and Setting("", "HardNegatives", "mine_every_steps") not in bound
        ):
            bindings.append(f"HardNegatives.mine_every_steps={save_every}")
        return Needs(tuple(dict.fromkeys(sources)), tuple(dict.fromkeys(first)), gin_file, tuple(bindings))

    def _source(self, name: str, found: Mapping[str, Any], put: Path) -> Source:
        make = [self.filled(line.replace("{put}", str(put))) for line in found["make"]]
        sizes = json.dumps(found["sizes"]) if "sizes" in found else ""
        counts = {name: found.get(name, 0) for name in ("docs", "queries")}
        return Source(
            name, found["what"], put, tuple(found["files"]), found["from"], tuple(make), tuple(found["needs"]), sizes, **counts
        )

    def _model(self, name: str, found: Mapping[str, Any]) -> Source:
        origin = found["from"] or f"https://huggingface.co/{name}"
        what = "pretrained model; where there is a pickle alone, docs/checkpoints.md converts it"
        return self._source(name, {**found, "what": what, "from": origin}, self.data_dir / "models" / name)


def _value(bound: gin_settings.Settings, setting: Setting) -> Any:
    """The value of a setting, also through a macro; None if it is unbound."""
    value = bound[setting].value if setting in bound else None
    return _value(bound, Setting("", value.name)) if isinstance(value, gin_settings.Macro) else value


def _is_recipe(name: str) -> bool:
    return (RECIPES_DIR / RECIPES / f"{name}.gin").is_file()


_TEXTS, _FILES = list_of(some_text), list_of(some_text, least=1)
_LINES = Maybe(_TEXTS, ())
_DATA: dict[str, Check | Maybe] = {
    "what": some_text,
    "from": Maybe(some_text, ""),
    "put": relative,
    "files": _FILES,
    **dict.fromkeys(("make", "needs"), _LINES),
    **dict.fromkeys(("docs", "queries"), Maybe(Count, 0)),
}
_MODEL: dict[str, Check | Maybe] = {
    "from": Maybe(some_text, ""),
    "files": Maybe(_FILES, ("config.json", "*.safetensors", "tokenizer.json")),
    **dict.fromkeys(("make", "needs"), _LINES),
    "sizes": Maybe(map_of(Any)),
}
_TRAINING: dict[str, Check | Maybe] = {
    **dict.fromkeys(("data", "settings"), _LINES),
    "stand_ins": Maybe(map_of(some_text), {}),
}
_SOURCES = Record(
    {
        "data": map_of(Record(_DATA, only=True)),
        "weights": map_of(Record(_MODEL, only=True)),
        "trainings": map_of(Record(_TRAINING, only=True)),
        "first_on": Maybe(map_of(some_text), {}),
    },
    only=True,
)
