"""`de-jax analyse`: reports about data, a run, its embeddings and its negatives."""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path
from typing import Any

import jax

from de_jax.arguments import Checkpoint, Columns, Model, open_model
from de_jax.data import data_report
from de_jax.data.batches.pair_batches import TrainingPairs
from de_jax.data.negatives.generations import open_newest
from de_jax.data.sources.training_set import open_stores, qrel_pairs, text_hashes
from de_jax.data.text import beir
from de_jax.evaluation import embedding_analysis, negative_analysis
from de_jax.evaluation.task import Policy, beir_task
from de_jax.files.folders import atomic_dir, require_replaceable
from de_jax.files.outputs import progress_bar, write_json
from de_jax.reports import embedding_report, negative_report, plots
from de_jax.retrieval import maxp
from de_jax.settings import LocalPath, PositiveFloat, PositiveInt, Seed
from de_jax.training.mesh import sharding
from de_jax.training.optim import paths
from de_jax.training.run.run_folder import DATA_REPORT_FILE, Run, load_run
from de_jax.training.run.run_log import METRICS_FILE, read_metrics
from de_jax.training.run.run_settings import read_recipe_file
from de_jax.training.step import grad_norms

RUN, EMBEDDINGS, NEGATIVES = "report of a run", "analysis of embeddings", "analysis of negatives"
"""Kinds of folders."""
USED_BY = {"query": "query tower", "doc": "doc tower", "shared": "both towers"}


def analyse_data(
    source: LocalPath, /, columns: Columns, *, run_dir: LocalPath | None = None, out_dir: Path | None = None
) -> dict[str, Any]:
    """Counts the content of a table or a BEIR folder: rows, texts, copies, contradictions, negatives, lengths and scripts.

    de-jax analyse data qa.csv
    de-jax analyse data data/beir/scifact --run_dir=all-MiniLM-L6-v2 --out_dir=report

    Nothing is trained. Rows that cannot be used are counted, with the first one's fault. Lengths are words, or with --run_dir the
    tokens of that model. Prints one JSON object.

    Args:
        source: a table, a BEIR folder, or a data set of the hub.
        run_dir: count tokens of this model.
        out_dir: write data_report.json and lengths.png to this folder.
    """
    if out_dir:
        require_replaceable(out_dir, data_report.KIND)
    length_of = data_report.words
    if run_dir:
        tokenizer = open_model(run_dir).doc.tokenizer
        length_of = lambda texts: map(len, tokenizer.encode(list(texts)))  # noqa: E731
    if data_report.is_table(source):
        table = dataclasses.replace(columns, skip_bad_rows=True).of([source])
        report, lengths = data_report.of_table(table, length_of)
    else:
        report, lengths = data_report.of_folder(source, columns.split, length_of)
    report["unit"] = "tokens" if run_dir else "words"
    if out_dir:
        with atomic_dir(out_dir, data_report.KIND) as temporary:
            write_json(temporary / DATA_REPORT_FILE, report)
            plots.lengths(lengths, temporary / "lengths.png", title=f"Texts of {report['name']}", unit=report["unit"])
    return report


def analyse_run(model: Checkpoint, *, out_dir: Path | None = None) -> dict[str, Any]:
    """Shows a run: settings, training curves, parameters, shared parts and sharding.

    de-jax analyse run --run_dir=runs/sde

    Writes curves.png and parameters.txt to --out_dir and prints one JSON object.

    Args:
        out_dir: output folder; default <run_dir>/report.
    """
    plots.require()
    run = model.open()
    folder = out_dir or run.run_dir / "report"
    require_replaceable(folder, RUN)
    lines = read_metrics(run.run_dir / METRICS_FILE) if (run.run_dir / METRICS_FILE).is_file() else []
    with atomic_dir(folder, RUN) as temporary:
        if lines:
            plots.training_curves(run.run_dir / METRICS_FILE, temporary / "curves.png", title=run.run_dir.name)
        (temporary / "parameters.txt").write_text(_parameter_table(run))
    return {
        "run_dir": str(run.run_dir),
        "step": run.step,
        "recipe": read_recipe_file(run.run_dir),
        "shared": list(run.model.shared),
        "max_query_length": run.query.max_length,
        "max_doc_length": run.doc.max_length,
        "max_passages": run.doc.max_passages,
        "num_parameters": _counts(run),
        "last": lines[-1] if lines else None,
        "best_dev": max((line for line in lines if "dev/ndcg@10" in line), key=lambda line: line["dev/ndcg@10"], default=None),
        "report": str(folder),
    }


