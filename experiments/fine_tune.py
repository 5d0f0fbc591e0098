"""Gains of fine-tuning a pretrained model, on its training set and on others; prints one JSON line a run, then a summary.

python -m experiments.fine_tune --model=all-MiniLM-L6-v2/ --data_dir=../shared/data/beir --out_dir=runs/fine_tune

For every training set, method and seed, it runs a plain `de-jax train` with the method's recipe. Then `de-jax evaluate beir` scores
the run on the test split of that set, on its dev split if there is one ("<set>/dev"), and on other sets, where fine-tuning may
lower the scores. Last, `de-jax compare runs` compares the original model with all fine-tuned models on every such split. All
commands are printed to stderr, so that any line can be repeated by hand; finished work is not repeated. Nothing is chosen on a
test split: settings are equal for all runs and fixed in advance.

The first command below trains a student of three layers, with and without the scores of its own model as a teacher
(experiments/distillation.yaml). The second measures nDCG@10 by dimension, for embeddings trained to be cut and for embeddings that
are only cut (experiments/matryoshka.yaml). The learning rate of each arm is first chosen in a run on a dev split:

python -m experiments.fine_tune --model=all-MiniLM-L6-v2/ --data_dir=../shared/data/beir --train scifact medquad --zero_shot \\
    --methods student student_kl student_margin_mse --beside=student --settings PairsOptions.num_neg_docs=3 \\
    --num_steps=100 --batch_size=32 --max_query_length=32 --max_doc_length=64 --out_dir=runs/distil
python -m experiments.fine_tune --model=all-MiniLM-L6-v2/ --data_dir=../shared/data/beir --train scifact medquad --zero_shot \\
    --methods in_batch_softmax matryoshka --beside=in_batch_softmax --embedding_dims 384 192 96 48 --num_steps=100 \\
    --batch_size=32 --max_query_length=32 --max_doc_length=64 --out_dir=runs/matryoshka
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from de_jax import command
from de_jax.data.text import beir
from experiments import processes

Stage = tuple[str, dict[str, Any]]
"""A recipe, and its settings beside the common ones."""


WITHOUT_PATIENCE = {"Alignment.every_steps": 10, "Alignment.patience": None}
"""A first stage then runs all its updates, unless its towers are aligned earlier."""


def _light(layers: int) -> dict[str, list[Stage]]:
    """DAFT's two stages with a query tower of the model's first layers, and the same tower trained without the first stage."""
    tower, last = {"QUERY_LAYERS": tuple(range(layers))}, {"PairsOptions.dev_split": None}
    return {
        f"daft_{layers}": [("daft_stage1", {**tower, **WITHOUT_PATIENCE}), ("daft_stage2", last)],
        f"one_stage_{layers}": [("daft_one_stage", {**tower, **last})],
    }


THREE_LAYERS = {"pretrained_tower.layers": (0, 1, 2), "Initialization.init_layers": {"query": (0, 1, 2), "doc": (0, 1, 2)}}
"""A student: both towers have the model's first three layers."""
COSINES = {"kl_distillation.teacher_temperature": 0.05}
"""For a teacher whose scores are cosines, like the scores of `--model`."""

