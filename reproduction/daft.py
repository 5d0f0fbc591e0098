"""`python -m reproduction train daft`: light query towers for a model."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from de_jax.configurables import read_recipe
from de_jax.data.text import beir
from de_jax.data.text.tokenizing import Side
from de_jax.evaluation import latency
from de_jax.evaluation.task import Policy, beir_task, evaluate
from de_jax.files import folders, outputs
from de_jax.flags import Bindings, rules
from de_jax.interop import any_model
from de_jax.interop.pretrained import Pretrained
from de_jax.reports import plots
from de_jax.settings import LocalPath, NonNegativeInt, PositiveFloat, PositiveInt, Seed
from de_jax.trainer import first_params, train
from de_jax.training.run.run_folder import BEST_DIR, Run, complete_steps, load_run, write_run
from de_jax.types import Dtype, InputError
from reproduction import daft_report

MAX_DRAWN = 300
QUERY_MODEL = "query_model"
RECIPES = {"aligned": "daft_stage1", "tuned": "daft_stage2", "at_once": "daft_one_stage"}
STAGES = (("at_once",), ("aligned", "tuned"))
"""Without alignment, and with it."""
OWN_PROJECTION = {
    **dict.fromkeys((f"pretrained_tower.projection_{what}" for what in ("dim", "bias", "init")), None),
    "Initialization.init_new": (),
}
"""Settings for a model trained with a projection: it keeps the projection. The paper's models start without."""


@dataclass(frozen=True)
class Towers:
    """The towers and their training.

    Attributes:
        query_model: cut query towers from this model instead, which may have another vocabulary.
        query_layers: numbers of query layers; one pair of towers each.
        which: choice of the model's layers.
        dataset_dir: a BEIR folder or a table; its dev split, if any, selects checkpoints.
        num_align_steps: most updates of the first stage; 0 skips it.
        num_steps: updates of the second stage.
        learning_rate: peak learning rate.
        batch_size: pairs; 48 in the paper.
        max_query_length: tokens.
        max_doc_length: tokens.
        dtype: type of matrix products; default the model's.
    """

    model: LocalPath
    query_layers: tuple[NonNegativeInt, ...]
    dataset_dir: LocalPath
    query_model: LocalPath | None = None
    which: Literal["first", "spread"] = "first"
    out_dir: Path = Path("runs/daft")
    num_align_steps: NonNegativeInt = 500
    num_steps: PositiveInt = 500
    learning_rate: PositiveFloat = 5e-5
    batch_size: PositiveInt = 48
    max_query_length: PositiveInt = 64
    max_doc_length: PositiveInt = 256
    dtype: Dtype | None = None
    skip_empty: bool = False
    keep_identical_ids: bool = False
    seed: Seed = 0


@dataclass(frozen=True)
class Gin:
    """Settings of the recipes: of both, of the first stage, of the second."""

    gin: Bindings = ()
    gin1: Bindings = ()
    gin2: Bindings = ()


@rules(beside={"num_align_steps=0": ("gin1",)})
def train_daft(towers: Towers, settings: Gin, *, test_split: str = "test", num_calls: PositiveInt = 200) -> dict[str, Any]:
    """Makes light query towers for a model with DAFT, and plots quality against speed.

    python -m reproduction train daft --model=all-MiniLM-L6-v2 --query_layers 1 2 3 --dataset_dir=data/beir/nfcorpus \\
        --out_dir=runs/daft

    The first stage aligns a query tower of some of the model's layers with the frozen document tower. The second stage trains both
    towers (Leonhardt et al.). The result for each number of layers is a run for search, export and evaluation:

    <out_dir>/model                    the original model; with --query_model also query_model, the source of the query towers
              2_layers/aligned         the first stage
              2_layers/tuned           the second stage: the pair of towers
              report.json              scores, latencies, collapses
              tradeoff.png             quality against milliseconds per query
              alignment.png            divergence during the first stage
              towers.png               the same queries by both towers, before, between and after the stages

    --gin.NAME=VALUE changes a setting of both recipes, --gin1.NAME=VALUE of recipes/daft_stage1.gin alone, and --gin2.NAME=VALUE of
    recipes/daft_stage2.gin alone. --num_align_steps=0 trains both towers in one stage with recipes/daft_one_stage.gin, in
    2_layers/at_once. Repeat the command to continue after a stop. Prints one JSON object, and a
    table to stderr.

    Args:
        test_split: split for the scores.
        num_calls: calls per latency.
    """
    plots.require()
    task = beir_task(towers.dataset_dir, test_split)  # fails here, before anything is trained
    queries = list(beir.read(towers.dataset_dir, test_split, skip_empty=towers.skip_empty).queries.texts)
    original, cut_from = (towers.out_dir / name for name in (daft_report.MODEL, QUERY_MODEL))
    if not original.exists():
        folders.require_replaceable(towers.out_dir, None)
        _import(towers, towers.model, original)
    if towers.query_model and not cut_from.exists():
        _import(towers, towers.query_model, cut_from)
    cut = load_run(cut_from if towers.query_model else original, only_sizes=True)
    chosen = {number: _layers(cut, number, towers.which) for number in towers.query_layers}
    pairs = {}
    for number, layers in chosen.items():
        name = daft_report.name_of(number)
        pairs[name] = _pair(towers, settings, layers, towers.out_dir / name, queries[:MAX_DRAWN])
    runs = {daft_report.MODEL: load_run(original), **{name: pair.run for name, pair in pairs.items()}}
    policy = Policy(bm25=False, skip_empty=towers.skip_empty, drop_identical_ids=not towers.keep_identical_ids)
    scores = {name: evaluate(task, policy, run)["dense"] for name, run in runs.items()}
    latencies = latency.measure(runs, queries, num_calls=num_calls)
    report = {
        "dataset": task.name,
        "split": test_split,
        "device": latency.device(),
        "systems": {
            name: {
                "run_dir": str(run.run_dir),
                "step": run.step,
                "scores": scores[name],
                "latency": [row._asdict() for row in latencies if row.name == name],
                **(daft_report.stages(pairs[name].folders) if name in pairs else {}),
            }
            for name, run in runs.items()
        },
    }
    daft_report.draw(towers.out_dir, report, {name: pair.panels for name, pair in pairs.items()})
    outputs.write_json(towers.out_dir / "report.json", report)
    print(daft_report.table(report), file=sys.stderr)
    return report


