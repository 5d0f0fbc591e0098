"""Runs a registered design: trains its arms, chooses settings for each on dev, scores the test splits once, tests by pairs.

python -m experiments.run_design --design=experiments/samtone.yaml --data_dir=../shared/data/beir --out_dir=runs/samtone

Every step is a command of this library, printed to stderr, so that each can be repeated by hand. With ``--in_process`` they run in
one process, which saves the start of each, more than half of a run of seconds. Finished steps are not repeated:
after a stop, the same command continues. The folder is bound to the design, and refuses another one. A test split is scored only
when every run is trained.

A design is a yaml file. Its fields `question`, `success` and `cost` are for readers, and `paper`, `table`, `commands`, `needs` and
`results` for `python -m reproduction --scale small`. The others are

    prepare:          # the first commands, by name; a command with $set or $dataset_dir runs for every set
      t5: reproduction.pretrain --gin_file=reproduction/recipes/pretrain_t5.gin --run_dir=$out/t5 ...
    sets:             # data sets to train on and score; `settings` apply to all runs of a set
      squad: {dataset_dir: $data/squad-sentence-nqg, settings: {}, elsewhere: [$data/xquad-en-sentence]}
    grid: {rate: [1e-4, 3e-4], temperature: [.05]}  # each arm gets its best values on dev
    choose: {set: squad, split: dev, seed: 9, measure: ndcg@10}
    seeds: [0, 1, 2, 3, 4]
    start: $out/t5/encoder  # the MODEL of the first stage; without it, that stage begins with random parameters
    settings: {Optimization.learning_rate: $rate, Initialization.seed: $seed}  # of every stage
    factors: {query: {Recipe.loss: "@samtone", samtone.same_tower: query}}  # groups of settings by name
    arms:
      warm: {stages: [{recipe: recipes/rand_neg.gin, settings: {Optimization.num_steps: 300}}]}
      both: {start: warm, grid: {rate: [1e-4]}, stages: [{recipe: recipes/fine_tune.gin, use: [query]}]}
      # `then` runs after each run of the arm; in arms that start from it, $start is its run folder
      mined: {stages: [...], then: [mine pairs --run_dir=$run_dir --dataset_dir=$dataset_dir --seed=$seed]}
    evaluate: [--expand_as=views]  # flags of evaluate beir; an arm's replace them
    after: [analyse embeddings --run_dir=$run_dir --dataset_dir=$dataset_dir]  # of every run; kept in <out_dir>/after
    measure: nDCG@10
    compare: [{beside: warm, arms: [both]}]

An arm that starts from another one takes that arm's run of the same set and seed, with the settings chosen for it. In all texts
$data, $out, $set, $dataset_dir, $seed, $start and the names of the grid are replaced by their values. For every set, the report has
each arm's scores by seed, their means, the last losses, the collapses that its logs show, and the `de-jax compare runs` of each
comparison. <out_dir>/scores/<set>.npz has the measure of every arm by seed and query, to be kept beside results/.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import statistics
import string
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from de_jax import command
from de_jax.data.text import beir
from de_jax.evaluation import metrics
from de_jax.evaluation.report import kept_ranking
from de_jax.files import outputs
from de_jax.settings import Maybe, Mismatch, Record, list_of, map_of, some_text
from de_jax.training.hooks.collapse import CollapseAlarm, diagnoses
from de_jax.training.run import run_log
from de_jax.types import InputError
from experiments import processes
from reproduction import designs
from reproduction.verbs import VERBS
from reproduction.yaml_files import read_yaml


def _words(line: str) -> str:
    """The command of a line, as the name of a file."""
    return "_".join(word for word in line.split()[:2] if not word.startswith("-"))


def _written(value: Any) -> str:
    """A text, or a number as it is written."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise Mismatch(value, "a text or a number")
    return str(value)