def analyse_embeddings(
    model: Model,
    *,
    dataset_dir: LocalPath,
    split: str = "test",
    skip_empty: bool = False,
    keep_identical_ids: bool = False,
    max_docs: PositiveInt | None = None,
    depth: PositiveInt = 100,
    seed: Seed = 0,
    out_dir: Path | None = None,
) -> dict[str, Any]:
    """Analyses a run's embeddings on a BEIR data set: maps, distances and groups.

    de-jax analyse embeddings --run_dir=runs/sde --dataset_dir=data/beir/scifact

    Writes pictures, analysis.json and report.html. Documents are embedded once and kept in the run's folder. --max_docs embeds a
    sample that contains all judged documents; scores in a sample are higher than in the whole collection. Prints the JSON object.

    Args:
        max_docs: embed a sample of this many documents; default all.
        depth: ranks counted as recalled.
        seed: seed of samples and t-SNE.
        out_dir: output folder; a former analysis in it is replaced; default <run_dir>/analysis/<data set>-<split>-<step>.
    """
    plots.require()
    task = beir_task(dataset_dir, split)  # fails here, before the model loads
    if out_dir:
        require_replaceable(out_dir, EMBEDDINGS)
    run = model.open()
    folder = out_dir or run.run_dir / "analysis" / f"{task.name}-{split}-{run.step}"
    require_replaceable(folder, EMBEDDINGS)
    policy = Policy(skip_empty=skip_empty, drop_identical_ids=not keep_identical_ids)
    texts = embedding_analysis.embed(run, task, policy=policy, max_docs=max_docs, seed=seed)
    analysis = embedding_analysis.analyse(texts, depth=depth, seed=seed)
    about = {"run": str(model.run_dir), "step": run.step, "dataset": task.name, "split": split, "seed": seed}
    if max_docs:
        about["documents"] = f"a sample of {len(texts.docs):,} with all judged ones in it"
    with atomic_dir(folder, EMBEDDINGS) as temporary:
        write_json(temporary / "analysis.json", {**about, **analysis.numbers})
        title = f"Embeddings of {run.run_dir.name} on {task.name}"
        embedding_report.write(analysis, temporary, title, about, seed=seed)
    return {"report": str(folder / "report.html"), **about, **analysis.numbers}