class _Pair(NamedTuple):
    """The result of training a pair of towers."""

    run: Run
    folders: list[Path]  # of its stages
    panels: dict[str, daft_report.BothTowers]  # some queries by both towers, before, between and after the stages


def _pair(towers: Towers, settings: Gin, layers: tuple[int, ...], folder: Path, queries: list[str]) -> _Pair:
    """Trains the stages, each from the previous stage, the first from the original model."""
    source = towers.out_dir / daft_report.MODEL
    runs: dict[str, Run] = {}
    for stage in STAGES[bool(towers.num_align_steps)]:
        recipe = read_recipe([f"recipes/{RECIPES[stage]}.gin"], _bindings(towers, source, settings, stage, layers))
        source = folder / stage
        train(recipe, source)
        if not runs:
            runs["before"] = load_run(source)._replace(params=first_params(recipe))
        runs[stage] = load_run(source, "best" if complete_steps(source / BEST_DIR) else None)
    panels = {stage.replace("_", " "): daft_report.by_both_towers(run, queries) for stage, run in runs.items()}
    return _Pair(runs[stage], [folder / stage for stage in runs if stage in RECIPES], panels)


def _import(towers: Towers, source: str, folder: Path) -> None:
    """Imports a model as a run, with the lengths of training and test."""
    pretrained: Pretrained = any_model.read(source)
    query, doc = pretrained.query.tokenizer, pretrained.doc.tokenizer
    if query is None or doc is None:
        raise InputError(f"{source} holds no vocabulary; import it with de-jax import model --tokenizer=<file>.")
    write_run(
        folder,
        pretrained.params,
        model=pretrained.model.with_dtype(towers.dtype),
        query=Side(query, towers.max_query_length),
        doc=Side(doc, towers.max_doc_length),
        origin=[source],
    )


def _layers(run: Run, number: int, which: str) -> tuple[int, ...]:
    """The first `number` of the query tower's layers, or as many evenly spread over all."""
    depth = run.model.query.encoder.num_layers  # type: ignore[attr-defined]
    if not 0 <= number <= depth:
        raise InputError(f"--query_layers has {number}, but the model has {depth} layer{'s' * (depth != 1)}; give 0 to {depth}.")
    return tuple(range(number)) if which == "first" else tuple(place * depth // number for place in range(number))


def _bindings(towers: Towers, model: Path, settings: Gin, stage: str, layers: tuple[int, ...]) -> list[str]:
    aligns = stage == "aligned"
    num_steps = towers.num_align_steps if aligns else towers.num_steps
    own: dict[str, Any] = {
        "MODEL": model,
        "Optimization.num_steps": num_steps,
        "Optimization.learning_rate": towers.learning_rate,
        "Logging.log_every_steps": 10,
        "Logging.save_every_steps": max(num_steps // 10, 1),
        "linear.warmup_steps": num_steps // 10,
        "beir_pairs.dataset_dir": towers.dataset_dir,
        "beir_pairs.skip_empty": towers.skip_empty,
        "PairsOptions.keep_identical_ids": towers.keep_identical_ids,
        "PairsOptions.batch_size": towers.batch_size,
        "PairsOptions.max_query_length": towers.max_query_length,
        "PairsOptions.max_doc_length": towers.max_doc_length,
        "Initialization.seed": towers.seed,
        "PairsOptions.seed": towers.seed,
    }
    if stage != "tuned":  # an aligned run's towers are as deep as they are
        own |= {"QUERY_LAYERS": layers}
        if towers.query_model:
            own |= {"QUERY_MODEL": towers.out_dir / QUERY_MODEL}
        elif load_run(model, only_sizes=True).model.doc.projection_dim:
            own |= OWN_PROJECTION
    if aligns:
        own["Alignment.every_steps"] = max(num_steps // 20, 1)
    else:
        own |= {
            "Logging.evaluate_every_steps": max(num_steps // 5, 1),
            "PairsOptions.dev_split": beir.dev_split(towers.dataset_dir),
        }
    return [f"{name}={value}" for name, value in own.items()] + [*settings.gin, *(settings.gin1 if aligns else settings.gin2)]