METHODS: dict[str, list[Stage]] = {
    "in_batch_softmax": [("fine_tune", {})],
    "in_batch_softmax_masked": [("fine_tune", {"PairsOptions.mask_positives": True})],
    "samtone": [("fine_tune", {"Recipe.loss": "@samtone", "samtone.same_tower": "query"})],
    "rand_neg": [("rand_neg", {})],
    "nce_neg": [("nce_neg", {})],
    "nce_neg_masked": [("nce_neg", {"PairsOptions.mask_positives": True})],
    "bm25_neg": [("bm25_neg", {})],
    "bm25_rand_neg": [("bm25_rand_neg", {})],
    "ance": [("ance_firstp", {})],
    # Mined as for "ance", trained on as in "bm25_rand_neg".
    "ance_rand_neg": [("ance_firstp", {"Recipe.loss": "@in_batch_softmax"})],
    "ance_norm": [("dance_norm", {})],
    "ance_dual": [("dance_dual", {"dance.temperature": 0.05})],
    "dance": [("dance", {})],
    **_light(1),
    **_light(2),
    **_light(3),
    "matryoshka": [("matryoshka", {})],
    # The same pairs and negatives with a teacher and without.
    "student": [("distil", {**THREE_LAYERS, "combined.losses": "(@in_batch_softmax,)"})],
    "student_kl": [("distil", {**THREE_LAYERS, **COSINES})],
    "student_margin_mse": [
        ("distil", {**THREE_LAYERS, "combined.losses": "(@in_batch_softmax, @margin_mse)", "margin_mse.temperature": 1.0})
    ],
}
"""The stages of each method. A model whose embeddings are cosines is given a temperature."""
TAUGHT = ("student", "student_kl", "student_margin_mse")
"""Methods whose batches have the scores of the original `--model`, a stand-in for a cross-encoder."""
BM25 = ("bm25_neg", "bm25_rand_neg", *TAUGHT)
MINED = {"ance": "docs", "ance_rand_neg": "docs", "ance_norm": "docs", "ance_dual": "docs and queries", "dance": "docs and queries"}
"""Methods whose runs mine, and the kinds of negatives that they mine."""


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    base = args.out_dir / "base"
    if not (base / "run.json").exists():
        lengths = [f"--max_query_length={args.max_query_length}", f"--max_doc_length={args.max_doc_length}"]
        processes.run(["de_jax", "import", "model", f"--from={args.model}", f"--run_dir={base}", "--dtype=bfloat16", *lengths])
    tested: dict[str, dict[str, list[str]]] = {}
    for trained_on, method, seed, run_dir in itertools.chain([(None, "none", 0, base)], _runs(base, args)):
        datasets = args.train if trained_on is None else [trained_on]
        with_dev = [name for name in datasets if "dev" in beir.find_splits(args.data_dir / name)]
        everywhere = list(dict.fromkeys([*datasets, *args.zero_shot]))
        reports = {}
        for dim in args.embedding_dims or [None]:
            reports |= _evaluated(run_dir, everywhere, "test", dim, args) | _evaluated(run_dir, with_dev, "dev", dim, args)
        scores = {name: report["dense"] for name, report in reports.items()}
        print(json.dumps({"trained_on": trained_on, "method": method, "seed": seed, "scores": scores}), flush=True)
        for name, report in reports.items():
            system = "before" if trained_on is None else f"{trained_on}-{method}"
            tested.setdefault(name, {}).setdefault(system, []).append(report["evaluation_dir"])
    print(json.dumps({"compared": {name: _compared(name, systems, args) for name, systems in tested.items()}}), flush=True)
    if args.beside:
        print(
            json.dumps({f"compared with {args.beside}": {name: _beside(name, systems, args) for name, systems in tested.items()}})
        )