def analyse_negatives(
    *,
    run_dir: Path,
    dataset_dir: LocalPath,
    negatives: dict[str, LocalPath] | None = None,
    steps: tuple[str, ...] = (),
    split: str = "train",
    skip_empty: bool = False,
    keep_identical_ids: bool = False,
    num_pairs: PositiveInt = 64,
    num_negatives: PositiveInt = 1,
    temperature: PositiveFloat | None = None,
    groups: dict[str, str] | None = None,
    depth: PositiveInt = 100,
    seed: Seed = 0,
    out_dir: Path | None = None,
) -> dict[str, Any]:
    """Compares kinds of negatives at one or more checkpoints of a run: gradients, loss and ranks.

    de-jax analyse negatives --run_dir=runs/ance --dataset_dir=data/beir/scifact \\
        --negatives bm25=runs/bm25/negatives/000001 ance=runs/ance/negatives --steps 0 500 1000

    Measures each kind on the same training pairs: loss, gradient norms before clipping, score margins, ranks, and overlap with the
    model's top 100. Documents of other pairs (in_batch) and any documents (random) are always included. Pictures, analysis.json and
    report.html go to --out_dir. Prints one JSON object.

    Args:
        run_dir: the run to analyse.
        dataset_dir: the run's BEIR folder of training data.
        negatives: name=folder of a generation, or of a folder of generations: its newest.
        steps: checkpoints: steps, or best; default the newest.
        split: split of the pairs.
        num_pairs: sampled training pairs.
        num_negatives: negatives per pair in the loss, 1 as in ANCE.
        temperature: temperature of the loss; default the run's.
        groups: name=pattern of groups of parameter paths; default thirds.
        depth: depth of the ranking for the overlap.
        seed: seed of the sample and of the drawn negatives.
        out_dir: output folder; a former analysis in it is replaced; default <run_dir>/analysis/negatives-<data set>-<split>.
    """
    plots.require()
    patterns, name = groups or {}, beir.folder_of(dataset_dir).resolve().name
    folder = out_dir or run_dir / "analysis" / f"negatives-{name}-{split}"
    require_replaceable(folder, NEGATIVES)
    folders = negatives or {}
    generations = {kind: open_newest(of_kind) for kind, of_kind in folders.items()}
    qrels = beir.read_qrels(beir.find_qrels(dataset_dir, split))
    wanted = {load_run(run_dir, step, only_sizes=True).step: step for step in steps or [None]}  # all are there
    first = load_run(run_dir, only_sizes=True)
    chosen = negative_analysis.temperature_of(first, temperature)
    grad_norms.group_norms(first.params, patterns)  # refuses patterns that match nothing
    stores = open_stores(dataset_dir, first.query.tokenizer, first.doc.tokenizer, skip_empty=skip_empty)
    pairs, passages = qrel_pairs(qrels, *stores), maxp.passages_of(first, stores[1])
    texts = TrainingPairs(name, *stores, pairs, text_hashes(dataset_dir), passages, not keep_identical_ids)
    counts = {"num_pairs": num_pairs, "num_negatives": num_negatives}
    sample = negative_analysis.sample(texts, generations, seed=seed, **counts)
    options: dict[str, Any] = {"temperature": chosen, "groups": patterns, "depth": depth}
    with progress_bar(total=len(wanted) * (1 + len(sample.kinds)), desc="analyse", delay=0.5) as bar:
        runs = (load_run(run_dir, step) for _, step in sorted(wanted.items()))  # a trainer may have written newer ones
        checkpoints = list(negative_analysis.analyse(runs, sample, progress=bar.update, **options))
    about = {"run": str(run_dir), "dataset": name, "split": split, "seed": seed, "temperature": chosen}
    about |= {"num_pairs": len(sample.pairs), "drawn_from": sample.num_pairs, "num_negatives": num_negatives}
    about["negatives"] = {kind: str(generation.folder) for kind, generation in generations.items()}
    with atomic_dir(folder, NEGATIVES) as temporary:
        title = f"Negatives of {run_dir.name} on {name}"
        report = negative_report.write(temporary, title, about, checkpoints, depth=depth)
    return {"report": str(folder / "report.html"), **report}


def _parameter_table(run: Run) -> str:
    rows = [("parameter", "shape", "dtype", "number", "used by", "on the mesh")]
    for path, leaf in zip(paths.all_paths(run.params), jax.tree.leaves(run.params), strict=True):
        owner = path.partition("/")[0]
        rows.append((path, str(leaf.shape), str(leaf.dtype), f"{leaf.size:,}", USED_BY[owner], sharding.describe(leaf)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]]) + "\n"


def _counts(run: Run) -> dict[str, Any]:
    counts: collections.Counter[str] = collections.Counter()
    for path, leaf in zip(paths.all_paths(run.params), jax.tree.leaves(run.params), strict=True):
        counts["/".join(path.split("/")[:2])] += leaf.size
    return {**counts, "total": sum(counts.values())}