_TEXTS = Maybe(list_of(str), [])
_SETTINGS = Maybe(map_of(Any), {})
_GRID = map_of(list_of(_written, least=1))
_SET = {"dataset_dir": some_text, "settings": _SETTINGS, "elsewhere": _TEXTS}
_STAGE = {"recipe": some_text, "use": _TEXTS, "settings": _SETTINGS}
_ARM = {
    "start": Maybe(str, ""),
    "grid": Maybe(_GRID, {}),
    "stages": list_of(Record(_STAGE, only=True), least=1),
    "then": _TEXTS,
    "evaluate": Maybe(list_of(str), None),
}
DESIGN = Record(
    {
        **dict.fromkeys(("question", "success", "cost", "measure"), some_text),
        **designs.FIELDS,
        "prepare": Maybe(map_of(some_text), {}),
        "sets": map_of(Record(_SET, only=True), least=1),
        "grid": _GRID,
        "choose": Record(dict.fromkeys(("set", "split", "seed", "measure"), _written), only=True),
        "seeds": list_of(_written, least=1),
        "start": Maybe(str, ""),
        "settings": _SETTINGS,
        "factors": Maybe(map_of(map_of(Any)), {}),
        "arms": map_of(Record(_ARM, only=True), least=1),
        "evaluate": _TEXTS,
        "after": _TEXTS,
        "compare": list_of(Record({"beside": some_text, "arms": list_of(str)}, only=True)),
    },
    only=True,
)


class Cell(NamedTuple):
    """One run of an arm."""

    set: str
    arm: str
    chosen: tuple[str, ...]  # of each name of the arm's grid
    seed: str

    @property
    def name(self) -> str:
        return "-".join([self.set, self.arm, *self.chosen, self.seed])


def main(argv: list[str] | None = None) -> None:
    """The command; prints the report as a JSON object."""
    args = _parse_args(argv)
    design = read(args.design)
    experiment = Experiment(design, args.data_dir, args.out_dir, in_process=args.in_process)
    if args.dry_run:
        print(json.dumps({"num_runs": experiment.num_runs(), "trained": len(list(args.out_dir.glob("cells/*.json")))}))
        return
    experiment.register(args.design, args.settings)
    experiment.prepare()
    experiment.choose()
    report = {"design": args.design.name, "chosen": experiment.chosen, "sets": experiment.scored()}
    outputs.write_json(args.out_dir / "report.json", report)
    print(json.dumps(report))


def read(path: Path) -> dict[str, Any]:
    """A design.

    Raises:
        InputError: malformed yaml, a missing field, an unknown arm, set or factor, or an arm before the arm that it starts from.
    """
    design: dict[str, Any] = read_yaml(path, DESIGN, mend="see experiments/run_design.py")
    arms = list(design["arms"])
    used = [name for arm in design["arms"].values() for stage in arm["stages"] for name in stage["use"]]
    compared = [name for one in design["compare"] for name in (one["beside"], *one["arms"])]
    for place, names, known in (
        ("use", used, design["factors"]),
        ("compare", compared, arms),
        ("choose", [design["choose"]["set"]], design["sets"]),
    ):
        if unknown := [name for name in names if name not in known]:
            raise InputError(f"{path}: {place} has {unknown[0]!r}, but there are {', '.join(known)}.")
    for name, one in design["sets"].items():
        folders = [Path(folder).name for folder in (one["dataset_dir"], *one["elsewhere"])]
        if len(set(folders)) < len(folders):
            raise InputError(f"{path}: the set {name} is scored on two folders of one name, {', '.join(folders)}; rename one.")
    for place, arm in enumerate(arms):
        if design["arms"][arm]["start"] in arms[place:]:
            raise InputError(f"{path}: {arm} starts from {design['arms'][arm]['start']}, which must stand before it.")
    return design