def _runs(base: Path, args: argparse.Namespace) -> Iterator[tuple[str, str, int, Path]]:
    """(training set, method, seed, run folder) of every run, trained when it is asked for."""
    for dataset, method, seed in itertools.product(args.train, args.methods, args.seeds):
        run_dir = args.out_dir / f"{dataset}-{method}-{seed}"
        if not (run_dir / "checkpoints" / str(args.num_steps // len(METHODS[method]))).exists():
            _train(base, run_dir, dataset, method, seed, args)
        yield dataset, method, seed, run_dir


def _train(model: Path, run_dir: Path, dataset: str, method: str, seed: int, args: argparse.Namespace) -> None:
    """Trains the stages in order, each from the run of the previous stage; the run of the last stage is `run_dir`.

    The stages share the updates equally, so that every method has the same number.
    """
    stages = METHODS[method]
    num_steps = args.num_steps // len(stages)
    for number, (recipe, own) in enumerate(stages, start=1):
        folder = run_dir if number == len(stages) else run_dir.with_name(f"{run_dir.name}-stage{number}")
        settings = {
            "MODEL": model,
            "beir_pairs.dataset_dir": args.data_dir / dataset,
            "PairsOptions.batch_size": args.batch_size,
            "PairsOptions.max_query_length": args.max_query_length,
            "PairsOptions.max_doc_length": args.max_doc_length,
            "PairsOptions.seed": seed,
            "PairsOptions.mask_positives": False,  # but for the methods that set it
            "Initialization.seed": seed,
            "Optimization.optimizer": "@adamw",
            "Optimization.learning_rate": args.learning_rate,
            "Optimization.num_steps": num_steps,
            "Logging.log_every_steps": 10,
            "Logging.save_every_steps": num_steps,
            "linear.warmup_steps": num_steps // 10,
            **own,
            **dict(setting.split("=", 1) for setting in args.settings),
        }
        if method in BM25:
            settings["PairsOptions.negatives_dir"] = _bm25_negatives(dataset, args)
        if method in TAUGHT:
            settings["PairsOptions.teacher_scores"] = _teacher_scores(dataset, args)
        if method in MINED:
            settings["HardNegatives.mine_every_steps"] = args.mine_every_steps
            _copy_first_generation(folder, dataset, method, args)
        gin = [f"--gin.{name}={value}" for name, value in settings.items()]
        processes.run(["de_jax", "train", f"--gin_file=recipes/{recipe}.gin", f"--run_dir={folder}", *gin])
        model = folder


def _copy_first_generation(run_dir: Path, dataset: str, method: str, args: argparse.Namespace) -> None:
    """Copies the negatives that an earlier run with the same miner mined before its first update; they would be the same here."""
    alike = [name for name, kind in MINED.items() if kind == MINED[method]]
    generations = [args.out_dir / f"{dataset}-{name}-{seed}" / "negatives" / "000001" for name in alike for seed in args.seeds]
    first = next((folder for folder in generations if (folder / "manifest.json").exists()), None)
    if first and not (run_dir / "negatives").exists():
        print(f"cp -r {first} {run_dir / 'negatives'}/", file=sys.stderr, flush=True)
        shutil.copytree(first, run_dir / "negatives" / first.name)


def _bm25_negatives(dataset: str, args: argparse.Namespace) -> Path:
    """BM25's first 100 of each training pair, mined once."""
    folder: Path = args.out_dir / f"{dataset}-bm25"
    if not folder.exists():
        sizes = ["--num_neg_docs=100", "--last_rank=100"]
        processes.run(
            ["de_jax", "mine", "pairs", "--bm25", f"--dataset_dir={args.data_dir / dataset}", f"--negatives_dir={folder}", *sizes]
        )
    return folder


def _teacher_scores(dataset: str, args: argparse.Namespace) -> Path:
    """The original model's scores of the training pairs and of BM25's negatives, computed once."""
    folder: Path = args.out_dir / f"{dataset}-scores"
    if not (folder / "manifest.json").exists():
        of = [f"--dataset_dir={args.data_dir / dataset}", f"--negatives_dir={_bm25_negatives(dataset, args)}"]
        processes.run(["de_jax", "score", "pairs", *of, f"--model={args.out_dir / 'base'}", f"--out_dir={folder}"])
    return folder


def _evaluated(
    run_dir: Path, datasets: list[str], split: str, dim: int | None, args: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """The reports by "<set>", or "<set>/<split>" for another split than test; with "@<dim>" where embeddings are cut."""
    if not datasets:
        return {}
    folders = [str(args.data_dir / dataset) for dataset in datasets]
    cut = [f"--embedding_dim={dim}"] if dim else []
    evaluate = [f"--run_dir={run_dir}", f"--split={split}", *cut, "--no_bm25", "--skip_empty", "--dataset_dirs", *folders]
    reports = processes.run(["de_jax", "evaluate", "beir", *evaluate])["sets"]
    end = ("" if split == "test" else f"/{split}") + (f"@{dim}" if dim else "")
    return {f"{report['dataset']}{end}": report for report in reports}


def _beside(name: str, systems: dict[str, list[str]], args: argparse.Namespace) -> dict[str, Any]:
    """The report of compare runs for each training set: its systems, with the method of `--beside` as the baseline."""
    found = {}
    for dataset in args.train:
        own = {system: folders for system, folders in systems.items() if system.startswith(f"{dataset}-")}
        first = f"{dataset}-{args.beside}"
        if first in own and len(own) > 1:
            found |= {dataset: _compared(name, {first: own.pop(first), **own}, args)}
    return found


def _compared(name: str, systems: dict[str, list[str]], args: argparse.Namespace) -> dict[str, Any]:
    """The report of compare runs; the first system is the baseline."""
    arguments = [f"{system}={','.join(folders)}" for system, folders in systems.items()]
    dataset, _, split = name.partition("@")[0].partition("/")
    qrels = beir.find_qrels(args.data_dir / dataset, split or "test")
    found: dict[str, Any] = processes.run(["de_jax", "compare", "runs", f"--qrels={qrels}", "--systems", *arguments])["systems"]
    return found


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="what import model takes, such as a folder of sentence-transformers")
    parser.add_argument("--data_dir", type=Path, required=True, help="holds the BEIR folders")
    parser.add_argument("--train", nargs="+", default=["scifact", "nfcorpus", "medquad"], help="sets to train on, one a run")
    parser.add_argument(
        "--zero_shot", nargs="*", default=["scifact", "nfcorpus", "cranfield"], help="sets to test every run on beside its own"
    )
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=["in_batch_softmax", "samtone"])
    parser.add_argument("--beside", choices=list(METHODS), help="the method that the others are compared with beside the model")
    parser.add_argument(
        "--embedding_dims", nargs="+", type=int, help="evaluate embeddings cut to each of these; default whole ones"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--num_steps", type=int, default=40, help="updates, of all stages of a method together (default 40)")
    parser.add_argument("--mine_every_steps", type=int, default=20, help="updates between two minings of the run itself")
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--max_query_length", type=int, default=64, help="tokens (default 64)")
    parser.add_argument("--max_doc_length", type=int, default=128, help="tokens, in training and in tests (default 128)")
    parser.add_argument(
        "--settings", nargs="+", default=[], metavar="NAME=VALUE", help="of all recipes, such as PairsOptions.mask_positives=True"
    )
    parser.add_argument("--out_dir", type=Path, default=Path("runs/fine_tune"), help="gets a run folder each")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
