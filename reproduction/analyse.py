"""`python -m reproduction analyse`: the papers' reports about a run's embeddings and its negatives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from de_jax.arguments import Model
from de_jax.data.batches.pair_batches import TrainingPairs
from de_jax.data.negatives.generations import open_newest
from de_jax.data.sources.training_set import open_stores, qrel_pairs, text_hashes
from de_jax.data.text import beir
from de_jax.data.text.passages import passages_of
from de_jax.evaluation.task import Policy, beir_task
from de_jax.files.folders import atomic_dir, require_replaceable
from de_jax.files.outputs import progress_bar, write_json
from de_jax.reports import plots
from de_jax.settings import LocalPath, PositiveFloat, PositiveInt, Seed
from de_jax.training.run.run_folder import load_run
from de_jax.training.step import grad_norms
from reproduction import embedding_analysis, embedding_report, negative_analysis, negative_report

EMBEDDINGS, NEGATIVES = "analysis of embeddings", "analysis of negatives"
"""Kinds of folders."""


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

    python -m reproduction analyse embeddings --run_dir=runs/sde --dataset_dir=data/beir/scifact

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

    python -m reproduction analyse negatives --run_dir=runs/ance --dataset_dir=data/beir/scifact \\
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
    pairs, passages = qrel_pairs(qrels, *stores), passages_of(stores[1], first.doc)
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