class Experiment:
    """A design in a folder.

    Attributes:
        chosen: by arm, the values of its grid that scored best on dev; `choose` fills it.
    """

    def __init__(self, design: dict[str, Any], data_dir: Path, out_dir: Path, *, in_process: bool = False) -> None:
        self.chosen: dict[str, dict[str, str]] = {}
        self._design, self._out_dir = design, out_dir
        self._command = processes.run_here if in_process else processes.run
        self._known = {"data": str(data_dir), "out": str(out_dir)}
        self._dirs = {name: self._filled(one["dataset_dir"]) for name, one in design["sets"].items()}
        self._more: dict[str, str] = {}

    def num_runs(self) -> int:
        """The number of all runs, including the runs that choose settings."""
        arms = self._design["arms"]
        return sum(len(self._trials(arm)) for arm in arms) + len(arms) * len(self._dirs) * len(self._design["seeds"])

    def register(self, path: Path, more: list[str]) -> None:
        """Writes the design to the folder, or checks that the folder already holds the same design.

        Args:
            path: of the design.
            more: settings of every stage beside the design's, to try the design out.

        Raises:
            InputError: the folder was begun with another design.
        """
        kept = self._out_dir / "registered.json"
        record = {"design": path.read_text(encoding="utf-8"), "settings": more, "data_dir": self._known["data"]}
        if kept.is_file() and outputs.read_json(kept) != record:
            raise InputError(f"{self._out_dir} was begun with another design, other settings or other data; take another out_dir.")
        outputs.write_json(kept, record)
        self._more = dict(setting.split("=", 1) for setting in more)

    def prepare(self) -> None:
        """Runs the commands that come first."""
        for name, line in self._design["prepare"].items():
            is_of_sets = {"set", "dataset_dir"} & set(string.Template(line).get_identifiers())
            for of_set in self._dirs if is_of_sets else [""]:
                kept = f"prepared/{name}-{of_set}" if of_set else f"prepared/{name}"
                self._once(kept, lambda: self._run(line, self._of_set(of_set)))  # noqa: B023  # called at once

    def choose(self) -> None:
        """Fills `chosen`."""
        of, arms = self._design["choose"], self._design["arms"]
        for arm in arms:
            grid = self._grid(arm)
            scores = {}
            for cell in self._trials(arm):
                report = self._once(f"dev/{cell.name}", lambda: self._evaluated(cell, self._dirs[cell.set], of["split"]))  # noqa: B023
                scores[cell.chosen] = report["dense"][of["measure"]]
            best = max(scores, key=scores.__getitem__) if scores else next(itertools.product(*grid.values()))
            self.chosen[arm] = dict(zip(grid, best, strict=True))

    def trained(self, cell: Cell) -> dict[str, Any]:
        """The run folder, loss and collapses of a cell's last stage, which is trained at the first call."""
        return self._once(f"cells/{cell.name}", lambda: self._train(cell))

    def stages(self, cell: Cell) -> Iterator[tuple[str, Path, dict[str, str]]]:
        """The recipe, the run folder and the settings of each stage of a cell."""
        design, arm = self._design, self._design["arms"][cell.arm]
        start = arm["start"] or design["start"]
        if start in design["arms"]:
            start = str(self._run_dir(cell._replace(arm=start, chosen=tuple(self.chosen[start].values()))))
        for number, stage in enumerate(arm["stages"], start=1):
            known = {**self._of_set(cell.set), **dict(zip(self._grid(cell.arm), cell.chosen, strict=True))}
            known |= {"seed": cell.seed, "start": start}
            settings = {**design["settings"], **design["sets"][cell.set]["settings"]}
            for name in stage["use"]:
                settings |= design["factors"][name]
            settings |= {**stage["settings"], **({"MODEL": start} if start else {}), **self._more}
            folder = self._run_dir(cell)
            folder = folder if number == len(arm["stages"]) else folder.with_name(f"{folder.name}-stage{number}")
            filled = {name: self._filled(_gin(value), **known) for name, value in settings.items()}
            yield stage["recipe"], folder, filled
            start = str(folder)

    def scored(self) -> dict[str, Any]:
        """By the name of each data set the arms' test scores by seed, and the comparisons; all runs are trained first."""
        design = self._design
        cells = [
            Cell(of_set, arm, tuple(self.chosen[arm].values()), seed)
            for seed, of_set, arm in itertools.product(design["seeds"], self._dirs, design["arms"])
        ]
        for cell in cells:
            self.trained(cell)
        found = {}
        for of_set, folder in self._dirs.items():
            for number, where in enumerate([folder, *map(self._filled, design["sets"][of_set]["elsewhere"])]):
                own = [cell for cell in cells if cell.set == of_set]
                found[f"{of_set}, scored on {Path(where).name}" if number else of_set] = self._of_one_set(where, own)
        for cell, line in itertools.product(cells, design["after"]):
            known = {**self._of_set(cell.set), "run_dir": str(self._run_dir(cell))}
            self._once(f"after/{cell.name}-{_words(line)}", lambda: self._run(line, known))  # noqa: B023
        return found

    def _of_one_set(self, dataset_dir: str, cells: list[Cell]) -> dict[str, Any]:
        reports = {cell: self._tested(cell, dataset_dir) for cell in cells}
        arms: dict[str, Any] = {}
        for cell, report in reports.items():
            arm, trained = arms.setdefault(cell.arm, {"scores": [], "loss": [], "collapsed": []}), self.trained(cell)
            for kept, value in zip(arm.values(), (report["dense"], trained["loss"], trained["collapsed"]), strict=True):
                kept.append(value)
        for arm in arms.values():
            arm["mean"] = {name: statistics.fmean(one[name] for one in arm["scores"]) for name in arm["scores"][0]}
        folders = {arm: ",".join(reports[cell]["evaluation_dir"] for cell in cells if cell.arm == arm) for arm in arms}
        compared = []
        for number, one in enumerate(self._design["compare"]):
            named = [f"{arm}={folders[arm]}" for arm in (one["beside"], *one["arms"])]
            flags = [f"--qrels={beir.find_qrels(dataset_dir, 'test')}", f"--measure={self._design['measure']}"]
            line = ["de_jax", "compare", "runs", *flags, "--systems", *named]
            kept = f"compared/{cells[0].set}-{Path(dataset_dir).name}-{number}"
            compared.append(self._once(kept, lambda: self._command(line)))  # noqa: B023  # called at once
        self._keep_scores(dataset_dir, cells, reports)
        return {"arms": arms, "compared": compared}

    def _keep_scores(self, dataset_dir: str, cells: list[Cell], reports: Mapping[Cell, Mapping[str, Any]]) -> None:
        """The measure by arm, float32 [seeds, queries], with the ids of the queries as `query_ids`; kept once, as all results."""
        kept = self._out_dir / "scores" / f"{cells[0].set}-{Path(dataset_dir).name}.npz"
        if kept.is_file():
            return
        judged, measure = beir.read_qrels(beir.find_qrels(dataset_dir, "test")), self._design["measure"]
        scores: dict[str, list[Mapping[str, float]]] = {}
        for cell in cells:
            ranking = kept_ranking(reports[cell]["evaluation_dir"])
            scores.setdefault(cell.arm, []).append(metrics.scores_by_query(ranking, judged, measure))
        query_ids = list(scores[cells[0].arm][0])
        rows = {arm: np.float32([[one[query] for query in query_ids] for one in seeds]) for arm, seeds in scores.items()}
        outputs.make_folder(kept.parent)
        with outputs.atomic_file(kept) as temporary, open(temporary, "wb") as file:
            np.savez_compressed(file, query_ids=np.array(query_ids), **rows)

    def _train(self, cell: Cell) -> dict[str, Any]:
        for recipe, folder, settings in self.stages(cell):
            gin = [f"--gin.{name}={value}" for name, value in settings.items()]
            summary = self._command(["de_jax", "train", f"--gin_file={recipe}", f"--run_dir={folder}", *gin])
        known = {**self._of_set(cell.set), "seed": cell.seed, "run_dir": str(folder)}
        for line in self._design["arms"][cell.arm]["then"]:
            self._run(line, known)
        lines = [line for line in run_log.read_metrics(folder / run_log.METRICS_FILE) if "loss" in line]
        collapsed = list(diagnoses(CollapseAlarm(), lines[-1], lines[0])) if "query_variance" in lines[-1] else None
        return {"run_dir": str(folder), "seconds": summary["seconds"], "loss": lines[-1]["loss"], "collapsed": collapsed}

    def _evaluated(self, cell: Cell, dataset_dir: str, split: str) -> dict[str, Any]:
        flags = self._design["arms"][cell.arm]["evaluate"]
        flags = [self._filled(flag, **self._of_set(cell.set)) for flag in (self._design["evaluate"] if flags is None else flags)]
        run = [f"--run_dir={self.trained(cell)['run_dir']}", f"--dataset_dir={dataset_dir}", f"--split={split}"]
        return self._command(["de_jax", "evaluate", "beir", *run, "--no_bm25", "--skip_empty", *flags])

    def _tested(self, cell: Cell, dataset_dir: str) -> dict[str, Any]:
        return self._once(f"test/{cell.name}-{Path(dataset_dir).name}", lambda: self._evaluated(cell, dataset_dir, "test"))

    def _trials(self, arm: str) -> list[Cell]:
        """The cells that choose an arm's settings; empty for an arm without a choice from which no other arm starts."""
        choose, choices = self._design["choose"], list(itertools.product(*self._grid(arm).values()))
        is_start = any(other["start"] == arm for other in self._design["arms"].values())
        return [Cell(choose["set"], arm, one, choose["seed"]) for one in choices] if len(choices) > 1 or is_start else []

    def _grid(self, arm: str) -> dict[str, list[str]]:
        return {**self._design["grid"], **self._design["arms"][arm]["grid"]}

    def _run_dir(self, cell: Cell) -> Path:
        return self._out_dir / "runs" / cell.name

    def _of_set(self, name: str) -> dict[str, str]:
        return {"set": name, "dataset_dir": self._dirs[name]} if name else {}

    def _run(self, line: str, known: Mapping[str, str]) -> dict[str, Any]:
        """A command of this library, or a program of this folder or of reproduction/."""
        arguments = shlex.split(self._filled(line, **known))
        if arguments[0].startswith(("experiments.", "reproduction.")):
            return self._command(arguments)
        return self._command(["reproduction" if " ".join(arguments[:2]) in VERBS else "de_jax", *arguments])

    def _once(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of `make`, which runs at the first call only; later calls read the kept file."""
        kept = self._out_dir / f"{name}.json"
        if not kept.is_file():
            outputs.write_json(kept, make())
        found: dict[str, Any] = outputs.read_json(kept)
        return found

    def _filled(self, text: str, **more: str) -> str:
        return string.Template(text).safe_substitute({**self._known, **more})


def _gin(value: Any) -> str:
    """A value of yaml as gin writes it; a list is a tuple."""
    return str(tuple(value) if isinstance(value, list) else value)


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--design", type=Path, required=True, help="a yaml file, such as experiments/samtone.yaml")
    parser.add_argument("--data_dir", type=Path, required=True, help="holds the BEIR folders")
    parser.add_argument("--out_dir", type=Path, required=True, help="gets the runs, the scores and report.json")
    parser.add_argument("--settings", nargs="+", default=[], metavar="NAME=VALUE", help="of every stage, to try a design out")
    parser.add_argument("--in_process", action="store_true", help="run the commands in this process, which suits short runs")
    parser.add_argument("--dry_run", action="store_true", help="count the runs and the trained runs")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
